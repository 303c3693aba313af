"""Every metric kvtier exports, in one table, and the recorder the core writes to.

The core knows no metrics library: it adds to a `Recorder`; a connector drains it into the engine's own /metrics, the
command line into prometheus-client. Sums over labels are conserved: `kvtier_tokens` over all sources equals the prompt
tokens of finished requests, and its `recompute` share equals the sum of `kvtier_miss_tokens` over all reasons.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

Labels = tuple[str, ...]


class Kind(Enum):
    """How values of a metric combine."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricDef(NamedTuple):
    """One exported metric. Counters get the suffix `_total` on the wire."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()


_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
_SECONDS = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)

TABLE: tuple[MetricDef, ...] = (
    MetricDef("kvtier_tokens", Kind.COUNTER, "Prompt tokens of ended requests by where they came from.", ("source",)),
    MetricDef("kvtier_miss_tokens", Kind.COUNTER, "Recomputed prompt tokens by the one reason why.", ("reason",)),
    MetricDef("kvtier_requests", Kind.COUNTER, "Ended requests by how they stopped.", ("stop",)),
    MetricDef("kvtier_bytes", Kind.COUNTER, "Bytes moved by tier and direction.", ("tier", "direction")),
    MetricDef(
        "kvtier_seconds", Kind.COUNTER, "Seconds spent moving bytes, summed over I/O threads.", ("tier", "direction")
    ),
    MetricDef("kvtier_blocks_stored", Kind.COUNTER, "Rows published by tier.", ("tier",)),
    MetricDef("kvtier_evictions", Kind.COUNTER, "Rows dropped by tier and reason.", ("tier", "reason")),
    MetricDef("kvtier_hbm_steered", Kind.COUNTER, "Device blocks moved to where the engine takes blocks next."),
    MetricDef("kvtier_faults", Kind.COUNTER, "Rows a tier failed to move, by reason.", ("tier", "reason")),
    MetricDef("kvtier_stores_refused", Kind.COUNTER, "Rows not admitted, by tier and reason.", ("tier", "reason")),
    MetricDef("kvtier_gate_decisions", Kind.COUNTER, "Loads by what the gate chose: all, part, none.", ("decision",)),
    MetricDef(
        "kvtier_gate_seconds",
        Kind.COUNTER,
        "Seconds the gate expected: of its loads, the part of them nothing hides, the recompute left, the recompute "
        "without any load, and the queue at the GPU.",
        ("term",),
    ),
    MetricDef("kvtier_hints", Kind.COUNTER, "Hints by kind and by what became of them.", ("kind", "outcome")),
    MetricDef("kvtier_hint_returns", Kind.COUNTER, "Returns announced by hints, by how they went.", ("how",)),
    MetricDef("kvtier_hints_given_up", Kind.COUNTER, "Hinted sessions let go because memory was needed."),
    MetricDef("kvtier_prefetched_rows", Kind.COUNTER, "Rows brought to memory before anybody waited.", ("why",)),
    MetricDef("kvtier_prefetched_rows_used", Kind.COUNTER, "Those of them that were then loaded.", ("why",)),
    MetricDef("kvtier_conservative_entries", Kind.COUNTER, "Times conservative mode was entered.", ("reason",)),
    MetricDef("kvtier_conservative_seconds", Kind.COUNTER, "Seconds in conservative mode."),
    MetricDef("kvtier_recovered_rows", Kind.COUNTER, "Rows found again after a restart.", ("tier",)),
    MetricDef("kvtier_discoveries", Kind.COUNTER, "Questions to shared tiers by how they ended.", ("tier", "outcome")),
    MetricDef("kvtier_discovered_rows", Kind.COUNTER, "Rows of other engines found in a shared tier.", ("tier",)),
    MetricDef(
        "kvtier_codec_bytes",
        Kind.COUNTER,
        "Bytes through a tier's codec, as the engine has them (plain) and as the tier has them (encoded).",
        ("tier", "direction", "form"),
    ),
    MetricDef(
        "kvtier_codec_seconds",
        Kind.COUNTER,
        "Seconds spent encoding and decoding, summed over I/O threads.",
        ("tier", "direction"),
    ),
    MetricDef(
        "kvtier_codec_refused", Kind.COUNTER, "Rows a codec could not write down or read back.", ("tier", "reason")
    ),
    MetricDef("kvtier_canaries", Kind.COUNTER, "Cached rows computed again, by how they compared.", ("outcome",)),
    MetricDef(
        "kvtier_canary_error",
        Kind.HISTOGRAM,
        "Relative error of a cached row against the one computed again.",
        (),
        (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0),
    ),
    MetricDef("kvtier_resident_bytes", Kind.GAUGE, "Bytes of published rows.", ("tier",)),
    MetricDef("kvtier_capacity_bytes", Kind.GAUGE, "Cap of the tier.", ("tier",)),
    MetricDef("kvtier_medium_bytes", Kind.GAUGE, "Bytes the tier occupies on its medium.", ("tier",)),
    MetricDef("kvtier_dedup_ratio", Kind.GAUGE, "Rows published for each row kept, where `dedup` is on.", ("tier",)),
    MetricDef("kvtier_hinted_sessions", Kind.GAUGE, "Sessions with hints that hold."),
    MetricDef("kvtier_conservative", Kind.GAUGE, "1 in conservative mode."),
    MetricDef("kvtier_gpu_busy", Kind.GAUGE, "Share of its time the GPU computes prompts (60 s average)."),
    MetricDef(
        "kvtier_link_busy", Kind.GAUGE, "Share of its time a tier's link serves reads somebody waits for.", ("tier",)
    ),
    MetricDef("kvtier_leases", Kind.GAUGE, "Leases now outstanding."),
    MetricDef("kvtier_queue_depth", Kind.GAUGE, "Rows waiting for or in the mover.", ("direction",)),
    MetricDef("kvtier_breaker_state", Kind.GAUGE, "0 closed, 1 half-open, 2 open.", ("tier",)),
    MetricDef("kvtier_failed_rows", Kind.GAUGE, "Rows that failed lately and are left alone for a while.", ("tier",)),
    MetricDef("kvtier_latency_seconds", Kind.GAUGE, "Latency of a tier as measured last.", ("tier", "direction")),
    MetricDef(
        "kvtier_bandwidth_bytes_per_second",
        Kind.GAUGE,
        "Bandwidth of one call into a tier as measured last.",
        ("tier", "direction"),
    ),
    MetricDef("kvtier_segments", Kind.GAUGE, "Segments in the prefix tree, resident or remembered."),
    MetricDef("kvtier_index_blocks", Kind.GAUGE, "Blocks in the prefix tree, resident or remembered."),
    MetricDef("kvtier_load_wait_seconds", Kind.HISTOGRAM, "Wait of a request for its promotions.", (), _SECONDS),
    MetricDef(
        "kvtier_effective_hit",
        Kind.HISTOGRAM,
        "1 - T(decision) / T(no load) as the gate saw it: attention left, load and queue included.",
        (),
        _SHARES,
    ),
    MetricDef("kvtier_discovery_seconds", Kind.HISTOGRAM, "Time a shared tier took to answer.", (), _SECONDS),
    MetricDef("kvtier_control_seconds", Kind.HISTOGRAM, "Control-plane time of one call.", ("call",), _SECONDS),
)

BY_NAME: dict[str, MetricDef] = {definition.name: definition for definition in TABLE}


class Recorder:
    """Collects values between two drains. Not thread-safe: the control thread writes and drains."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Labels], float] = {}
        self._observations: dict[tuple[str, Labels], list[float]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter. Zero adds nothing."""
        if amount:
            key = (name, labels)
            self._sums[key] = self._sums.get(key, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._sums[(name, labels)] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self._observations.setdefault((name, labels), []).append(value)

    def drain(self) -> tuple[dict[tuple[str, Labels], float], dict[tuple[str, Labels], list[float]]]:
        """Hand out and forget what was collected: (sums and gauges, observations), by (name, labels)."""
        sums, observations = self._sums, self._observations
        self._sums, self._observations = {}, {}
        return sums, observations
