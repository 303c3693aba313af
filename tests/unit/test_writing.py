"""Write admission and conservative mode over a real TierCache: what goes down, when, and what is never left without a
head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.cache.writing import read_prices
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.index.residency import ABSENT
from kvtier.place.mode import Mode
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

ROW = 64


def engine_of(**options: Any) -> FakeEngine:
    memory = DramTier.over(np.zeros(64 * ROW, np.uint8), ROW, 64, ROW, checksums=False)
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, **options)
    cache = TierCache(config, Geometry(16), memory, memory.row, [MemoryTier(ROW, 256, name="nvme")], VirtualClock(10.0))
    for n in (16, 64, 160, 320):
        cache.prefill.observe([(0, n)], n * 1e-4)
    return FakeEngine(cache)


def below(engine: FakeEngine, tokens: range) -> int:
    match = engine.cache.tree.walk(token_chain(tokens))
    return int((engine.cache.lower[0].residency.slots_of(match) != ABSENT).sum())


def prices(tmp_path: Path, wear: float) -> str:
    path = tmp_path / "prices.json"
    path.write_text(f'{{"tiers": {{"nvme": {{"wear_per_gb": {wear}}}}}}}')
    return str(path)


def test_everything_is_written_as_it_is_computed_by_default() -> None:
    engine = engine_of()
    request = engine.open(range(10), 1)
    engine.lookup(request)
    engine.cache.commit_store(request, engine.compute(request))
    engine.settle()
    assert below(engine, range(10)) == 10, "not only at its end"
    engine.finish(request)
    engine.cache.close()


def test_a_dear_medium_takes_only_what_is_shared_and_a_cheap_one_all_at_the_end(tmp_path: Path) -> None:
    dear = engine_of(write_admission="value", prices_file=prices(tmp_path, 1e9))
    for tail in (range(100, 104), range(200, 204), range(100, 106)):
        dear.serve([*range(4), *tail])
        dear.settle()
        dear.cache.clock.advance(1.0)  # type: ignore[attr-defined]
    assert below(dear, range(4)) == 4, "two sessions share it"
    match = dear.cache.tree.walk(token_chain([*range(4), *range(100, 106)]))
    assert int((dear.cache.lower[0].residency.slots_of(match) != ABSENT).sum()) == 4
    sums, _ = dear.cache.recorder.drain()
    assert sums["kvtier_stores_refused", ("nvme", "value")] > 0
    dear.cache.check_integrity()
    dear.cache.close()

    cheap = engine_of(write_admission="value", prices_file=prices(tmp_path, 1e-12))
    request = cheap.open(range(10), 1)
    cheap.lookup(request)
    cheap.cache.commit_store(request, cheap.compute(request))
    cheap.settle()
    assert below(cheap, range(10)) == 0, "its worth is not known while it runs"
    cheap.finish(request)
    cheap.settle()
    assert below(cheap, range(10)) == 10
    assert cheap.cache.leases() == 0
    cheap.cache.close()


def test_in_conservative_mode_nothing_is_written_down_and_it_is_made_up_for_later() -> None:
    engine = engine_of()
    engine.cache.watch.machine.mode = Mode.CONSERVATIVE
    engine.serve(range(10))
    engine.settle()
    assert below(engine, range(10)) == 0
    engine.cache.watch.machine.mode = Mode.NORMAL
    engine.serve(range(12))
    engine.settle()
    assert below(engine, range(12)) == 12, "heads before tails, as ever"
    engine.cache.close()


def test_a_workload_without_reuse_reads_nothing_from_any_tier() -> None:
    engine = engine_of()
    for i in range(40):
        assert engine.serve(range(1000 * i, 1000 * i + 8)) == 0
        engine.cache.stepped()
        engine.settle()
    assert engine.cache.lower[0].tier.stats().read_bytes == 0
    sums, _ = engine.cache.recorder.drain()
    assert not any(name == "kvtier_bytes" and labels[1] == "read" for name, labels in sums)
    assert engine.cache.leases() == 0
    engine.cache.close()


def test_prices_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prices(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="write_admission"):
        CacheConfig(write_admission="sometimes")
