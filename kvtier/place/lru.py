"""Leaf-first LRU: the policy to beat, and the guard's yardstick.

A heap of (last use, segment) with lazy updates: an entry is valid while its time equals the segment's last use. Only
resident leaves are candidates; when a leaf's last resident block goes, its parent becomes one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import Outcome, RequestContext
from kvtier.place.policy import TierView, Victim, register_policy


class LeafFirstLRU:
    """Evicts the tail of the least recently used resident leaf. Not thread-safe: one control thread."""

    name = "lru"

    def __init__(self, view: TierView) -> None:
        self._view = view
        self._used: dict[int, float] = {}
        self._sequence = 0
        view.tree.listen(self)

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        self._touch(path)

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        self._touch(path)

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        self._used.setdefault(segment.id, self._tick())

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        return

    def on_create(self, segment: Segment) -> None:
        self._used[segment.id] = self._tick()

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._used[head.id] = self._used.get(tail.id, 0)

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        self._used.pop(segment.id, None)

    def victims(self, rows: int, now: float) -> list[Victim]:
        view, freed = self._view, 0
        heap = [(self._used.get(leaf.id, 0), leaf.id, leaf) for leaf in view.leaves()]
        heapq.heapify(heap)
        kept: dict[int, int] = {}
        gone: dict[int, int] = {}
        victims: list[Victim] = []
        while heap and freed < rows:
            _, segment_id, segment = heapq.heappop(heap)
            keep, extent = view.evictable_from(segment), view.extent(segment)
            if keep >= extent:
                continue
            keep = self._trim(segment, keep, extent, rows - freed)
            freed += view.rows(segment, keep)
            victims.append(Victim(segment, keep))
            kept[segment_id] = keep
            parent = segment.parent
            if keep == 0 and parent is not None and parent.parent is not None:
                gone[parent.id] = gone.get(parent.id, 0) + 1
                resident = sum(1 for child in parent.children.values() if view.extent(child))
                if gone[parent.id] == resident:
                    heapq.heappush(heap, (self._used.get(parent.id, 0), parent.id, parent))
        return victims

    def _trim(self, segment: Segment, keep: int, extent: int, rows: int) -> int:
        """Do not take more of one segment than is needed: the largest offset that still frees `rows`."""
        low, high = keep, extent - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._view.rows(segment, middle) >= rows:
                low = middle
            else:
                high = middle - 1
        return low

    def _touch(self, path: Sequence[Segment]) -> None:
        # Heads are touched after tails: of two equally recent segments the deeper goes first.
        for segment in reversed(path):
            self._used[segment.id] = self._tick()

    def _tick(self) -> float:
        self._sequence += 1
        return self._sequence


register_policy("lru", LeafFirstLRU)
