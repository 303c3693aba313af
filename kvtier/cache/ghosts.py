"""What is remembered after its bytes are gone: segments resident nowhere, up to a cap.

A ghost costs its keys and a few words, and is what lets an eviction not be a verdict. The oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.index.residency import Residency
from kvtier.index.tree import PrefixTree, Segment


class Ghosts:
    """Bounds the tree: at most `cap_blocks` blocks beyond what the levels can hold. One control thread."""

    def __init__(self, tree: PrefixTree, residencies: Callable[[], Sequence[Residency]], cap_blocks: int) -> None:
        self._tree = tree
        self._residencies = residencies
        self._cap_blocks = cap_blocks
        self._order: OrderedDict[int, Segment] = OrderedDict()
        tree.listen(self)

    def visited(self, path: Sequence[Segment]) -> None:
        """A request used this path: deeper segments age first."""
        for segment in reversed(path):
            self._order[segment.id] = segment
            self._order.move_to_end(segment.id)

    def prune(self) -> None:
        """Forget the oldest ghosts until the tree is within its bound. Amortised O(1) a visit."""
        residencies = self._residencies()
        cap = self._cap_blocks + sum(residency.capacity_rows for residency in residencies)
        if self._tree.blocks <= cap:
            return
        target = cap - cap // 16
        for segment in list(self._order.values()):
            if self._tree.blocks <= target:
                return
            if not segment.children:
                self._tree.truncate(segment, max(residency.extent(segment) for residency in residencies))

    def on_create(self, segment: Segment) -> None:
        self._order[segment.id] = segment

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._order[head.id] = head

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        self._order.pop(segment.id, None)
