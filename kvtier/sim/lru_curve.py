"""The hit rate of leaf-first LRU at every capacity, exactly, from one pass (Mattson et al., 1970).

LRU has the stack property: a block hits if and only if the capacity exceeds the number of distinct blocks that stand
before it in the order of recency. A request makes its blocks the most recent, heads before tails. So before the blocks
last used by request q stand exactly those last used by later requests, and, among q's own, their prefix. A prompt falls
into few runs of equal last use, and a Fenwick tree over requests answers for each.
"""

from __future__ import annotations

import numpy as np

from kvtier.sim.compiled import CompiledTrace, IntArray


class LRUCurve:
    """Hit blocks of leaf-first LRU as a function of capacity."""

    def __init__(self, trace: CompiledTrace) -> None:
        self.blocks = trace.blocks
        self._hits: IntArray = np.cumsum(_needed(trace))

    @property
    def best_hit_blocks(self) -> int:
        """Hits of an infinite cache."""
        return int(self._hits[-1])

    def hit_blocks(self, capacity_blocks: int) -> int:
        """Hits at one capacity."""
        return int(self._hits[min(capacity_blocks, self._hits.size - 1)])

    def hit_rate(self, capacity_blocks: int) -> float:
        """Share of block accesses that hit."""
        return self.hit_blocks(capacity_blocks) / self.blocks if self.blocks else 0.0

    def capacity_for(self, share: float) -> int:
        """The least capacity that has `share` of the infinite cache's hits."""
        return int(np.searchsorted(self._hits, share * self.best_hit_blocks, side="left"))


def _needed(trace: CompiledTrace) -> IntArray:
    """How many accesses need a capacity of exactly c blocks to hit, for c from 0 to the footprint."""
    previous, length = trace.previous_use(), trace.length[trace.segment]
    begins = np.ones(trace.segment.size, dtype=bool)
    begins[1:] = (trace.request[1:] != trace.request[:-1]) | (previous[1:] != previous[:-1])
    first = np.flatnonzero(begins)
    runs = zip(
        trace.request[first].tolist(),
        previous[first].tolist(),
        np.add.reduceat(length, first).tolist() if first.size else [],
        strict=True,
    )
    latest = _Fenwick(trace.requests)
    steps = np.zeros(trace.unique_blocks + 2, dtype=np.int64)
    # Of a request, heads come first and are the more recent: deeper runs must still see the state before it.
    current, moved = -1, 0
    for request, used, blocks in runs:
        if request != current:
            if moved:
                latest.add(current, moved)
            current, moved = request, 0
        moved += blocks
        if used >= 0:
            # Blocks of this very request that were taken from `latest` already stand before this run too.
            before = latest.total - latest.up_to(used) + (moved - blocks)
            steps[before + 1] += 1
            steps[before + blocks + 1] -= 1
            latest.add(used, -blocks)
    return np.cumsum(steps[:-1])


class _Fenwick:
    """Prefix sums under point updates."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self.total = 0

    def add(self, index: int, amount: int) -> None:
        self.total += amount
        index += 1
        while index < len(self._sums):
            self._sums[index] += amount
            index += index & -index

    def up_to(self, index: int) -> int:
        """Sum over 0 … index."""
        index, found = index + 1, 0
        while index:
            found += self._sums[index]
            index &= index - 1
        return found
