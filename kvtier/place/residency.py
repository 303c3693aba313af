"""Which blocks a cache holds, as one extent per segment: a policy's mirror of its tier, or a shadow cache.

Residency is leaf-first (place/policy.py), so a number per segment says everything: its first `extent` blocks are held.
The set of held leaves is kept with every change, as an array that can be scored in one batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree, Segment

_NONE = -1


class Residency:
    """Extents, counts of held children, and the held leaves. A TreeListener; one writer."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        n = max(64, tree.id_limit)
        self._extent = array("i", bytes(4 * n))
        self._children = array("i", bytes(4 * n))
        self._place = array("i", [_NONE]) * n  # position among the leaves
        self._leaf_ids: npt.NDArray[np.int32] = np.zeros(64, np.int32)
        self._leaves = 0
        self.blocks = 0
        self.on_leaf: Callable[[int], None] = lambda segment_id: None  # told of every new leaf
        tree.listen(self)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 12 * len(self._extent) + self._leaf_ids.nbytes

    @property
    def leaves(self) -> npt.NDArray[np.int32]:
        """Ids of the held leaves: a view, valid until the next change."""
        return self._leaf_ids[: self._leaves]

    def extent(self, segment_id: int) -> int:
        """Leading blocks of a segment held."""
        return self._extent[segment_id]

    def extents(self, segment_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Leading blocks held of each of these segments."""
        return np.frombuffer(self._extent, np.int32)[segment_ids]

    def held_children(self, segment_id: int) -> int:
        """How many children of a segment have held blocks."""
        return self._children[segment_id]

    def is_leaf(self, segment_id: int) -> bool:
        """The segment has held blocks and no child with any."""
        return self._place[segment_id] != _NONE

    def leading(self, path: Sequence[Segment]) -> int:
        """How many leading blocks of a path are held."""
        hits, extents = 0, self._extent
        for segment in path:
            extent = extents[segment.id]
            hits += extent
            if extent < segment.length:
                break
        return hits

    def hold(self, path: Sequence[Segment]) -> None:
        """Hold a path whole."""
        for segment in path:
            if self._extent[segment.id] < segment.length:
                self.set_extent(segment, segment.length)

    def set_extent(self, segment: Segment, extent: int) -> None:
        """Blocks came or went: `segment` now holds its first `extent` ones."""
        i, parent = segment.id, segment.parent
        old = self._extent[i]
        self._extent[i] = extent
        self.blocks += extent - old
        if extent and not old:
            if not self._children[i]:
                self._add_leaf(i)
            if parent is not None:
                self._children[parent.id] += 1
                self._drop_leaf(parent.id)
        elif old and not extent:
            self._drop_leaf(i)
            if parent is not None:
                self._children[parent.id] -= 1
                if not self._children[parent.id] and self._extent[parent.id]:
                    self._add_leaf(parent.id)

    def check_integrity(self) -> None:
        """Raise IntegrityError if extents, counts and leaves disagree. A full traversal."""
        blocks, leaves = 0, set()
        for segment in self._tree.segments():
            extent = self._extent[segment.id]
            children = sum(1 for child in segment.children.values() if self._extent[child.id])
            blocks += extent
            if children != self._children[segment.id] or not 0 <= extent <= segment.length:
                raise IntegrityError(f"{segment!r} holds {extent} blocks and {children} children")
            if extent and not children:
                leaves.add(segment.id)
        if blocks != self.blocks or leaves != set(self.leaves.tolist()):
            raise IntegrityError(f"{blocks} blocks, {len(leaves)} leaves held; {self.blocks}, {self._leaves} counted")

    def on_create(self, segment: Segment) -> None:
        self._reset(segment.id)

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._reset(head.id)
        extent = self._extent[tail.id]
        if not extent:
            return
        self._extent[head.id] = min(extent, head.length)
        self._extent[tail.id] = max(0, extent - head.length)
        if extent > head.length:
            self._children[head.id] = 1
        else:
            self._drop_leaf(tail.id)
            self._add_leaf(head.id)

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        if self._extent[segment.id] > segment.length:
            self.set_extent(segment, segment.length)

    def on_remove(self, segment: Segment) -> None:
        if self._extent[segment.id]:
            self.set_extent(segment, 0)

    def _add_leaf(self, i: int) -> None:
        if self._place[i] != _NONE:
            return
        if self._leaves == len(self._leaf_ids):
            self._leaf_ids = np.concatenate([self._leaf_ids, np.zeros_like(self._leaf_ids)])
        self._leaf_ids[self._leaves] = i
        self._place[i] = self._leaves
        self._leaves += 1
        self.on_leaf(i)

    def _drop_leaf(self, i: int) -> None:
        place = self._place[i]
        if place == _NONE:
            return
        self._leaves -= 1
        moved = int(self._leaf_ids[self._leaves])
        self._leaf_ids[place] = moved
        self._place[moved] = place
        self._place[i] = _NONE

    def _reset(self, i: int) -> None:
        while i >= len(self._extent):
            n = len(self._extent)
            self._extent.frombytes(bytes(4 * n))
            self._children.frombytes(bytes(4 * n))
            self._place.extend([_NONE] * n)
        self._extent[i] = self._children[i] = 0
