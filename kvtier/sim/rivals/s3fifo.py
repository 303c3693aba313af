"""S3-FIFO (Yang et al., SOSP 2023), leaf-first over segments.

A small FIFO (a tenth of the capacity) for newcomers, a main FIFO, and a ghost FIFO of what left the small one. Leaving
the small queue, a segment used at least twice since moves to the main one, any other goes; leaving the main queue, one
used since goes round again. The queue's head is its oldest leaf. Sizes are counted in blocks. As in the authors' own
code, newcomers fill the main queue once the small one is full, until something must leave for the first time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import RequestContext
from kvtier.place.policy import TierView, Victim
from kvtier.sim.rivals.leafwise import Cutter, LeafwisePolicy

SMALL, MAIN = 0, 1
SMALL_SHARE = 0.1
PROMOTE_AT = 2
MOST_USES = 3

_Heap = list[tuple[int, int, int, Segment]]


class S3FIFO(LeafwisePolicy):
    """Quick demotion of one-hit prompts; no recency at all beyond it."""

    name = "s3fifo"

    def __init__(self, view: TierView) -> None:
        super().__init__(view)
        self._small_target = max(1, int(view.capacity_rows * SMALL_SHARE))
        self._ghost_limit = view.capacity_rows - self._small_target
        self._size = [0, 0]
        self._queue: dict[int, int] = {}
        self._stamp: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._ghost_blocks = 0
        self._clock = 0
        self._evicting = False
        self._newcomers = False

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        self._newcomers = False
        for segment in reversed(path):
            extent, ghost = self.view.extent(segment), self._ghosts.pop(segment.id, 0)
            self._ghost_blocks -= ghost
            if extent:
                self._uses[segment.id] = min(MOST_USES, self._uses[segment.id] + 1)
                if ghost and self._queue[segment.id] == SMALL:
                    self._move(segment, MAIN, extent)
            else:
                filling = not self._evicting and self._size[SMALL] >= self._small_target
                self._queue[segment.id] = MAIN if ghost or filling else SMALL
                self._newcomers |= self._queue[segment.id] == SMALL
                self._uses[segment.id] = 0
                self._stamp[segment.id] = self._tick()

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        self._size[self._queue[segment.id]] += self.view.extent(segment) - old_extent

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        queue, blocks = self._queue[segment.id], old_extent - self.view.extent(segment)
        self._evicting = True
        self._size[queue] -= blocks
        if queue == SMALL:
            self._ghosts[segment.id] = self._ghosts.pop(segment.id, 0) + blocks
            self._ghost_blocks += blocks
        while self._ghost_blocks > self._ghost_limit and self._ghosts:
            self._ghost_blocks -= self._ghosts.popitem(last=False)[1]

    def on_split(self, head: Segment, tail: Segment) -> None:
        for state in (self._queue, self._stamp, self._uses):
            if tail.id in state:
                state[head.id] = state[tail.id]
        held, in_head = self._ghosts.get(tail.id, 0), head.length - self.view.extent(head)
        if held and in_head:  # a ghost begins where residency ends; the head's part becomes the youngest ghost by that
            self._ghosts[head.id] = min(held, in_head)
            self._ghosts[tail.id] = held - min(held, in_head)
            if not self._ghosts[tail.id]:
                del self._ghosts[tail.id]

    def on_remove(self, segment: Segment) -> None:
        for state in (self._queue, self._stamp, self._uses):
            state.pop(segment.id, None)
        self._ghost_blocks -= self._ghosts.pop(segment.id, 0)

    def victims(self, rows: int, now: float) -> list[Victim]:
        heaps: tuple[_Heap, _Heap] = ([], [])
        for leaf in self.view.leaves():
            heaps[self._queue[leaf.id]].append(self._entry(leaf))
        heapq.heapify(heaps[SMALL])
        heapq.heapify(heaps[MAIN])
        cutter, queue = Cutter(self.view), None
        small = self._size[SMALL] - (1 if self._newcomers else 0)  # the paper evicts before it inserts
        while rows > 0 and (heaps[SMALL] or heaps[MAIN]):
            if queue is None or not heaps[queue]:
                queue = SMALL if heaps[SMALL] and (small >= self._small_target or not heaps[MAIN]) else MAIN
            segment = heaps[queue][0][3]
            left = cutter.left(segment)
            if self._stays(segment, queue, left):
                heapq.heappop(heaps[queue])
                heapq.heappush(heaps[MAIN], self._entry(segment))
                small -= left if queue == SMALL else 0
                continue
            blocks = min(rows, left)
            if queue == SMALL and small >= self._small_target:
                blocks = min(blocks, small - self._small_target + 1)
            parent = cutter.cut(segment, blocks)
            rows -= blocks
            small -= blocks if queue == SMALL else 0
            if blocks == left:
                heapq.heappop(heaps[queue])
            if parent is not None:
                heapq.heappush(heaps[self._queue[parent.id]], self._entry(parent))
            queue = None  # chosen again after every block that left, not while blocks are passed on
        return cutter.victims()

    def _stays(self, segment: Segment, queue: int, blocks: int) -> bool:
        """Whether the head of a queue is kept; it then stands at the end of the main one."""
        uses = self._uses[segment.id]
        if queue == SMALL:
            if uses < PROMOTE_AT:
                return False
            self._move(segment, MAIN, blocks)
            self._uses[segment.id] = 0
            return True
        if not uses:
            return False
        self._uses[segment.id] = uses - 1
        self._stamp[segment.id] = self._tick()
        return True

    def _move(self, segment: Segment, queue: int, blocks: int) -> None:
        self._size[self._queue[segment.id]] -= blocks
        self._size[queue] += blocks
        self._queue[segment.id] = queue
        self._stamp[segment.id] = self._tick()

    def _entry(self, segment: Segment) -> tuple[int, int, int, Segment]:
        return self._stamp[segment.id], -segment.depth, segment.id, segment

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
