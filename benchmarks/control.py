"""What the engine's thread pays: every call of the cache, with prompts of 10,000 blocks.

    python -m benchmarks.control [--vllm] [--blocks 10000] [--rounds 20] [--json]

No engine and no bytes worth speaking of: rows are 64 bytes, the tier below is a dictionary. What is timed is decisions.
Each round, a prompt is computed and stored, looked up and loaded from memory, and, after memory has lost it, promoted
from below, with other prompts resident; then a step in which nothing happens. With `--vllm`, the same through what
vLLM's scheduler calls (benchmarks/control_vllm.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtier.cache.geometry import Geometry
from kvtier.cache.request import CachedRequest
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.keys import KEY_BYTES, Chain
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import TierProbe

ROW_BYTES, BLOCK_TOKENS = 64, 16
GOAL_S = 0.001


class Below(MemoryTier):
    """A dictionary that says it is as slow as a disk: a busy machine shall not make it look like a failing tier."""

    def probe(self) -> TierProbe:
        return TierProbe(0.1, 1e6, 0.1, 1e6)


def cache_for(blocks: int) -> TierCache:
    """Memory for three prompts of so many blocks, a tier below for four."""
    rows = 3 * blocks
    memory = DramTier.over(np.zeros(rows * ROW_BYTES, np.uint8), ROW_BYTES, rows, ROW_BYTES, checksums=False)
    config = CacheConfig(dram_bytes=1, io_threads=2, ghost_blocks=10 * blocks, gate=False)
    below = Below(ROW_BYTES, 4 * blocks, name="nvme")
    return TierCache(config, Geometry(BLOCK_TOKENS), memory, memory.row, [below])


class Stopwatch:
    """Seconds by call: of this thread, and that passed."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.own: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        began, began_own = time.perf_counter(), time.thread_time()
        yield
        self.own[name].append(time.thread_time() - began_own)
        self.seconds[name].append(time.perf_counter() - began)

    def settle(self, cache: TierCache, name: str, call: Callable[[], object]) -> None:
        """Let the I/O threads finish, then time the call that takes in what they did."""
        while cache.mover.busy:
            cache.mover.drain(5.0)
            with self.timed(name):
                call()


class Control(Stopwatch):
    """One cache, and a stopwatch a call."""

    def __init__(self, blocks: int, stored_at_once: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.stored_at_once = stored_at_once
        self.cache = cache_for(blocks)
        self._draw = np.random.default_rng(0)
        self._count = 0

    def round(self) -> None:
        """A prompt through its whole life, three times."""
        chain = Chain(self._draw.bytes(self.blocks * KEY_BYTES))
        rows = np.zeros((self.blocks, 2), np.intp)
        rows[:, 0] = np.arange(self.blocks)
        request = self._open("open, new", chain)
        self._lookup("lookup, nothing there", request)
        with self.timed("started"):
            self.cache.started(request)
        for start in range(0, self.blocks, self.stored_at_once):
            part = rows[start : start + self.stored_at_once]
            with self.timed("offer_store"):
                granted = self.cache.offer_store(request, part)
            with self.timed("commit_store"):
                self.cache.commit_store(request, part[granted.at])
            self.settle(self.cache, "poll, a write ended", self.cache.poll)
        self._close("close", request)

        request = self._open("open, known", chain)
        self._lookup("lookup, all in memory", request)
        with self.timed("lookup, again"):
            self.cache.lookup(request, 0)
        with self.timed("take_load"):
            self.cache.take_load(request, rows)
        with self.timed("end_load"):
            self.cache.end_load(request)
        self._close("close", request)

        self.cache.memory.clear()
        self.cache.epoch += 1
        request = self._open("open, known", chain)
        with self.timed("lookup, all below"):
            waiting = self.cache.lookup(request, 0) is None
        with self.timed("lookup, still waiting"):
            self.cache.lookup(request, 0)
        if waiting:
            self.settle(self.cache, "poll, a promotion arrived", self.cache.poll)
        self._close("close", request)
        with self.timed("poll, nothing"):
            self.cache.poll()

    def close(self) -> None:
        """Stop the threads."""
        self.cache.close()

    def _open(self, name: str, chain: Chain) -> CachedRequest:
        self._count += 1
        now = self.cache.clock.now()
        context = RequestContext(
            request_id=f"r{self._count}", arrival_s=now, prompt_tokens=self.blocks * BLOCK_TOKENS + 1
        )
        with self.timed(name):
            return self.cache.open(context, chain)

    def _lookup(self, name: str, request: CachedRequest) -> None:
        with self.timed(name):
            self.cache.lookup(request, 0)

    def _close(self, name: str, request: CachedRequest) -> None:
        with self.timed(name):
            self.cache.close_request(
                request, Outcome(finished_s=self.cache.clock.now(), stop_reason=StopReason.END_TURN)
            )


@dataclass(frozen=True)
class Cost:
    """One call: seconds of this thread, and seconds that passed, in which I/O threads may have held Python's lock."""

    calls: int
    own_p50_s: float
    own_p99_s: float
    wall_p50_s: float
    wall_p99_s: float


def measure(blocks: int, rounds: int, stored_at_once: int = 512, vllm: bool = False) -> dict[str, Cost]:
    """What every call costs."""
    kind: type[Any] = Control
    if vllm:
        from benchmarks.control_vllm import VllmControl

        kind = VllmControl
    control = kind(blocks, stored_at_once)
    control.round()
    control.seconds.clear()
    control.own.clear()
    gc.collect()
    for _ in range(rounds):
        control.round()
    control.close()
    return {
        name: Cost(len(wall), *(float(np.percentile(of, q)) for of in (control.own[name], wall) for q in (50, 99)))
        for name, wall in control.seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--vllm", action="store_true", help="through the calls of vLLM's scheduler")
    options = parser.parse_args()
    found = measure(options.blocks, options.rounds, vllm=options.vllm)
    if options.json:
        for name, cost in found.items():
            sys.stdout.write(json.dumps({"call": name, "blocks": options.blocks, **asdict(cost)}) + "\n")
        return 0
    table = Table("call", "calls", "own p50 ms", "own p99", "wall p50", "wall p99")
    table.title = f"prompts of {options.blocks:,} blocks; * above {GOAL_S * 1e3:.0f} ms"
    for name, cost in found.items():
        mark = "" if cost.own_p50_s <= GOAL_S else " *"
        times = (cost.own_p50_s, cost.own_p99_s, cost.wall_p50_s, cost.wall_p99_s)
        table.add_row(name + mark, f"{cost.calls:,}", *(f"{seconds * 1e3:.3f}" for seconds in times))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
