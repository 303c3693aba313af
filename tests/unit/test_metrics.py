"""The metrics table: documented to the letter, and a recorder that forgets nothing and counts nothing twice."""

from __future__ import annotations

from pathlib import Path

from kvtier.model.request import MissReason
from kvtier.observe.metrics import TABLE, Kind, Recorder

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_metric_and_every_reason_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    for metric in TABLE:
        name = metric.name + ("_total" if metric.kind is Kind.COUNTER else "")
        labels = ", ".join(metric.labels) or "–"
        assert f"| `{name}` | {metric.kind.value} | {labels} | {metric.help} |" in text
    for reason in MissReason:
        assert f"`{reason.value}`" in text


def test_every_option_is_documented_with_its_default() -> None:
    from kvtier.config import CacheConfig

    text = (DOCS / "configuration.md").read_text()
    for name in CacheConfig.__struct_fields__:
        value = repr(getattr(CacheConfig(), name)).replace("''", '""')
        assert f"| `{name}` | `{value}` |" in text


def test_a_drain_hands_out_everything_once() -> None:
    recorder = Recorder()
    recorder.add("kvtier_bytes", 5, "dram", "read")
    recorder.add("kvtier_bytes", 7, "dram", "read")
    recorder.add("kvtier_bytes", 0, "nvme", "read")
    recorder.set("kvtier_leases", 3)
    recorder.observe("kvtier_load_wait_seconds", 0.5)
    sums, observations = recorder.drain()
    assert sums == {("kvtier_bytes", ("dram", "read")): 12, ("kvtier_leases", ()): 3}
    assert observations == {("kvtier_load_wait_seconds", ()): [0.5]}
    assert recorder.drain() == ({}, {})
