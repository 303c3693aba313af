"""Memory rows are sealed when they are written and verified whenever they are loaded: a byte that changes in memory
reaches nobody's answer. FakeEngine raises for any byte that is not what was computed."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.seals import Seals
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.errors import IntegrityError
from kvtier.index.residency import ABSENT
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

ROW = 64
CAPACITY = 64


def make(*lower: MemoryTier, checks: bool = True, windows: dict[int, int] | None = None) -> FakeEngine:
    memory = DramTier.over(np.zeros(CAPACITY * ROW, np.uint8), ROW, CAPACITY, ROW, checksums=False)
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, memory_checks=checks, gate=False)
    geometry = Geometry(16, 2 if windows else 1, windows)
    return FakeEngine(TierCache(config, geometry, memory, memory.row, lower, VirtualClock()))


def totals(engine: FakeEngine) -> dict[tuple[str, tuple[str, ...]], float]:
    return engine.cache.recorder.drain()[0]


def flip(engine: FakeEngine, tokens: range, block: int, group: int = 0) -> None:
    request = engine.open(tokens, 1)
    slots = engine.cache.memory.residency.slots_of(engine.cache.tree.walk(request.chain))
    engine.finish(request)
    assert slots[block, group] != ABSENT
    engine.cache.memory_row(int(slots[block, group]))[5] ^= 0x40


def end(engine: FakeEngine) -> None:
    engine.settle()
    assert engine.cache.leases() == 0
    engine.cache.check_integrity()
    engine.cache.close()


def test_what_is_whole_is_loaded_at_once() -> None:
    engine = make()
    engine.serve(range(6))
    request = engine.open(range(6), 1)
    plan = engine.cache.lookup(request, 0)
    assert plan is not None
    assert plan.blocks == 6
    assert engine.run(request) == 6
    assert ("kvtier_faults", ("dram", "corrupt")) not in totals(engine)
    end(engine)


@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_byte_flipped_in_memory_is_computed_again(block: int) -> None:
    engine = make()
    engine.serve(range(6))
    engine.settle()
    flip(engine, range(6), block)
    totals(engine)
    assert engine.serve(range(6)) == block
    sums = totals(engine)
    assert sums["kvtier_faults", ("dram", "corrupt")] == 1
    assert sums["kvtier_miss_tokens", ("corrupt",)] == 16 * (6 - block)
    engine.settle()
    assert engine.serve(range(6)) == 6, "what was computed again is whole"
    end(engine)


def test_a_byte_flipped_in_memory_is_served_from_below() -> None:
    engine = make(MemoryTier(ROW, CAPACITY, name="nvme"))
    engine.serve(range(6))
    engine.settle()
    flip(engine, range(6), 2)
    totals(engine)
    assert engine.serve(range(6)) == 6
    sums = totals(engine)
    assert sums["kvtier_faults", ("dram", "corrupt")] == 1
    assert sums["kvtier_tokens", ("dram",)] == 2 * 16
    assert sums["kvtier_tokens", ("nvme",)] == 4 * 16
    end(engine)


def test_without_checks_the_byte_is_loaded() -> None:
    engine = make(checks=False)
    engine.serve(range(6))
    engine.settle()
    flip(engine, range(6), 2)
    with pytest.raises(IntegrityError, match="does not hold"):
        engine.serve(range(6))
    engine.cache.close()


def test_a_window_is_verified_too() -> None:
    engine = make(windows={1: 2})
    engine.serve(range(6))
    engine.settle()
    flip(engine, range(6), 5, group=1)
    assert engine.serve(range(6)) < 6
    end(engine)


def test_a_row_that_two_requests_load_is_dropped_once() -> None:
    engine = make()
    engine.serve(range(6))
    first, second = engine.open(range(6), 1), engine.open(range(6), 1)
    assert engine.lookup(first) == engine.lookup(second) == 6
    flip(engine, range(6), 1)
    totals(engine)
    rows = [RowRef(block, 0) for block in range(6)]
    slots = [engine.cache.take_load(request, rows) for request in (first, second)]
    views = [engine.cache.memory_row(slot) for slot in slots[0].tolist()]
    assert engine.cache.seals.intact(slots[0], views) == [block != 1 for block in range(6)]
    for request in (first, second):
        engine.cache.end_load(request)
        assert engine.lookup(request) == 1
        engine.run(request)
    assert totals(engine)["kvtier_faults", ("dram", "corrupt")] == 2, "once for each load that met it"
    assert engine.serve(range(6)) == 6, "what was computed again is whole"
    end(engine)


def test_a_slot_that_is_given_away_loses_its_mark() -> None:
    engine = make()
    engine.serve(range(CAPACITY))
    flip(engine, range(CAPACITY), 0)
    engine.serve(range(CAPACITY))
    for prompt in range(1, 5):
        tokens = range(prompt * 1000, prompt * 1000 + CAPACITY - 1)
        engine.serve(tokens)
        assert engine.serve(tokens) == len(tokens)
    end(engine)


def test_a_load_that_is_reset_takes_nothing_with_it() -> None:
    engine = make()
    engine.serve(range(6))
    loading = engine.open(range(6), 1)
    assert engine.lookup(loading) == 6
    flip(engine, range(6), 3)
    slots = engine.cache.take_load(loading, [RowRef(block, 0) for block in range(6)])
    engine.cache.reset()
    engine.cache.seals.intact(slots, [engine.cache.memory_row(slot) for slot in slots.tolist()])
    engine.cache.end_load(loading)
    engine.finish(loading)
    assert engine.serve(range(6)) == 0
    assert engine.serve(range(6)) == 6
    end(engine)


def test_every_rank_seals_its_own_part() -> None:
    shared = np.zeros((4, 2), np.uint64)
    seals = Seals(shared, 24)
    row = bytearray(range(56))  # two parts of 24 and padding
    slots = np.array([2], np.int32)
    seals.set_part(2, 0, memoryview(row)[:24])
    seals.set_part(2, 1, memoryview(row)[24:48])
    row[50] ^= 1
    assert seals.intact(slots, [memoryview(row)]) == [True], "padding is nobody's"
    row[30] ^= 1
    assert seals.intact_part(2, 0, memoryview(row)[:24])
    assert not seals.damaged(slots).any()
    assert not seals.intact_part(2, 1, memoryview(row)[24:48])
    assert Seals(shared, 24).damaged(np.array([1, 2], np.int32)).tolist() == [False, True]
    seals.broken(slots)
    assert seals.intact(slots, [memoryview(row)]) == [True], "nothing is known of a slot that is written anew"
