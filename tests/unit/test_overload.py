"""A scripted overload over a real TierCache: conservative mode comes and goes, and no load outlasts its deadline."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.place.mode import Mode
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import RowId, RowStatus, Slots

ROW = 64
BLOCKS = 4
DEADLINE_S = 4.0


class Stuck(MemoryTier):
    """Reads wait while it is stuck."""

    def __init__(self) -> None:
        super().__init__(ROW, 512, name="nvme")
        self.gate = threading.Event()
        self.gate.set()

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        self.gate.wait(30)
        return super().read(slots, rows, targets)


class Rig:
    def __init__(self) -> None:
        self.clock, self.tier = VirtualClock(), Stuck()
        memory = DramTier.over(np.zeros(64 * ROW, np.uint8), ROW, 64, ROW, checksums=False)
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, gate=False, load_deadline_s=DEADLINE_S)
        self.cache = TierCache(config, Geometry(16), memory, memory.row, [self.tier], self.clock)
        self.engine = FakeEngine(self.cache)
        self.modes: list[Mode] = []

    def step(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.cache.stepped()
        self.modes.append(self.cache.watch.machine.mode)

    def wait_for(self, first: int) -> float:
        """Ask for a prompt that only the tier has, every tenth of a second; how long until there is an answer."""
        request = self.engine.open(range(first, first + BLOCKS))
        began = self.clock.now()
        while self.cache.lookup(request, 0) is None:
            self.step(0.1)
        waited = self.clock.now() - began
        self.engine.run(request)
        return waited


def test_overload_is_entered_and_left_as_the_state_machine_says_and_loads_keep_their_deadline() -> None:
    rig = Rig()
    prompts = [100 * i for i in range(12)]
    for first in prompts:
        rig.engine.serve(range(first, first + BLOCKS))
        rig.engine.settle()
    rig.cache.memory.clear()
    rig.cache.epoch += 1
    for n in (16, 64, 128, 256):  # a prompt of 64 tokens takes 1.3 s to compute
        rig.cache.observe_prefill([(0, n)], n * 0.02)

    rig.tier.gate.clear()
    waits = [rig.wait_for(first) for first in prompts[:3]]
    assert all(wait <= 2 * 1.28 + 0.2 for wait in waits), "twice the recompute, and below the deadline"
    assert max(waits) > 2.5, "and they did wait"
    for _ in range(5):
        rig.step(1.0)
    assert rig.cache.conservative
    assert rig.cache.watch.machine.reason == "queue_p99_s"

    request = rig.engine.open(range(500, 500 + BLOCKS))
    for _ in range(5):
        rig.cache.stepped()
    assert request.awaited, "somebody waits for it: look-ahead goes on, behind all demand"
    began = rig.clock.now()
    while rig.cache.lookup(request, 0) is None:
        rig.step(0.1)
    assert rig.clock.now() - began <= 1.28 + 0.2, "only as long as recomputing would take"
    rig.engine.run(request)

    rig.tier.gate.set()
    rig.cache.mover.drain(10.0)
    for _ in range(40):
        rig.step(1.0)
    assert rig.modes[-1] is Mode.NORMAL
    changes = sum(a is not b for a, b in zip(rig.modes, rig.modes[1:], strict=False))
    assert changes == 2, "in once, out once"
    sums, seen = rig.cache.recorder.drain()
    assert sums["kvtier_conservative_entries", ("queue_p99_s",)] == 1
    spent = sum(value for (name, _), value in sums.items() if name == "kvtier_conservative_seconds")
    assert spent == pytest.approx(rig.cache.watch.machine.seconds(rig.clock.now()))
    assert spent >= 10.0, "the dwell"
    waited = np.array(seen["kvtier_load_wait_seconds", ()])
    assert np.quantile(waited, 0.99) <= DEADLINE_S
    rig.cache.poll()
    assert rig.cache.leases() == 0
    rig.cache.close()
