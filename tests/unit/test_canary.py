"""Canaries find what checksums cannot: bytes that are what was written, but not what the model computes. Seals find
memory that changed under the cache before a tier below is given it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache.canary import WRONG_BEYOND, relative_error
from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

ROW = 64


def make(share: float = 1.0, dtype: str = "float16", *lower: MemoryTier) -> FakeEngine:
    memory = DramTier.over(np.zeros(32 * ROW, np.uint8), ROW, 32, ROW, checksums=False)
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, canary_share=share)
    return FakeEngine(TierCache(config, Geometry(16, dtype=dtype), memory, memory.row, lower, VirtualClock()))


def totals(engine: FakeEngine) -> dict[tuple[str, tuple[str, ...]], float]:
    return engine.cache.recorder.drain()[0]


def memory_slot(engine: FakeEngine, tokens: range, block: int) -> int:
    request = engine.open(tokens, 1)
    slots = engine.cache.memory.residency.slots_of(engine.cache.tree.walk(request.chain))
    engine.finish(request)
    return int(slots[block, 0])


def bf16(values: list[float]) -> memoryview:
    return memoryview((np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)).cast("B")


def test_a_canary_computes_what_is_cached_and_finds_it_the_same() -> None:
    engine = make()
    engine.serve(range(6))
    assert engine.serve(range(6)) == 0, "all of it could have been loaded"
    sums, observed = engine.cache.recorder.drain()
    assert sums["kvtier_canaries", ("same",)] == 6
    assert observed["kvtier_canary_error", ()] == [0.0] * 6
    assert sums["kvtier_miss_tokens", ("canary",)] == 6 * 16
    assert engine.cache.memory.tier.stats().used_rows == 6, "the rows to compare were given back"
    assert engine.cache.leases() == 0
    engine.cache.check_integrity()
    engine.cache.close()


def test_a_canary_waits_for_nothing_that_was_looked_ahead_for() -> None:
    """What a plan made ahead says is pending stays so for ever: nobody asks about it again."""
    engine = make(1.0, "float16", MemoryTier(ROW, 32, name="nvme"))
    engine.serve(range(6))
    engine.settle()
    engine.cache.memory.clear()
    engine.cache.epoch += 1
    request = engine.open(range(6), 1)
    engine.cache.stepped()
    assert engine.cache.lookup(request, 0) is not None
    assert request.plan is None, "an engine that reads the plan finds nothing"
    assert engine.run(request) == 0
    engine.settle()
    assert engine.cache.leases() == 0
    assert totals(engine).get(("kvtier_prefetched_rows", ("look_ahead",)), 0) == 0
    engine.cache.close()


def test_what_is_grossly_wrong_leaves_every_tier() -> None:
    below = MemoryTier(ROW, 32, name="nvme")
    engine = make(1.0, "float16", below)
    engine.serve(range(6))
    engine.settle()
    engine.cache.memory_row(memory_slot(engine, range(6), 3))[:] = bytes(range(1, ROW + 1))
    totals(engine)
    engine.serve(range(6))
    sums = totals(engine)
    assert sums["kvtier_canaries", ("wrong",)] == 1
    assert sums["kvtier_canaries", ("same",)] == 3, "those before it; those after it are gone with it"
    assert sums["kvtier_canaries", ("gone",)] == 2
    assert engine.cache.memory.residency.resident_rows == 3
    assert engine.cache.lower[0].residency.resident_rows == 3
    engine.settle()
    assert engine.cache.leases() == 0
    engine.cache.close()


def test_a_little_difference_is_what_floating_point_does() -> None:
    exact = [1.0, -2.0, 3.0, 0.5]
    assert relative_error(bf16(exact), bf16(exact), "bfloat16") == 0
    assert 0 < relative_error(bf16([1.0, -2.0, 3.02, 0.5]), bf16(exact), "bfloat16") < WRONG_BEYOND
    assert relative_error(bf16([3.0, 1.0, -2.0, 0.5]), bf16(exact), "bfloat16") > WRONG_BEYOND
    assert relative_error(bf16([float("nan")] * 4), bf16(exact), "bfloat16") == float("inf")
    assert relative_error(memoryview(b"abcd"), memoryview(b"abce"), "") == float("inf")


def test_only_the_share_asked_for_is_drawn_and_none_by_default() -> None:
    engine = make(0.25)
    engine.serve(range(2))
    totals(engine)
    served = [engine.serve(range(2)) for _ in range(200)]
    assert 25 <= served.count(0) <= 75
    engine.cache.close()
    assert CacheConfig().canary_share == 0
    with pytest.raises(ConfigError, match="canary_share"):
        CacheConfig(canary_share=2.0)


def test_memory_that_changed_is_not_written_through() -> None:
    """Sealed when it was first carried down, compared when it is carried again."""
    below = MemoryTier(ROW, 32, name="nvme")
    engine = make(0.0, "", below)
    engine.serve(range(6))
    engine.settle()
    engine.cache.lower[0].clear()
    engine.cache.memory_row(memory_slot(engine, range(6), 4))[7] ^= 0x10
    request = engine.open(range(6), 1)
    engine.compute(request)  # offered again: what the tier below has lost is copied once more
    engine.settle()
    engine.finish(request)
    sums = totals(engine)
    assert sums["kvtier_faults", ("dram", "corrupt")] == 1
    assert engine.cache.lower[0].residency.resident_rows == 4
    assert len(below.published) == 4
    assert engine.cache.memory.residency.resident_rows == 4, "the damaged block and what builds on it are gone"
    assert engine.cache.leases() == 0
    engine.cache.close()


def test_a_row_brought_up_is_sealed_and_compared_on_its_way_down_again() -> None:
    first = MemoryTier(ROW, 32, name="nvme")
    engine = make(0.0, "", first)
    engine.serve(range(4))
    engine.settle()
    engine.cache.memory.clear()
    engine.cache.epoch += 1
    assert engine.serve(range(4)) == 4
    engine.cache.lower[0].clear()
    engine.cache.memory_row(memory_slot(engine, range(4), 0))[0] ^= 1
    request = engine.open(range(4), 1)
    engine.compute(request)
    engine.settle()
    engine.finish(request)
    assert totals(engine)["kvtier_faults", ("dram", "corrupt")] == 1
    assert not first.published
    engine.cache.close()
