"""What the rivals share: state by segment of uniform history, and taking resident leaves in a given order.

The textbook policies speak of single objects. Here an object is a segment: a run of blocks that were always used
together. So that this is true of every block in it, a rival forbids leaves to grow in place (a session's next turn
becomes a child). Where only part of a segment is resident, its history is that of the whole. On a stream of one-block
prompts every rival is its textbook self, and tests hold it to that.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.index.tree import Segment
from kvtier.model.request import Outcome, RequestContext
from kvtier.place.policy import TierView, Victim

Key = TypeVar("Key", float, tuple[int, int])


class LeafwisePolicy(ABC):
    """An EvictionPolicy and TreeListener that does nothing; rivals override what they need."""

    name = "leafwise"

    def __init__(self, view: TierView) -> None:
        self.view = view
        view.tree.may_grow = never_grow
        view.tree.listen(self)

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        return

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        return

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        return

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        return

    @abstractmethod
    def victims(self, rows: int, now: float) -> list[Victim]:
        """As in `EvictionPolicy`."""

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        return

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        return


def never_grow(leaf: Segment) -> bool:
    """For `PrefixTree.may_grow`: a prompt that runs past a leaf makes a child."""
    return False


class Cutter:
    """One eviction round: remembers what has been cut so far and which parents became leaves by it.

    The simulator's tier has one row a block and no leases, so rows are blocks and everything resident may be cut.
    """

    def __init__(self, view: TierView) -> None:
        self._view = view
        self._kept: dict[int, Victim] = {}
        self._children_gone: dict[int, int] = {}

    def left(self, segment: Segment) -> int:
        """Resident blocks of `segment` after the cuts so far."""
        cut = self._kept.get(segment.id)
        return self._view.extent(segment) if cut is None else cut.keep

    def cut(self, segment: Segment, blocks: int) -> Segment | None:
        """Take the last `blocks` resident blocks. Returns the parent if that made it a leaf."""
        keep = self.left(segment) - blocks
        # Re-inserted at the end: whatever is cut last of a segment comes before the first cut of its parent.
        self._kept.pop(segment.id, None)
        self._kept[segment.id] = Victim(segment, keep)
        parent = segment.parent
        if keep or parent is None or parent.parent is None:
            return None
        gone = self._children_gone[parent.id] = self._children_gone.get(parent.id, 0) + 1
        resident = sum(1 for child in parent.children.values() if self._view.extent(child))
        return parent if gone == resident else None

    def victims(self) -> list[Victim]:
        return list(self._kept.values())


def lowest_first(view: TierView, key: Callable[[int], Key], rows: int) -> list[Victim]:
    """Cut the leaves of the lowest key (by segment id) until `rows` blocks are free; ties go deepest first."""
    heap = [(key(leaf.id), -leaf.depth, leaf.id, leaf) for leaf in view.leaves()]
    heapq.heapify(heap)
    cutter = Cutter(view)
    while heap and rows > 0:
        _, _, _, segment = heapq.heappop(heap)
        blocks = min(rows, cutter.left(segment))
        rows -= blocks
        parent = cutter.cut(segment, blocks)
        if parent is not None:
            heapq.heappush(heap, (key(parent.id), -parent.depth, parent.id, parent))
    return cutter.victims()
