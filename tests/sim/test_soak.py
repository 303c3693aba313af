"""A day of agents in virtual time: sessions that return, crowds, aborts, faults, resets, tiers that go and come back.

What must stay bounded is measured after a warm-up, half-way and at the end: bytes by tracemalloc, and every book the
cache keeps by its length; and every hour how many blocks Python's allocator has given out. Three hours by default, the
whole day with KVTIER_SOAK set (`make soak`).
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tracemalloc

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.request import StopReason
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.faulty_tier import FaultKind, FaultyTier, Seeded
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

HOURS = 24 if os.environ.get("KVTIER_SOAK") else 3
ROW, MEMORY_ROWS, LOWER_ROWS, GHOSTS = 64, 200, 1000, 2000
EVERY_S = 12.0
KINDS = (FaultKind.EIO, FaultKind.ENOSPC, FaultKind.SHORT, FaultKind.FLIP)


class Day:
    """One engine with sessions of growing prompts over a shared system prompt."""

    def __init__(self, policy: str, groups: int, windows: dict[int, int]) -> None:
        self.draw = random.Random(7)
        self.clock = VirtualClock()
        self.lower = MemoryTier(ROW, LOWER_ROWS, name="nvme")
        memory = DramTier.over(np.zeros(MEMORY_ROWS * ROW, np.uint8), ROW, MEMORY_ROWS, ROW, checksums=False)
        config = CacheConfig(dram_bytes=1, policy=policy, io_threads=2, ghost_blocks=GHOSTS, canary_share=0.02)
        self.cache = TierCache(config, Geometry(16, groups, windows), memory, memory.row, [self._faulty()], self.clock)
        self.engine = FakeEngine(self.cache)
        self.sessions: list[list[int]] = []
        self.tokens = 0
        self.faults = 0.0

    def _faulty(self) -> FaultyTier:
        return FaultyTier(self.lower, Seeded(self.draw.getrandbits(16), 0.01, KINDS))

    def prompt(self) -> list[int]:
        if len(self.sessions) < 20 or self.draw.random() < 0.1:
            self.sessions.append([0, 1, 2, 3])
        session = self.draw.choice(self.sessions[-20:])
        self.tokens += 2
        session += [10 + self.tokens, 11 + self.tokens]
        del self.sessions[:-40]
        return session[:40]

    def serve(self) -> None:
        request = self.engine.open(self.prompt(), 1)
        self.engine.lookup(request, patience=self.draw.choice([1, 200]))
        waiting = request.plan is None or request.plan.waiting
        if self.draw.random() < 0.05:
            return self.engine.finish(request, StopReason.ABORTED)
        loaded = 0 if waiting else self.engine.load(request)
        self.cache.started(request)
        self.cache.end_load(request)
        written = self.engine.compute(request, loaded)
        if self.draw.random() < 0.05:  # preempted, and back
            self.engine.lookup(request, self.draw.randint(0, loaded))
        self.cache.commit_store(request, written)
        self.engine.finish(request)

    def hour(self) -> None:
        end = self.clock.now() + 3600
        while self.clock.now() < end:
            self.serve()
            self.clock.advance(self.draw.expovariate(1 / EVERY_S))
            self.cache.poll()
        self.engine.settle()
        self.cache.check_integrity()
        self.cache.gauges()
        self._count()
        assert self.cache.leases() <= self.cache.lower[0].book.outstanding + 1
        if self.draw.random() < 0.3:
            self.cache.reset()
        if self.draw.random() < 0.5:
            assert self.cache.detach("nvme")
            self.lower = self.lower.reopen()
            self.cache.attach(self._faulty())

    def _count(self) -> None:
        """Sums agree, hour by hour."""
        sums, _ = self.cache.recorder.drain()
        recomputed = sum(v for (n, labels), v in sums.items() if n == "kvtier_tokens" and labels == ("recompute",))
        self.faults += sum(v for (n, _), v in sums.items() if n == "kvtier_faults")
        assert recomputed == sum(v for (n, _), v in sums.items() if n == "kvtier_miss_tokens")

    def books(self) -> dict[str, int]:
        cache = self.cache
        return {
            "blocks in the tree": cache.tree.blocks,
            "segments": len(cache.tree),
            "live requests": len(cache._live),
            "promotions": cache.loader.promoting_rows,
            "stores": cache.storer.storing_rows,
            "writes": len(cache.storer._below),
            "failed rows": len(cache.lower[0].health.failed_rows),
            "listeners": len(cache.tree.listeners),
            "threads": len(cache.mover.threads),
            "memory rows": cache.memory.tier.stats().used_rows,
        }


@pytest.mark.timeout(7200)  # a whole day is 6 minutes of an idle core
@pytest.mark.parametrize(("policy", "groups", "windows"), [("kvtier", 1, {}), ("lru", 2, {1: 2})])
def test_a_day_of_traffic_leaves_nothing_behind(policy: str, groups: int, windows: dict[int, int]) -> None:
    day = Day(policy, groups, windows)
    day.hour()
    tracemalloc.start()
    try:
        before = day.books()
        traced_bytes, allocated = [], []
        for hour in range(1, HOURS):
            day.hour()
            gc.collect()
            allocated.append(sys.getallocatedblocks())
            if hour in (HOURS // 2, HOURS - 1):
                traced_bytes.append(tracemalloc.get_traced_memory()[0])
        half_way_bytes, grown_bytes = traced_bytes
    finally:
        tracemalloc.stop()
    after = day.books()
    assert after["blocks in the tree"] <= GHOSTS + MEMORY_ROWS + LOWER_ROWS + 100
    assert after["live requests"] == after["promotions"] == after["stores"] == after["writes"] == 0
    assert after["memory rows"] == day.cache.memory.residency.resident_rows <= MEMORY_ROWS
    assert after["listeners"] == before["listeners"]
    assert after["threads"] <= before["threads"] + 2
    # What is still there of all that was allocated since: what the bounded books hold, not what hours add.
    assert grown_bytes < 6 << 20, f"{grown_bytes} bytes kept after {HOURS} hours, books {after}"
    assert grown_bytes - half_way_bytes < 1 << 20, f"{half_way_bytes} bytes at half-time, {grown_bytes} at the end"
    early, late = (max(allocated[part]) for part in (slice(HOURS // 2), slice(HOURS // 2, None)))
    assert late < 1.05 * early, f"blocks allocated, hour by hour: {allocated}"
    print(f"{HOURS} hours: {half_way_bytes}, then {grown_bytes} bytes kept, {day.engine.loaded_blocks} blocks loaded")
    print(f"{early} blocks allocated at most in the first half, {late} in the second; {after}")
    assert day.engine.loaded_blocks > 300 * HOURS
    assert day.faults > HOURS
    assert day.cache.leases() == 0
    day.cache.close()
