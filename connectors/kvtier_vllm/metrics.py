"""kvtier's metrics on vLLM's own /metrics, through its connector-metrics hook."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.observe.metrics import BY_NAME, TABLE, Kind, Recorder


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """kvtier's table as vLLM wants it."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for metric in TABLE:
        if metric.kind is Kind.COUNTER:
            definitions[metric.name] = OffloadingCounterMetadata(metric.help, metric.labels)
        elif metric.kind is Kind.GAUGE:
            definitions[metric.name] = OffloadingGaugeMetadata(metric.help, metric.labels)
        else:
            definitions[metric.name] = OffloadingHistogramMetadata(metric.help, metric.labels, metric.buckets)
    return definitions


def drain(recorder: Recorder) -> OffloadingConnectorStats | None:
    """What was recorded since the last call; None if nothing."""
    sums, observations = recorder.drain()
    if not sums and not observations:
        return None
    stats = OffloadingConnectorStats()
    for (name, labels), value in sums.items():
        if BY_NAME[name].kind is Kind.COUNTER:
            stats.increase_counter(name, value, labels)
        else:
            stats.set_gauge(name, value, labels)
    for (name, labels), values in observations.items():
        for value in values:
            stats.observe_histogram(name, value, labels)
    return stats
