"""Queue look-ahead over a real TierCache: what waits is read before the engine asks, kept, and in nobody's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.index.residency import ABSENT
from kvtier.model.request import Outcome, StopReason
from kvtier.place.mode import Mode
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import RowId, RowStatus, Slots

ROW = 4096
BLOCKS = 8


class Slow(MemoryTier):
    """Reads wait while a gate is closed; the order in which they begin is noted."""

    def __init__(self) -> None:
        super().__init__(ROW, 256, name="nvme")
        self.gate = threading.Event()
        self.gate.set()
        self.order: list[bytes] = []

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        self.order += [row.key for row in rows]
        self.gate.wait(30)
        return super().read(slots, rows, targets)


class Rig:
    def __init__(self, memory_rows: int = 64) -> None:
        self.tier = Slow()
        memory = DramTier.over(np.zeros(memory_rows * ROW, np.uint8), ROW, memory_rows, ROW, checksums=False)
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, chunk_bytes=ROW)
        self.cache = TierCache(config, Geometry(16), memory, memory.row, [self.tier], VirtualClock())
        self.engine = FakeEngine(self.cache)

    def store(self, *firsts: int) -> None:
        for first in firsts:
            self.engine.serve(range(first, first + BLOCKS))
            self.settle()
        self.cache.memory.clear()
        self.cache.epoch += 1

    def settle(self) -> None:
        self.tier.gate.set()
        self.engine.settle()

    def in_memory(self, first: int) -> int:
        match = self.cache.tree.walk(token_chain(range(first, first + BLOCKS)))
        return int((self.cache.memory.residency.slots_of(match) != ABSENT).sum())


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    yield r
    r.settle()
    assert r.cache.leases() == 0
    assert len(r.cache.look_ahead) == 0
    r.cache.check_integrity()
    r.cache.close()


def test_what_waits_in_the_queue_is_in_memory_when_the_engine_asks(rig: Rig) -> None:
    rig.store(0, 100)
    first, second = rig.engine.open(range(BLOCKS)), rig.engine.open(range(100, 100 + BLOCKS))
    for _ in range(6):
        rig.cache.stepped()
        rig.settle()
    assert rig.in_memory(0) == rig.in_memory(100) == BLOCKS
    for request in (first, second):
        plan = rig.cache.lookup(request, 0)
        assert plan is not None, "nothing is left to wait for"
        assert plan.blocks == BLOCKS
        assert rig.engine.run(request) == BLOCKS
    sums, _ = rig.cache.recorder.drain()
    assert sums["kvtier_prefetched_rows", ("look_ahead",)] == 2 * BLOCKS
    assert sums["kvtier_prefetched_rows_used", ("look_ahead",)] == 2 * BLOCKS


def test_the_first_object_of_everyone_goes_before_the_rest_of_anyone(rig: Rig) -> None:
    rig.store(0, 100)
    requests = [rig.engine.open(range(first, first + BLOCKS)) for first in (0, 100)]
    rig.tier.gate.clear()
    rig.tier.order.clear()
    for _ in range(4):
        rig.cache.stepped()
    heads = [request.chain[:32] for request in requests]
    assert [int(request.coming.sum()) for request in requests] == [BLOCKS, BLOCKS]
    rig.settle()
    assert set(rig.tier.order[:2]) == set(heads)
    assert len(set(rig.tier.order)) == len(rig.tier.order) == 2 * BLOCKS
    for request in requests:
        rig.engine.lookup(request)
        rig.engine.run(request)


def test_queued_blocks_are_not_evicted_and_free_when_the_request_is_gone(rig: Rig) -> None:
    """Regression test (e) of the placement study."""
    rig.store(0)
    waiting = rig.engine.open(range(BLOCKS))
    for _ in range(3):
        rig.cache.stepped()
        rig.settle()
    for i in range(12):
        rig.engine.serve(range(1000 + 100 * i, 1000 + 100 * i + BLOCKS))
    rig.settle()
    assert rig.in_memory(0) == BLOCKS
    rig.cache.close_request(waiting, Outcome(finished_s=0.0, stop_reason=StopReason.ABORTED))
    assert rig.cache.leases() == 0


def test_a_demand_takes_over_what_look_ahead_began(rig: Rig) -> None:
    """Regression tests (c) and (f): in flight is a hit, and demand bumps it."""
    rig.store(0)
    request = rig.engine.open(range(BLOCKS))
    rig.tier.gate.clear()
    for _ in range(3):
        rig.cache.stepped()
    assert rig.cache.lookup(request, 0) is None, "on its way"
    assert request.deadline_s is not None, "now somebody waits"
    rig.settle()
    plan = rig.cache.lookup(request, 0)
    assert plan is not None
    assert plan.blocks == BLOCKS
    assert len(rig.tier.order) == BLOCKS, "each row is read once"
    rig.engine.run(request)


@pytest.mark.parametrize("mode", Mode)
def test_it_stops_at_half_of_memory_whatever_the_mode(mode: Mode) -> None:
    """Somebody waits for these rows: under overload they are needed as ever (docs/simulator.md)."""
    rig = Rig(memory_rows=16)
    rig.store(0, 100, 200)
    requests = [rig.engine.open(range(first, first + BLOCKS)) for first in (0, 100, 200)]
    rig.cache.watch.machine.mode = mode
    for _ in range(12):
        rig.cache.stepped()
        rig.settle()
    assert rig.cache.memory.residency.pinned_rows <= 12
    for request in requests:
        rig.engine.lookup(request)
        assert rig.engine.run(request) == BLOCKS, "and nobody is shut out by those who wait"
        rig.settle()
    assert rig.cache.leases() == 0
    rig.cache.close()


def test_what_the_device_has_does_not_move_and_is_asked_to_stay(rig: Rig) -> None:
    rig.store(0)
    device = rig.cache.attach_device(64, 1, ROW, lambda block: False)
    request = rig.engine.open(range(BLOCKS))
    some = np.arange(4, dtype=np.intp)
    device.place(request.chain, some, np.zeros(4, np.intp), np.arange(1, 5, dtype=np.int32))
    for _ in range(3):
        rig.cache.stepped()
        rig.settle()
    assert rig.in_memory(0) == BLOCKS - 4
    assert device.residency.protected_rows == 4
    rig.engine.lookup(request, 4)
    rig.cache.close_request(request, Outcome(finished_s=0.0, stop_reason=StopReason.ABORTED))


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_a_prompt_without_a_whole_block_is_served_like_any_other(rig: Rig, looks_ahead: bool) -> None:
    request = rig.engine.open([], 7)
    if looks_ahead:
        rig.cache.stepped()
    for start in (0, 3):  # the device may have blocks of which nothing was heard
        plan = rig.cache.lookup(request, start)
        assert plan is not None
        assert plan.blocks == 0
        assert plan.prefix(start, 0, 5) == 0
    assert len(rig.cache.offer_store(request, [])) == 0
    rig.cache.commit_store(request, [])
    assert len(rig.cache.take_load(request, [])) == 0
    assert rig.engine.run(request) == 0
    assert rig.cache.leases() == 0
