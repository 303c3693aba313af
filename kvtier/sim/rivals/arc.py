"""ARC (Megiddo and Modha, FAST 2003), leaf-first over segments.

Two recency lists, T1 for segments used once and T2 for those used again, and the ghosts B1, B2 of what each lost. A
ghost hit moves the target size `p` of T1. Sizes are counted in blocks. Victims are the oldest leaves of the list that
REPLACE names. The steps of the paper run once per request instead of once per block; a prompt of one block gives the
textbook algorithm exactly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import RequestContext
from kvtier.place.policy import TierView, Victim
from kvtier.sim.rivals.leafwise import Cutter, LeafwisePolicy

ONCE, AGAIN = 0, 1  # T1 and T2, and likewise B1 and B2


class _Ghosts:
    """Blocks evicted from one list, by segment, oldest first out."""

    def __init__(self) -> None:
        self.blocks = 0
        self._held: dict[int, tuple[int, int]] = {}  # segment id -> (blocks, stamp)
        self._order: list[tuple[int, int]] = []  # (stamp, segment id); entries with another stamp are outdated

    def add(self, segment_id: int, blocks: int, stamp: int) -> None:
        held, _ = self._held.get(segment_id, (0, 0))
        self._held[segment_id] = (held + blocks, stamp)
        self.blocks += blocks
        heapq.heappush(self._order, (stamp, segment_id))

    def take(self, segment_id: int) -> int:
        """Forget a segment's ghost and return its blocks."""
        held, _ = self._held.pop(segment_id, (0, 0))
        self.blocks -= held
        return held

    def split(self, head_id: int, tail_id: int, head_blocks: int) -> None:
        """Up to `head_blocks` leading blocks of the tail's ghost are now the new head's."""
        if tail_id not in self._held:
            return
        stamp = self._held[tail_id][1]
        held = self.take(tail_id)
        if head_blocks:
            self.add(head_id, min(held, head_blocks), stamp)
        if held > head_blocks:
            self.add(tail_id, held - head_blocks, stamp)

    def trim(self, blocks: int) -> None:
        """Forget the oldest ghosts until at most `blocks` are left."""
        while self.blocks > blocks:
            stamp, segment_id = self._order[0]
            held, current = self._held.get(segment_id, (0, -1))
            if current == stamp and held > self.blocks - blocks:
                self._held[segment_id] = (held - (self.blocks - blocks), stamp)
                self.blocks = blocks
                return
            heapq.heappop(self._order)
            if current == stamp:
                self.take(segment_id)


class ARC(LeafwisePolicy):
    """Adapts between recency and frequency. No history beyond one capacity's worth of ghosts."""

    name = "arc"

    def __init__(self, view: TierView) -> None:
        super().__init__(view)
        self._target = 0.0
        self._size = [0, 0]
        self._ghosts = (_Ghosts(), _Ghosts())
        self._list: dict[int, int] = {}
        self._stamp: dict[int, int] = {}
        self._clock = 0
        self._newcomers = False
        self._ghost_again = False

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        self._newcomers = self._ghost_again = False
        for segment in reversed(path):
            extent = self.view.extent(segment)
            ghosts = [ghosts.take(segment.id) for ghosts in self._ghosts]
            self._adapt(ghosts)
            if extent:
                self._size[self._list[segment.id]] -= extent
            again = bool(extent or ghosts[ONCE] or ghosts[AGAIN])
            self._list[segment.id] = AGAIN if again else ONCE
            self._size[self._list[segment.id]] += extent
            self._newcomers |= not again
            self._clock += 1
            self._stamp[segment.id] = self._clock

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        self._size[self._list[segment.id]] += self.view.extent(segment) - old_extent

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        where, blocks = self._list[segment.id], old_extent - self.view.extent(segment)
        self._size[where] -= blocks
        self._clock += 1
        self._ghosts[where].add(segment.id, blocks, self._clock)
        capacity = self.view.capacity_rows
        self._ghosts[ONCE].trim(max(0, capacity - self._size[ONCE]))
        self._ghosts[AGAIN].trim(max(0, 2 * capacity - sum(self._size) - self._ghosts[ONCE].blocks))

    def on_split(self, head: Segment, tail: Segment) -> None:
        if tail.id in self._list:
            self._list[head.id], self._stamp[head.id] = self._list[tail.id], self._stamp[tail.id]
        for ghosts in self._ghosts:
            # A ghost begins where residency ends: eviction is leaf-first, and ghosts are trimmed from the end.
            ghosts.split(head.id, tail.id, head.length - self.view.extent(head))

    def on_remove(self, segment: Segment) -> None:
        self._list.pop(segment.id, None)
        self._stamp.pop(segment.id, None)
        for ghosts in self._ghosts:
            ghosts.take(segment.id)

    def victims(self, rows: int, now: float) -> list[Victim]:
        heaps: tuple[list[tuple[int, int, Segment]], ...] = ([], [])
        for leaf in self.view.leaves():
            heaps[self._list[leaf.id]].append((self._stamp[leaf.id], leaf.id, leaf))
        for heap in heaps:
            heapq.heapify(heap)
        cutter, once = Cutter(self.view), self._size[ONCE]
        while rows > 0 and (heaps[ONCE] or heaps[AGAIN]):
            surplus = self._surplus(once)
            where = ONCE if heaps[ONCE] and (surplus > 0 or not heaps[AGAIN]) else AGAIN
            segment = heaps[where][0][2]
            blocks = min(rows, cutter.left(segment))
            if where == ONCE and surplus > 0:
                blocks = min(blocks, surplus)
            parent = cutter.cut(segment, blocks)
            rows -= blocks
            once -= blocks if where == ONCE else 0
            if not cutter.left(segment):
                heapq.heappop(heaps[where])
            if parent is not None:
                heapq.heappush(heaps[self._list[parent.id]], (self._stamp[parent.id], parent.id, parent))
        return cutter.victims()

    def _adapt(self, ghosts: list[int]) -> None:
        """Move the target: the paper's δ for each block of a ghost hit."""
        capacity = self.view.capacity_rows
        sizes = [held.blocks + hit for held, hit in zip(self._ghosts, ghosts, strict=True)]
        if ghosts[ONCE]:
            step = max(1.0, sizes[AGAIN] / sizes[ONCE])
            self._target = min(capacity, self._target + ghosts[ONCE] * step)
        if ghosts[AGAIN]:
            step = max(1.0, sizes[ONCE] / sizes[AGAIN])
            self._target = max(0.0, self._target - ghosts[AGAIN] * step)
            self._ghost_again = True

    def _surplus(self, once: int) -> int:
        """Blocks T1 has to give before T2 does. The paper evicts before it inserts, so one newcomer is not counted;
        its tie goes to T1 after a hit in B2."""
        over = once - self._target - (1 if self._newcomers else 0)
        if self._ghost_again and over == 0:
            return 1
        return max(0, math.ceil(over))
