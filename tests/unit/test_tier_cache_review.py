"""TierCache where an engine is least polite: resets with work under way, preemptions, prompts beyond what is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.cache.cost import CostCurve
from kvtier.cache.geometry import Geometry
from kvtier.cache.request import CachedRequest
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import RowId, RowStatus, Slots

ROW_BYTES = 64


class Gated(MemoryTier):
    """Transfers wait while a gate is closed."""

    def __init__(self, rows: int) -> None:
        super().__init__(ROW_BYTES, rows, name="nvme")
        self.reads, self.writes = threading.Event(), threading.Event()
        self.open()

    def open(self) -> None:
        self.reads.set()
        self.writes.set()

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        self.writes.wait(30)
        return super().write(slots, rows, sources)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        self.reads.wait(30)
        return super().read(slots, rows, targets)


class Rig:
    """A small cache over a gated tier, and what must hold at its end."""

    def __init__(self) -> None:
        self.tiers: list[Gated] = []
        self.caches: list[TierCache] = []

    def start(
        self, memory_rows: int = 32, lower_rows: int = 64, geometry: Geometry | None = None, **options: object
    ) -> FakeEngine:
        tier = Gated(lower_rows)
        self.tiers.append(tier)
        memory = DramTier.over(
            np.zeros(memory_rows * ROW_BYTES, np.uint8), ROW_BYTES, memory_rows, ROW_BYTES, checksums=False
        )
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, **options)  # type: ignore[arg-type]
        cache = TierCache(config, geometry or Geometry(16), memory, memory.row, [tier], VirtualClock())
        self.caches.append(cache)
        return FakeEngine(cache)

    @property
    def tier(self) -> Gated:
        return self.tiers[-1]

    def finish(self) -> None:
        for tier, cache in zip(self.tiers, self.caches, strict=True):
            tier.open()
            cache.mover.drain(10.0)
            cache.poll()
            cache.check_integrity()
            assert cache.leases() == 0
            for level in (cache.memory, *cache.lower):
                assert level.residency.pinned_rows == 0
                assert level.tier.stats().used_rows == level.residency.resident_rows, f"{level.name}: a row is lost"
            cache.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.finish()


def promoting(engine: FakeEngine, tier: Gated, tokens: Sequence[int]) -> CachedRequest:
    """A request whose blocks are in the lower tier only and are held up on their way to memory."""
    engine.serve(tokens)
    engine.settle()
    engine.cache.memory.clear()
    engine.cache.epoch += 1
    tier.reads.clear()
    request = engine.open(tokens, 1)
    assert engine.cache.lookup(request, 0) is None
    return request


def test_more_on_the_device_than_the_tree_knows_is_no_error(rig: Rig) -> None:
    """A resumed request whose generated blocks the device kept, and of which no store was taken."""
    engine = rig.start()
    request = engine.open(range(3), 1)
    engine.cache.extend(request, token_chain(range(6))[3 * 32 :])
    assert engine.lookup(request, 5) == 0
    engine.finish(request)


def test_a_prompt_without_a_full_block_is_no_error(rig: Rig) -> None:
    engine = rig.start()
    request = engine.open(range(0), 1)
    assert engine.lookup(request) == 0
    engine.finish(request)


def test_a_reset_gives_back_the_load_of_a_request_that_has_ended(rig: Rig) -> None:
    """vLLM ends an aborted request before its load; after a reset it never reports the load."""
    engine = rig.start()
    engine.serve(range(4))
    engine.settle()
    request = engine.open(range(4), 1)
    engine.lookup(request)
    engine.load(request)
    engine.finish(request)
    assert engine.cache.leases() == 1
    engine.cache.reset()
    assert engine.cache.leases() == 0


def test_a_reset_gives_back_the_store_of_a_request_that_has_ended(rig: Rig) -> None:
    engine = rig.start()
    request = engine.open(range(4), 1)
    assert len(engine.compute(request)) == 4
    engine.finish(request)
    engine.cache.reset()
    assert engine.cache.memory.tier.stats().used_rows == 0
    assert engine.serve(range(4)) == 0, "its rows can be stored again"


def test_a_promotion_under_way_at_a_reset_is_never_seen(rig: Rig) -> None:
    """The weights may have changed: what was read before the reset is not to be found after it."""
    engine = rig.start()
    request = promoting(engine, rig.tier, range(6))
    engine.cache.reset()
    engine.finish(request)
    after = engine.open(range(6), 1)
    assert engine.lookup(after, patience=1) == 0, "nobody waits for what was reset"
    rig.tier.open()
    engine.settle()
    assert engine.cache.memory.residency.resident_rows == 0
    assert engine.lookup(after) == 0
    engine.finish(after)


def test_rows_without_a_place_do_not_survive_a_reset(rig: Rig) -> None:
    geometry = Geometry(16, 1, {0: 2})
    engine = rig.start(geometry=geometry)
    request = engine.open(range(6), 1)
    engine.cache.commit_store(request, engine.compute(request, 4))
    engine.finish(request)
    engine.settle()
    again = rig.tier.reopen()
    memory = DramTier.over(np.zeros(8 * ROW_BYTES, np.uint8), ROW_BYTES, 8, ROW_BYTES, checksums=False)
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2)
    cache = TierCache(config, geometry, memory, memory.row, [again], VirtualClock())
    assert again.stats().used_rows == 2
    cache.reset()
    assert again.stats().used_rows == 0
    late = FakeEngine(cache)
    request = late.open(range(6), 1)
    assert late.lookup(request) == 0
    late.finish(request)
    cache.close()


def test_a_preempted_request_finds_what_it_stored(rig: Rig) -> None:
    """The first answer, nothing, does not stand for ever."""
    engine = rig.start()
    request = engine.open(range(4), 1)
    assert engine.lookup(request) == 0
    engine.cache.started(request)
    engine.cache.commit_store(request, engine.compute(request))
    assert engine.lookup(request) == 4, "the device lost everything; memory has it"
    engine.load(request)
    engine.cache.end_load(request)
    engine.finish(request)
    sums, _ = engine.cache.recorder.drain()
    assert sums["kvtier_tokens", ("recompute",)] == 65, "computed once; loaded again after"
    assert ("kvtier_tokens", ("dram",)) not in sums


def test_a_request_that_waits_for_a_seat_finds_what_came_meanwhile(rig: Rig) -> None:
    engine = rig.start()
    request = engine.open(range(4), 1)
    assert engine.lookup(request) == 0
    engine.serve(range(4))
    assert engine.lookup(request) == 4
    engine.finish(request)


def test_rows_that_are_not_needed_are_not_waited_for(rig: Rig) -> None:
    """A read that hangs must not hold up a request that does not want its rows."""
    engine = rig.start(load_deadline_s=1.0)
    first = promoting(engine, rig.tier, range(6))
    second = engine.open(range(6), 1)
    second.limit_blocks = 0
    assert engine.cache.lookup(second, 0) is not None
    assert engine.cache.lookup(second, 0) is not None
    rig.tier.open()
    engine.settle()
    for request in (first, second):
        engine.finish(request)


def test_a_step_larger_than_the_backlog_is_written_as_far_as_it_fits(rig: Rig) -> None:
    """One prefill step of a large model weighs gigabytes: refusing it whole would leave the tier empty for ever."""
    engine = rig.start(store_backlog_bytes=4 * ROW_BYTES)
    request = engine.open(range(10), 1)
    engine.cache.commit_store(request, engine.compute(request, 0, 8))
    engine.settle()
    assert engine.cache.lower[0].residency.resident_rows == 4
    sums, _ = engine.cache.recorder.drain()
    assert sums["kvtier_stores_refused", ("nvme", "backlog")] == 4
    engine.cache.commit_store(request, engine.compute(request, 8))
    engine.settle()
    assert engine.cache.lower[0].residency.resident_rows == 8, "the next step makes up for what was left out"
    assert ("kvtier_stores_refused", ("nvme", "superseded")) not in engine.cache.recorder.drain()[0]
    engine.finish(request)


def test_writes_that_wait_for_one_before_them_count_as_backlog(rig: Rig) -> None:
    """Memory rows stay leased until a write is published: a stuck write must not pin all of memory."""
    engine = rig.start(store_backlog_bytes=8 * ROW_BYTES)
    rig.tier.writes.clear()
    for n in range(8):
        request = engine.open([100 + n, 200 + n], 1)
        engine.cache.commit_store(request, engine.compute(request))
        engine.finish(request)
    assert engine.cache.memory.residency.pinned_rows == 8


def test_a_hybrid_model_loads_all_or_nothing(rig: Rig) -> None:
    """Windows exist at the boundary only: a cut before it is no answer, but the whole may still be worth loading."""
    engine = rig.start(64, 256, Geometry(16, 2, {1: 2}))
    engine.serve(range(8))
    engine.settle()
    engine.cache.memory.clear()
    prefill = engine.cache.prefill
    for tokens in (16, 64, 128, 256):
        prefill.observe([(0, tokens)], tokens * 1e-4)
    lower = engine.cache.lower[0]
    # A block of two groups loads slower than it is computed.
    lower.health.read = CostCurve(1e-6, 1.5 * ROW_BYTES / (16 * 1e-4))
    assert engine.serve(range(8)) == 8


def test_blocks_of_a_tier_that_is_down_say_so(rig: Rig) -> None:
    engine = rig.start()
    engine.serve(range(4))
    engine.settle()
    engine.cache.memory.clear()
    engine.cache.epoch += 1
    for _ in range(5):
        engine.cache.lower[0].health.breaker.failure("io_error")
    engine.cache.recorder.drain()
    assert engine.serve(range(4)) == 0
    sums, _ = engine.cache.recorder.drain()
    assert sums["kvtier_miss_tokens", ("tier_down",)] == 64


def test_a_load_of_no_rows_is_no_error(rig: Rig) -> None:
    engine = rig.start()
    engine.serve(range(4))
    request = engine.open(range(4), 1)
    engine.lookup(request)
    assert engine.cache.take_load(request, []).tolist() == []
    engine.cache.end_load(request)
    engine.finish(request)


def test_memory_rows_being_written_down_are_leased_before_the_tier_below_makes_room(rig: Rig) -> None:
    """Making room below may evict, in memory, what builds on the victim: not the rows about to be written."""
    engine = rig.start(lower_rows=3)
    engine.serve(range(3))
    engine.settle()
    request = engine.open([0, 1, 2, 3], 1)
    other = engine.open([0, 1, 2, 9], 1)
    engine.cache.tree.check_integrity()
    memory = engine.cache.memory
    memory.clear()
    engine.cache.commit_store(request, [RowRef(*row) for row in engine.compute(request, 3)])
    engine.settle()
    engine.cache.check_integrity()
    for r in (request, other):
        engine.finish(r)


def test_a_write_that_hangs_does_not_hold_up_the_end() -> None:
    rig = Rig()
    engine = rig.start()
    rig.tier.writes.clear()
    request = engine.open(range(2), 1)
    engine.cache.commit_store(request, engine.compute(request))
    engine.finish(request)
    began = time.monotonic()
    engine.cache.close(drain_s=0.1)
    assert time.monotonic() - began < 10
    rig.tier.open()
    for thread in engine.cache.mover.threads:
        thread.join()
    engine.cache.poll()
    assert engine.cache.leases() == 0
