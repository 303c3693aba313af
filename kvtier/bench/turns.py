"""Paired, interleaved measurement: limit, tier, limit, tier, ... so that a busy neighbour hits both alike.

Whatever the machine does besides, the two sides of one round see nearly the same of it; the ratio of a round is
trusted more than either rate, and the median over rounds more than any round.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

Side = Callable[[], "Turn"]
MoveBlocks = Callable[[int, int], None]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One result: what a tier did, beside its limit. `ratio` is the median of the rounds' own ratios."""

    tier: str
    op: str
    block_bytes: int
    depth: int
    bytes_per_s: int
    limit: str
    limit_bytes_per_s: int
    ratio: float
    p99_s: float


class Turn(msgspec.Struct, frozen=True):
    """One turn of one side: its rate, and the seconds of each call where the side knows them."""

    bytes_per_s: float
    call_s: list[float] = []


class Workers:
    """Moves `n_blocks` blocks in calls of `call_blocks`, shared out over `depth` threads."""

    def __init__(self, n_blocks: int, block_bytes: int, depth: int, call_blocks: int, turn_s: float) -> None:
        self.n_blocks, self.block_bytes, self.depth, self.turn_s = n_blocks, block_bytes, depth, turn_s
        self.calls = [(i, min(n_blocks, i + call_blocks)) for i in range(0, n_blocks, call_blocks)]
        self._pool = ThreadPoolExecutor(depth)

    def side(self, move: MoveBlocks, before: Callable[[], None] | None = None) -> Side:
        """A side that moves all blocks again and again for about `turn_s`; `before` runs before each, unmeasured."""

        def turn() -> Turn:
            call_s: list[float] = []
            elapsed_s, n_bytes = 0.0, 0
            while elapsed_s < self.turn_s:
                if before is not None:
                    before()
                elapsed_s += self._once(move, call_s)
                n_bytes += self.n_blocks * self.block_bytes
            return Turn(n_bytes / elapsed_s, call_s)

        return turn

    def _once(self, move: MoveBlocks, call_s: list[float]) -> float:
        calls = iter(self.calls)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    call = next(calls, None)
                if call is None:
                    return
                begin_s = time.perf_counter()
                move(*call)
                call_s.append(time.perf_counter() - begin_s)

        begin_s = time.perf_counter()
        for done in [self._pool.submit(work) for _ in range(self.depth)]:
            done.result()
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def compare(
    tier: str, op: str, block_bytes: int, depth: int, limit: str, sides: tuple[Side, Side], rounds: int
) -> Line:
    """`sides` are the tier's and the limit's. Each runs once unmeasured, then in `rounds` rounds, taking turns at being
    first."""
    ours, theirs = sides
    theirs()
    ours()
    mine: list[Turn] = []
    bound: list[Turn] = []
    for k in range(rounds):
        for side, turns in ((ours, mine), (theirs, bound)) if k % 2 else ((theirs, bound), (ours, mine)):
            turns.append(side())
    ratios = [a.bytes_per_s / b.bytes_per_s for a, b in zip(mine, bound, strict=True)]
    call_s = [seconds for turn in mine for seconds in turn.call_s]
    return Line(
        tier=tier,
        op=op,
        block_bytes=block_bytes,
        depth=depth,
        bytes_per_s=round(_median_rate(mine)),
        limit=limit,
        limit_bytes_per_s=round(_median_rate(bound)),
        ratio=round(statistics.median(ratios), 3),
        p99_s=round(float(np.quantile(call_s, 0.99)), 7) if call_s else 0.0,
    )


def _median_rate(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.bytes_per_s for turn in turns)


def usable_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))
