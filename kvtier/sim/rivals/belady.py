"""Belady's clairvoyant policy with bypass: evict what is used again last, the block just inserted not excepted.

A block's next use is never later than its child's, so the farthest next use is always a leaf's: what is kept is closed
under prefixes, every resident block of a prompt is a hit, and the hit count is an exact upper bound for any policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import RequestContext
from kvtier.place.policy import TierView, Victim
from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.rivals.leafwise import Cutter, LeafwisePolicy


class Belady(LeafwisePolicy):
    """Must be replayed over `future.tree`, with exactly the requests the future was compiled from."""

    name = "belady"

    def __init__(self, view: TierView, future: CompiledTrace) -> None:
        super().__init__(view)
        self._following = future.next_use()
        self._starts: list[int] = future.starts.tolist()
        self._request = 0
        self._next: dict[int, int] = {}
        # (-next use, -depth, id, segment), an entry outdated by a later use is skipped when met
        self._heap: list[tuple[int, int, int, Segment]] = []

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        known, heap = self._next, self._heap
        start, stop = self._starts[self._request : self._request + 2]
        for segment, following in zip(path, self._following[start:stop].tolist(), strict=True):
            known[segment.id] = following
            heapq.heappush(heap, (-following, -segment.depth, segment.id, segment))
        self._request += 1

    def victims(self, rows: int, now: float) -> list[Victim]:
        heap, cutter = self._heap, Cutter(self.view)
        while heap and rows > 0:
            minus_next, _, segment_id, segment = heap[0]
            left = cutter.left(segment) if -minus_next == self._next[segment_id] else 0
            blocks = min(rows, left)
            if blocks == left:
                heapq.heappop(heap)
            if blocks:
                cutter.cut(segment, blocks)
                rows -= blocks
        return cutter.victims()
