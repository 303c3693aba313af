"""Every transfer of the tier below memory fails once, in every way, while an engine serves.

Whatever fails: no wrong byte is loaded (the engine compares each), every token has its source and every miss its
reason, the fault is counted, and nothing is leased, reserved or waited for in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.request import CachedRequest
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.health import BreakerState

ROW_BYTES, BLOCK_TOKENS = 64, 16
MEMORY_ROWS, LOWER_ROWS = 24, 60
DEADLINE_S = 2.0

PROMPTS: list[Sequence[int]] = [range(6), [0, 1, 2, 3, 60, 61], range(6), [7, 8, 9], [0, 1, 2, 3, 60, 61, 62]]
GEOMETRIES: dict[str, Callable[[], Geometry]] = {
    "one-group": lambda: Geometry(BLOCK_TOKENS),
    "hybrid": lambda: Geometry(BLOCK_TOKENS, 2, {1: 2}),
}
# By kind: the reason the tier gives and, for reads, the reason of the miss that may follow.
READ_FAULTS = {
    FaultKind.EIO: ("io_error", "load_failed"),
    FaultKind.ENOSPC: ("io_error", "load_failed"),
    FaultKind.SHORT: ("io_error", "load_failed"),
    FaultKind.FLIP: ("corrupt", "corrupt"),
    FaultKind.CLOSED: ("closed", "load_failed"),
}
WRITE_FAULTS = {
    FaultKind.EIO: "io_error",
    FaultKind.ENOSPC: "full",
    FaultKind.SHORT: "io_error",
    FaultKind.FLIP: "corrupt",  # found when it is read
    FaultKind.CLOSED: "closed",
}


class Served:
    """A scripted engine over memory and one tier that fails by script; a delay is a stall until `gate` opens."""

    def __init__(self, geometry: str, *faults: Fault) -> None:
        self.gate = threading.Event()
        self.clock = VirtualClock()
        self.lower = MemoryTier(ROW_BYTES, LOWER_ROWS, name="nvme")
        self.tier = FaultyTier(self.lower, Script(faults), sleep=lambda seconds: self._stall())
        memory = DramTier.over(
            np.zeros(MEMORY_ROWS * ROW_BYTES, np.uint8), ROW_BYTES, MEMORY_ROWS, ROW_BYTES, checksums=False
        )
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, load_deadline_s=DEADLINE_S)
        self.cache = TierCache(config, GEOMETRIES[geometry](), memory, memory.row, [self.tier], self.clock)
        self.engine = FakeEngine(self.cache)
        self.totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self.prompt_tokens = 0
        self.calls = {"read": 0, "write": 0}
        self._stalled = False
        self._reads_stall = any(fault.op == "read" for fault in faults)

    def run(self) -> None:
        """All prompts, computed and stored; then again, each from below memory."""
        for _ in range(2):
            for prompt in PROMPTS:
                self.serve(prompt)
                self.settle()
                self.cache.memory.clear()
                self.cache.epoch += 1
                self.cache.check_integrity()

    def serve(self, prompt: Sequence[int]) -> int:
        """One request to its end; time passes while it waits for a stall. Returns the blocks loaded."""
        request = self.engine.open(prompt, 1)
        self.prompt_tokens += request.context.prompt_tokens
        self.look_up(request)
        loaded = self.engine.load(request)
        self.cache.end_load(request)
        self.cache.commit_store(request, self.engine.compute(request, loaded))
        self.engine.finish(request)
        return loaded

    def look_up(self, request: CachedRequest) -> None:
        for _ in range(2000):
            self.cache.poll()
            if self.cache.lookup(request, 0) is not None:
                return
            if not self.cache.mover.drain(0.005) and self._stalled and self._reads_stall:
                self.clock.advance(0.1)
        raise AssertionError("a request waits for ever")

    def settle(self) -> None:
        while not self.cache.mover.drain(0.005) and not self._stalled:
            pass
        self.cache.poll()
        self.count()

    def count(self) -> None:
        for key, value in self.cache.recorder.drain()[0].items():
            self.totals[key] = self.totals.get(key, 0.0) + value

    def total(self, name: str, *labels: str) -> float:
        return sum(v for (n, found), v in self.totals.items() if n == name and (not labels or found == labels))

    def end(self) -> None:
        """What must hold after everything."""
        self.gate.set()
        self.engine.settle()
        self.count()
        self.cache.check_integrity()
        assert self.total("kvtier_tokens") == self.prompt_tokens
        assert self.total("kvtier_tokens", "recompute") == self.total("kvtier_miss_tokens")
        assert self.cache.leases() == 0
        assert self.cache.loader.promoting_rows == 0
        assert not self.cache.busy
        levels = [self.cache.memory, *self.cache.lower]
        if self.tier.injected[FaultKind.CLOSED]:
            levels.pop()  # a closed tier takes nothing back
        for level in levels:
            assert level.residency.pinned_rows == 0
            assert level.tier.stats().used_rows == level.residency.resident_rows, (
                f"{level.name}: a row belongs to nobody"
            )
        self.cache.close()

    def _stall(self) -> None:
        self._stalled = True
        assert self.gate.wait(60)
        self._stalled = False


def calls_of(geometry: str) -> dict[str, int]:
    """How many reads and writes the scenario makes when nothing fails."""
    served = Served(geometry)
    served.run()
    served.end()
    calls = dict(served.tier._calls)
    assert calls["write"] >= 4
    assert calls["read"] >= 8
    assert not served.total("kvtier_faults")
    return calls


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def scenario(request: pytest.FixtureRequest) -> tuple[str, dict[str, int]]:
    return request.param, calls_of(request.param)


@pytest.mark.parametrize("row", [None, 0, 2], ids=["every-row", "first-row", "third-row"])
@pytest.mark.parametrize("kind", list(READ_FAULTS), ids=lambda kind: kind.value)
def test_every_read_fails_once(scenario: tuple[str, dict[str, int]], kind: FaultKind, row: int | None) -> None:
    geometry, calls = scenario
    if kind is FaultKind.CLOSED and row is not None:
        pytest.skip("a tier closes whole")
    injected, missed = 0, 0.0
    for call in range(calls["read"]):
        served = Served(geometry, Fault("read", call, kind, row, bit=call))
        served.run()
        if kind is not FaultKind.CLOSED:
            served.serve(PROMPTS[0])
            served.settle()
            assert served.serve(PROMPTS[0]) == len(PROMPTS[0]), "one fault is forgotten"
        served.end()
        injected += served.tier.injected[kind]
        if served.tier.injected[kind]:
            reason, miss = READ_FAULTS[kind]
            assert served.total("kvtier_faults", "nvme", reason) > 0
            missed += served.total("kvtier_miss_tokens", miss)
    assert injected
    assert missed


@pytest.mark.parametrize("row", [None, 0, 2], ids=["every-row", "first-row", "third-row"])
@pytest.mark.parametrize("kind", list(WRITE_FAULTS), ids=lambda kind: kind.value)
def test_every_write_fails_once(scenario: tuple[str, dict[str, int]], kind: FaultKind, row: int | None) -> None:
    geometry, calls = scenario
    if kind is FaultKind.CLOSED and row is not None:
        pytest.skip("a tier closes whole")
    injected = 0
    for call in range(calls["write"]):
        served = Served(geometry, Fault("write", call, kind, row, bit=call))
        served.run()
        served.end()
        injected += served.tier.injected[kind]
        if served.tier.injected[kind] and kind is not FaultKind.FLIP:
            assert served.total("kvtier_faults", "nvme", WRITE_FAULTS[kind]) > 0
    assert injected


def test_every_read_stalls_beyond_the_deadline(scenario: tuple[str, dict[str, int]]) -> None:
    """The request goes on with what is ready, when its deadline has passed and not much later."""
    geometry, calls = scenario
    for call in range(calls["read"]):
        served = Served(geometry, Fault("read", call, FaultKind.DELAY, delay_s=1e9))
        served.run()
        assert served.tier.injected[FaultKind.DELAY] == 1
        assert served.clock.now() <= DEADLINE_S * (len(PROMPTS) * 2 - call) + 1.0
        served.end()
        assert served.total("kvtier_miss_tokens", "deadline") > 0


def test_every_write_stalls(scenario: tuple[str, dict[str, int]]) -> None:
    """Nobody waits for a write; those behind it land, in order, when it ends."""
    geometry, calls = scenario
    for call in range(calls["write"]):
        served = Served(geometry, Fault("write", call, FaultKind.DELAY, delay_s=1e9))
        served.run()
        assert served.tier.injected[FaultKind.DELAY] == 1
        assert served.clock.now() == 0.0
        served.end()


@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_a_failing_tier_is_left_alone_and_taken_back(geometry: str) -> None:
    served = Served(geometry, *[Fault("read", call, FaultKind.EIO) for call in range(6)])
    breaker = served.cache.lower[0].health.breaker

    def again() -> int:
        loaded = served.serve(PROMPTS[0])
        served.settle()
        served.cache.memory.clear()
        served.cache.epoch += 1
        return loaded

    again()
    for _ in range(5):
        served.clock.advance(300.0)  # the rows that failed are left alone for a while, too
        assert breaker.state is BreakerState.CLOSED
        assert again() == 0
    assert breaker.state is BreakerState.OPEN
    assert served.total("kvtier_miss_tokens", "load_failed") == 5 * 6 * BLOCK_TOKENS
    before = served.tier._calls["read"]
    assert again() == 0
    assert served.tier._calls["read"] == before, "an open breaker sends nothing"
    assert served.total("kvtier_miss_tokens", "tier_down") == 6 * BLOCK_TOKENS
    served.clock.advance(300.0)
    assert again() == 0, "the trial fails: call 5 of the script"
    assert breaker.state is BreakerState.OPEN
    assert breaker.opened == 2
    served.clock.advance(300.0)
    assert again() == 6
    assert breaker.state is BreakerState.HALF_OPEN
    assert again() == 6
    assert breaker.state is BreakerState.CLOSED
    served.cache.gauges()
    assert served.cache.recorder.drain()[0]["kvtier_breaker_state", ("nvme",)] == 0
    served.end()
