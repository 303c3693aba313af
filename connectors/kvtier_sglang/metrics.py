"""kvtier's metrics on SGLang's own /metrics.

SGLang runs prometheus-client in multi-process mode: every process writes its values to files in a folder the server
sets, and the HTTP process adds them up. So creating the metrics in the scheduler is all that is needed, once for a
process, however often a storage level is attached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.cache.storage_cache import StorageCache
from kvtier.observe.metrics import BY_NAME, TABLE, Kind

_metrics: dict[str, Any] = {}


def export(cache: StorageCache, resident_bytes: Mapping[str, int]) -> None:
    """Add what the cache counted since the last call to the exported metrics, and what other tiers hold."""
    sums, observations = cache.drain()
    metrics = _created()
    for tier, n_bytes in resident_bytes.items():
        metrics["kvtier_resident_bytes"].labels(tier).set(n_bytes)
    for (name, labels), value in sums.items():
        metric = metrics[name].labels(*labels) if labels else metrics[name]
        if BY_NAME[name].kind is Kind.COUNTER:
            metric.inc(value)
        else:
            metric.set(value)
    for (name, labels), values in observations.items():
        metric = metrics[name].labels(*labels) if labels else metrics[name]
        for value in values:
            metric.observe(value)


def _created() -> dict[str, Any]:
    """The table as metrics. Made late: prometheus-client looks for its folder when it is first imported."""
    if not _metrics:
        import prometheus_client

        for definition in TABLE:
            name, text, labels = definition.name, definition.help, definition.labels
            if definition.kind is Kind.COUNTER:
                _metrics[name] = prometheus_client.Counter(name, text, labels)
            elif definition.kind is Kind.GAUGE:
                mode = "livemax" if name == "kvtier_breaker_state" else "livesum"
                _metrics[name] = prometheus_client.Gauge(name, text, labels, multiprocess_mode=mode)
            else:
                _metrics[name] = prometheus_client.Histogram(name, text, labels, buckets=definition.buckets)
    return _metrics
