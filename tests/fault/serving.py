"""One engine over one real tier that fails as told: what the fault matrices run, under both caches.

What every run checks by itself: each byte served is what the model would compute, every row asked for is served or a
miss with a reason, nothing is leased or waited for in the end. `longest_s` is the longest anybody waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvtier.cache.geometry import Geometry
from kvtier.cache.level import Level
from kvtier.cache.storage_cache import StorageCache
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.keys import KEY_BYTES
from kvtier.testing.fake_engine import FakeEngine, content_of, token_chain
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.protocol import Tier
from kvtier.tiers.shared_fs import SharedFsTier

ROW, BLOCKS, DEADLINE_S = 8192, 6, 0.4
PROMPTS: list[Sequence[int]] = [range(BLOCKS), [0, 1, 2, 60, 61, 62]]
CONFIG = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, load_deadline_s=DEADLINE_S, discover_deadline_s=0.2)


OPENERS: dict[str, Callable[[Path], Tier]] = {
    "nvme": lambda folder: NvmeTier(str(folder), b"s" * 32, "layout", ROW, 256 * ROW, direct=False),
    "small nvme": lambda folder: NvmeTier(str(folder), b"s" * 32, "layout", ROW, 410_000, direct=False),
    "cxl": lambda folder: CxlTier(str(folder) + ".cxl", b"s" * 32, "layout", ROW, 4 << 20),
    "shared_fs": lambda folder: SharedFsTier(str(folder), b"s" * 32, "layout", ROW, 32 << 20, direct=False),
}


class Medium:
    """A real tier behind faults; a stall lasts until `gate` opens. `tier` is the one opened last."""

    def __init__(self, kind: str, folder: Path, *faults: Fault) -> None:
        self.gate = threading.Event()
        self.kind, self.folder = kind, folder
        self.tier = self.open(*faults)

    def open(self, *faults: Fault) -> FaultyTier:
        """Open it, or open it again, with these faults to come."""
        tier = self._open()
        self.tier = FaultyTier(tier, Script(faults), sleep=lambda seconds: self.gate.wait(20) and None)
        return self.tier

    def _open(self) -> Tier:
        tier = OPENERS[self.kind](self.folder)
        if isinstance(tier, CxlTier):
            assert tier.wait_ready(10)
        return tier


class Served:
    """One cache under the same prompts, whichever it is."""

    cache: TierCache | StorageCache
    totals: dict[tuple[str, tuple[str, ...]], float]

    def __init__(self, medium: Medium) -> None:
        self.medium, self.totals, self.longest_s, self.prompt_tokens = medium, {}, 0.0, 0

    def run(self) -> None:
        """Everything is asked for, stored, and forgotten by memory; then again, from below."""
        for _ in range(2):
            for prompt in PROMPTS:
                self.timed(prompt)

    def timed(self, prompt: Sequence[int]) -> int:
        """Serve a prompt, then forget it; returns the blocks not computed."""
        began = time.monotonic()
        served = self.ask(prompt)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.forget()
        return served

    @property
    def level(self) -> Level:
        """The one level below the engine's memory."""
        (level,) = self.cache.lower if isinstance(self.cache, TierCache) else self.cache.levels
        return level

    def reset(self) -> None:
        """Forget everything, everywhere."""
        self.cache.reset() if isinstance(self.cache, TierCache) else self.cache.clear()

    def counted(self, name: str) -> dict[str, float]:
        """What was counted under a name, by its last label."""
        found: dict[str, float] = {}
        for (counter, labels), n in self.totals.items():
            if counter == name:
                found[labels[-1]] = found.get(labels[-1], 0.0) + n
        return found

    def ask(self, prompt: Sequence[int]) -> int:
        """Serve a prompt; returns the blocks not computed."""
        raise NotImplementedError

    def forget(self) -> None:
        """What the engine keeps itself is lost; what is below stays."""

    def end(self) -> None:
        """Let go what stalls, check the books, close."""
        raise NotImplementedError

    def count(self, sums: dict[tuple[str, tuple[str, ...]], float]) -> None:
        for key, value in sums.items():
            self.totals[key] = self.totals.get(key, 0.0) + value


class ServedByTierCache(Served):
    """As vLLM does it."""

    cache: TierCache

    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        memory = DramTier.over(np.zeros(24 * ROW, np.uint8), ROW, 24, ROW, checksums=False)
        self.cache = TierCache(CONFIG, Geometry(16), memory, memory.row, [medium.tier])
        self.engine = FakeEngine(self.cache)

    def ask(self, prompt: Sequence[int]) -> int:
        request = self.engine.open(prompt, 1)
        self.prompt_tokens += request.context.prompt_tokens
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
        assert sum(self.counted("kvtier_tokens").values()) == self.prompt_tokens
        self.cache.close(drain_s=5.0)


class ServedByStorageCache(Served):
    """As SGLang does it."""

    cache: StorageCache

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
