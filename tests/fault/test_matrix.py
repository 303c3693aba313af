"""The fault matrix: every call into a real tier fails once, in every way, under both caches.

For each cell one fault is put into one call of a run in which everything is stored, forgotten by memory, and asked for
again; each step of the run gets it once. What must hold: every byte served is what the model would compute, every row
asked for is served or a miss with a reason, no exception gets out, the fault is counted under its reason, and nobody
waits longer than the deadline. `test_cache_faults` does the same by row and by script on a virtual clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.storage_cache import StorageCache
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.keys import KEY_BYTES
from kvtier.testing.fake_engine import FakeEngine, content_of, token_chain
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script
from kvtier.tiers.dram import DramTier
from kvtier.tiers.health import BreakerLimits, BreakerState
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.protocol import Tier
from kvtier.tiers.shared_fs import SharedFsTier

ROW, BLOCKS, DEADLINE_S = 8192, 6, 0.4
PROMPTS: list[Sequence[int]] = [range(BLOCKS), [0, 1, 2, 60, 61, 62]]
CONFIG = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, load_deadline_s=DEADLINE_S)

READS = {
    FaultKind.EIO: "io_error",
    FaultKind.SHORT: "io_error",
    FaultKind.FLIP: "corrupt",
    FaultKind.CLOSED: "closed",
    FaultKind.DELAY: "stall",
}
WRITES = {
    FaultKind.EIO: "io_error",
    FaultKind.ENOSPC: "full",
    FaultKind.SHORT: "io_error",
    FaultKind.FLIP: "corrupt",
    FaultKind.CLOSED: "closed",
    FaultKind.DELAY: "stall",
}
CELLS = [("read", kind) for kind in READS] + [("write", kind) for kind in WRITES]


class Medium:
    """A real tier in a folder, behind one fault; a stall lasts until `gate` opens."""

    def __init__(self, kind: str, folder: Path, *faults: Fault, slowdown: float = 1.0) -> None:
        self.gate = threading.Event()
        self.folder = folder
        media: dict[str, Callable[[], Tier]] = {
            "nvme": lambda: NvmeTier(str(folder), b"s" * 32, "layout", ROW, 256 * ROW, direct=False),
            "cxl": lambda: DramTier.own(ROW, 64 * ROW, name="cxl"),
            "shared_fs": lambda: SharedFsTier(str(folder), b"s" * 32, "layout", ROW, 32 << 20, direct=False),
        }
        self.tier = FaultyTier(media[kind](), Script(faults), sleep=lambda seconds: self.gate.wait(20) and None)


class Served:
    """One cache under the same prompts, whichever it is: `ask` serves a prompt and returns the blocks not computed."""

    totals: dict[tuple[str, tuple[str, ...]], float]

    def __init__(self, medium: Medium) -> None:
        self.medium, self.totals, self.longest_s = medium, {}, 0.0

    def run(self) -> None:
        for _ in range(2):
            for prompt in PROMPTS:
                began = time.monotonic()
                self.ask(prompt)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.forget()

    def ask(self, prompt: Sequence[int]) -> int:
        raise NotImplementedError

    def forget(self) -> None:
        """What the engine keeps itself is lost; what is below stays."""

    def end(self) -> None:
        raise NotImplementedError

    def count(self, sums: dict[tuple[str, tuple[str, ...]], float]) -> None:
        for key, value in sums.items():
            self.totals[key] = self.totals.get(key, 0.0) + value


class ServedByTierCache(Served):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        memory = DramTier.over(np.zeros(24 * ROW, np.uint8), ROW, 24, ROW, checksums=False)
        self.cache = TierCache(CONFIG, Geometry(16), memory, memory.row, [medium.tier])
        self.engine = FakeEngine(self.cache)

    def ask(self, prompt: Sequence[int]) -> int:
        request = self.engine.open(prompt, 1)
        deadline = time.monotonic() + 10
        while self.cache.lookup(request, 0) is None:
            assert time.monotonic() < deadline, "a request waits for ever"
            self.cache.poll()
            time.sleep(0.001)
        loaded = self.engine.load(request)  # compares every byte
        self.cache.end_load(request)
        self.cache.commit_store(request, self.engine.compute(request, loaded))
        self.engine.finish(request)
        return loaded

    def forget(self) -> None:
        began = time.monotonic()
        while self.cache.mover.busy and time.monotonic() < began + 10:
            if self.medium.tier.injected[FaultKind.DELAY] and time.monotonic() > began + 1.2 * DEADLINE_S:
                break
            self.cache.poll()
            time.sleep(0.002)
        self.cache._watch_at_s = float("-inf")
        self.cache.poll()
        self.cache.memory.clear()
        self.cache.epoch += 1
        self.cache.check_integrity()

    def end(self) -> None:
        self.medium.gate.set()
        self.engine.settle()
        assert self.cache.leases() == 0
        assert self.cache.loader.promoting_rows == 0
        self.cache.check_integrity()
        self.count(self.cache.recorder.drain()[0])
        prompt_tokens = sum(len(prompt) * 16 + 1 for prompt in PROMPTS) * 2
        assert sum(v for (name, _), v in self.totals.items() if name == "kvtier_tokens") == prompt_tokens
        self.cache.close(drain_s=5.0)


class ServedByStorageCache(Served):
    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self.cache = StorageCache(CONFIG, Geometry(16), [medium.tier])

    def ask(self, prompt: Sequence[int]) -> int:
        keys = token_chain(prompt)
        pages = [[memoryview(bytearray(ROW))] for _ in prompt]
        found, loaded = self.cache.find(keys), 0
        there = self.cache.load(keys[: found * KEY_BYTES], pages[:found]) if found else []
        expected = [content_of(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], 0, ROW) for i in range(len(prompt))]
        for i, ok in enumerate(there):
            assert not ok or pages[i][0] == expected[i], "a wrong byte was served"
        loaded = there.index(False) if False in there else len(there)
        self.cache.store(keys, [[memoryview(bytearray(page))] for page in expected])
        return loaded

    def end(self) -> None:
        self.medium.gate.set()
        deadline = time.monotonic() + 10
        while self.cache._mover.busy and time.monotonic() < deadline:
            self.cache._step()
            time.sleep(0.005)
        self.cache.settle()
        assert self.cache.leases() == 0
        self.cache.check_integrity()
        self.count(self.cache.drain()[0])
        self.cache.close(drain_s=5.0)


CACHES: dict[str, Callable[[Medium], Served]] = {"vllm": ServedByTierCache, "sglang": ServedByStorageCache}


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    return iter(tmp_path / str(n) for n in range(1000))


def calls(cache: str, medium: str, folders: Iterator[Path]) -> dict[str, int]:
    """Calls of the run without a fault, in which everything is served from below."""
    served = CACHES[cache](Medium(medium, next(folders)))
    served.run()
    assert served.ask(PROMPTS[0]) == BLOCKS
    served.medium.gate.set()
    served.cache.close()  # type: ignore[attr-defined]
    return dict(served.medium.tier._calls)


@pytest.mark.parametrize("medium", ["nvme", "cxl", "shared_fs"])
@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize(("op", "kind"), CELLS, ids=[f"{op}-{kind.value}" for op, kind in CELLS])
def test_every_call_fails_once(cache: str, medium: str, op: str, kind: FaultKind, folders: Iterator[Path]) -> None:
    reason = (READS if op == "read" else WRITES)[kind]
    steps = min(calls(cache, medium, folders)[op], 3)
    for call in range(steps):
        delay_s = 1e9 if kind is FaultKind.DELAY else 0.0
        served = CACHES[cache](Medium(medium, next(folders), Fault(op, call, kind, bit=call, delay_s=delay_s)))
        served.run()
        assert served.medium.tier.injected[kind] == 1
        served.end()
        faults = {labels[1]: n for (name, labels), n in served.totals.items() if name == "kvtier_faults"}
        if kind is not FaultKind.CLOSED or call < steps - 1:
            assert faults.get(reason), f"step {call}: {reason} was not counted, but {faults}"
        # Two waits in one storage call (read, then write), and what a busy machine adds.
        assert served.longest_s < 2 * DEADLINE_S + 1.0, f"step {call} added {served.longest_s} s"


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("size", [0, 4096, 100_000])
def test_a_truncated_slab(cache: str, size: int, folders: Iterator[Path]) -> None:
    served = CACHES[cache](Medium("nvme", next(folders)))
    served.run()
    for path in served.medium.folder.glob("*"):
        if path.stat().st_size > 8 * ROW and "journal" not in path.name:
            os.truncate(path, size)
    for prompt in PROMPTS:
        served.ask(prompt)
        served.forget()
    assert served.ask(PROMPTS[0]) in range(BLOCKS + 1)
    served.forget()
    served.medium.gate.set()
    served.cache.check_integrity()  # type: ignore[attr-defined]
    served.count(served.cache.recorder.drain()[0])  # type: ignore[attr-defined]
    found = {labels[1] for (name, labels) in served.totals if name == "kvtier_faults"}
    assert found & {"corrupt", "io_error", "foreign"}
    served.cache.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("cache", list(CACHES))
def test_a_tier_a_hundred_times_slower_is_left_alone_and_taken_back(cache: str, folders: Iterator[Path]) -> None:
    """Slow is bad: the breaker opens on latency alone, and closes again when the tier is itself again."""
    medium = Medium("nvme", next(folders))
    medium.gate.set()
    served = CACHES[cache](medium)
    levels = served.cache.lower if cache == "vllm" else served.cache.levels  # type: ignore[attr-defined]
    (level,) = levels
    health = level.health
    # Rows here are small and calls short: what a hundred times their cost is must count, too.
    health.limits = BreakerLimits(slow_floor_s=0.002, bad=3, first_pause_s=0.2, trials=1)
    health.breaker._limits = health.limits
    served.run()
    assert health.breaker.state is BreakerState.CLOSED
    medium.tier._sleep = time.sleep
    medium.tier._slowdown = 100.0
    plain = medium.tier.inner.read
    slow_s = max(0.005, 100 * health.read.probed_s(BLOCKS * ROW))
    medium.tier.inner.read = lambda *arguments: (time.sleep(slow_s / 100), plain(*arguments))[1]  # type: ignore[method-assign]
    for _ in range(6):
        served.ask(PROMPTS[0])
        served.forget()
    assert health.breaker.state is BreakerState.OPEN
    assert health.breaker.last_reason == "slow"
    began = time.monotonic()
    assert served.ask(PROMPTS[0]) == 0
    assert time.monotonic() - began < slow_s, "an open breaker costs nobody its latency"
    medium.tier._slowdown = 1.0
    medium.tier.inner.read = plain  # type: ignore[method-assign]
    deadline = time.monotonic() + 10
    while health.breaker.state is not BreakerState.CLOSED and time.monotonic() < deadline:
        time.sleep(0.05)
        served.ask(PROMPTS[0])
        served.forget()
    assert health.breaker.state is BreakerState.CLOSED
    assert served.ask(PROMPTS[0]) == BLOCKS
    served.cache.close()  # type: ignore[attr-defined]
