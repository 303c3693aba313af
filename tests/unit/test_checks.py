"""Memory rows are sealed when they are written and verified before they are offered: a byte that changes in memory is
never loaded. FakeEngine raises for any byte that is not what was computed."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
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


def test_what_is_whole_is_loaded_after_one_wait() -> None:
    engine = make()
    engine.serve(range(6))
    engine.settle()
    request = engine.open(range(6), 1)
    assert engine.cache.lookup(request, 0) is None, "it is being verified"
    assert engine.lookup(request) == 6
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


def test_two_requests_share_one_check_and_each_later_one_checks_again() -> None:
    engine = make()
    engine.serve(range(6))
    engine.settle()
    first, second = engine.open(range(6), 1), engine.open(range(6), 1)
    assert engine.cache.lookup(first, 0) is None
    assert engine.cache.lookup(second, 0) is None
    assert engine.lookup(second) == engine.lookup(first) == 6
    engine.run(first)
    engine.run(second)
    flip(engine, range(6), 1)
    assert engine.serve(range(6)) == 1
    end(engine)


def test_a_damaged_row_another_request_is_loading_is_not_waited_for() -> None:
    engine = make()
    engine.serve(range(6))
    engine.settle()
    loading = engine.open(range(6), 1)
    assert engine.lookup(loading) == 6
    engine.cache.take_load(loading, [RowRef(block, 0) for block in range(6)])
    flip(engine, range(6), 3)
    late = engine.open(range(6), 1)
    assert engine.lookup(late, patience=5) == 3
    assert engine.run(late) == 3
    engine.cache.end_load(loading)
    engine.finish(loading)
    assert engine.serve(range(6)) == 3
    end(engine)


def test_what_ends_or_is_reset_while_it_is_verified_holds_nothing() -> None:
    engine = make()
    engine.serve(range(6))
    engine.settle()
    gone, void = engine.open(range(6), 1), engine.open(range(6), 1)
    engine.cache.lookup(gone, 0)
    engine.cache.lookup(void, 0)
    engine.finish(gone)
    engine.cache.reset()
    assert engine.lookup(void) == 0
    assert engine.run(void) == 0
    engine.settle()
    assert engine.serve(range(6)) == 6
    end(engine)


def test_a_request_past_its_deadline_is_offered_nothing_unverified() -> None:
    engine = make()
    clock = engine.cache.clock
    assert isinstance(clock, VirtualClock)
    engine.serve(range(6))
    engine.settle()
    request = engine.open(range(6), 1)
    assert engine.cache.lookup(request, 0) is None
    clock.advance(100.0)
    plan = engine.cache.lookup(request, 0)  # nothing was polled: the check is not known to have ended
    assert plan is not None
    assert plan.blocks == 0
    engine.run(request)
    end(engine)


def test_rows_that_wait_for_seals_never_fill_memory() -> None:
    engine = make()
    for prompt in range(40):
        engine.serve(range(prompt * 100, prompt * 100 + 12))
    assert engine.cache.memory.residency.resident_rows > CAPACITY // 2
    end(engine)
