"""Leaf-first LRU: the policy to beat, and the guard's yardstick.

Recency is one number per segment; heads are touched after tails, so of two equally recent segments the deeper goes
first. Each cache that is ordered by it (the tier, the guard's shadow) queues its leaves in a heap whose entries may be
out of date: recency only grows, so an entry is a lower bound, and one found out of date is put back with its true
number. Touching costs an assignment per segment, evicting O(log n) per victim.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import Outcome, RequestContext
from kvtier.place.draw import Key, draw_victims
from kvtier.place.policy import TierView, Victim, register_policy
from kvtier.place.residency import Residency
from kvtier.predict.forecast import Forecast


class Recency:
    """When each segment was last used, as a sequence number. A TreeListener."""

    def __init__(self, tree: PrefixTree) -> None:
        self._used = array("q", bytes(8 * max(64, tree.id_limit)))
        self._sequence = 0
        tree.listen(self)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 8 * len(self._used)

    def used(self, segment_id: int) -> int:
        """The larger, the later."""
        return self._used[segment_id]

    def touch(self, path: Sequence[Segment]) -> None:
        """A request used this path."""
        sequence, used = self._sequence, self._used
        for segment in reversed(path):
            sequence += 1
            used[segment.id] = sequence
        self._sequence = sequence

    def on_create(self, segment: Segment) -> None:
        self._reserve(segment.id)
        self._sequence += 1
        self._used[segment.id] = self._sequence

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._reserve(head.id)
        self._used[head.id] = self._used[tail.id]

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        return

    def _reserve(self, i: int) -> None:
        while i >= len(self._used):
            self._used.frombytes(bytes(8 * len(self._used)))


class LeafQueue:
    """The leaves of one residency, least recently used first."""

    def __init__(self, recency: Recency, residency: Residency) -> None:
        self._recency = recency
        self._residency = residency
        self._heap: list[tuple[int, int]] = []
        self._queued: set[int] = set()
        residency.on_leaf = self._push
        for i in residency.leaves.tolist():
            self._push(i)

    def key_of(self, segment_id: int) -> Key:
        """Its place in the order of eviction."""
        return (self._recency.used(segment_id),)

    @contextmanager
    def drawing(self) -> Iterator[Iterator[tuple[Key, int]]]:
        """The leaves in order, while the block lasts; afterwards all that are leaves still are candidates again."""
        drawn: list[int] = []
        try:
            yield self._oldest(drawn)
        finally:
            for i in drawn:
                self._push(i)

    def _oldest(self, drawn: list[int]) -> Iterator[tuple[Key, int]]:
        recency, residency, heap = self._recency, self._residency, self._heap
        while heap:
            key, i = heappop(heap)
            used = recency.used(i)
            if not residency.is_leaf(i):
                self._queued.discard(i)
            elif key != used:
                heappush(heap, (used, i))
            else:
                self._queued.discard(i)
                drawn.append(i)
                yield (used,), i

    def _push(self, i: int) -> None:
        if i not in self._queued:
            self._queued.add(i)
            heappush(self._heap, (self._recency.used(i), i))


class LeafFirstLRU:
    """Evicts the tail of the least recently used resident leaf. Not thread-safe: one control thread."""

    name = "lru"

    def __init__(self, view: TierView, recency: Recency | None = None, residency: Residency | None = None) -> None:
        """`recency` and `residency` may be another policy's, which then keeps them up to date."""
        self._view = view
        self._owns_recency, self._owns_residency = recency is None, residency is None
        self._recency = recency or Recency(view.tree)
        self._residency = residency or mirror_of(view)
        self._queue = LeafQueue(self._recency, self._residency)

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        self._touch(path)

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        self._touch(path)

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        if self._owns_residency:
            self._residency.set_extent(segment, self._view.extent(segment))

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        if self._owns_residency:
            self._residency.set_extent(segment, self._view.extent(segment))

    def victims(self, rows: int, now: float) -> list[Victim]:
        with self._queue.drawing() as oldest:
            return draw_victims(self._view, self._residency, oldest, self._queue.key_of, rows)

    def _touch(self, path: Sequence[Segment]) -> None:
        if self._owns_recency:
            self._recency.touch(path)


def mirror_of(view: TierView) -> Residency:
    """A residency that starts as the tier is now (a tier may be recovered from a medium before its policy is made)."""
    residency = Residency(view.tree)
    for segment in view.tree.segments():
        extent = view.extent(segment)
        if extent:
            residency.set_extent(segment, extent)
    return residency


def _make(view: TierView, forecast: Forecast | None) -> LeafFirstLRU:
    return LeafFirstLRU(view)


register_policy("lru", _make)
