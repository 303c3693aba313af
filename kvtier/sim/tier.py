"""The simulator's tier: extents without bytes.

Implements `place.policy.TierView` with one row a block. Nothing is leased or in flight, so everything resident may go,
leaf-first. The set of resident leaves is kept up to date with every change of residency, never recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree, Segment


class SimTier:
    """Who is resident, by segment. Not thread-safe. Make it before the policy: tree listeners are told in order."""

    def __init__(self, tree: PrefixTree, capacity_blocks: int, name: str = "sim") -> None:
        self.name = name
        self.tree = tree
        self._capacity = capacity_blocks
        self._resident = 0
        self._extents = [0] * max(1, tree.id_limit)
        self._resident_children = [0] * max(1, tree.id_limit)
        # A dict, not a set of objects: its order is that of insertion, so a replay is the same in every process.
        self._leaves: dict[int, Segment] = {}
        tree.listen(self)

    @property
    def capacity_rows(self) -> int:
        return self._capacity

    @property
    def resident_rows(self) -> int:
        return self._resident

    def extent(self, segment: Segment) -> int:
        return self._extents[segment.id]

    def evictable_from(self, segment: Segment) -> int:
        return 0

    def rows(self, segment: Segment, start: int) -> int:
        return max(0, self._extents[segment.id] - start)

    def leaves(self) -> Iterable[Segment]:
        return self._leaves.values()

    def leading(self, path: Sequence[Segment]) -> int:
        """How many leading blocks of `path` are resident: what a request with this prompt would hit."""
        hits, extents = 0, self._extents
        for segment in path:
            extent = extents[segment.id]
            hits += extent
            if extent < segment.length:
                break
        return hits

    def admit(self, path: Sequence[Segment]) -> list[tuple[Segment, int]]:
        """Make the whole path resident, over capacity if need be. Returns the segments that grew, with their old
        extents, head first."""
        grown: list[tuple[Segment, int]] = []
        for segment in path:
            old = self._extents[segment.id]
            if old < segment.length:
                self._extents[segment.id] = segment.length
                self._resident += segment.length - old
                if not old:
                    self._appear(segment)
                grown.append((segment, old))
        return grown

    def evict(self, segment: Segment, keep: int) -> int:
        """Drop the resident blocks of a leaf from offset `keep` on and return the old extent. Raises IntegrityError
        if the segment is no resident leaf or nothing would go."""
        old = self._extents[segment.id]
        if segment.id not in self._leaves or not 0 <= keep < old:
            raise IntegrityError(f"{segment!r} with {old} resident blocks cannot be cut to {keep}")
        self._extents[segment.id] = keep
        self._resident -= old - keep
        if not keep:
            self._disappear(segment)
        return old

    def check_integrity(self) -> None:
        """Raise IntegrityError if extents, leaves, counts and the leaf-first rule disagree. A full traversal."""
        resident, leaves = 0, set()
        for segment in self.tree.segments():
            extent = self._extents[segment.id]
            children = sum(1 for child in segment.children.values() if self._extents[child.id])
            if not 0 <= extent <= segment.length:
                raise IntegrityError(f"{segment!r} has {extent} resident blocks")
            if children and extent < segment.length:
                raise IntegrityError(f"{segment!r} has resident children but only {extent} resident blocks")
            if children != self._resident_children[segment.id]:
                raise IntegrityError(f"{segment!r} counts {self._resident_children[segment.id]} resident children")
            if extent and not children:
                leaves.add(segment.id)
            resident += extent
        if resident != self._resident or leaves != self._leaves.keys():
            raise IntegrityError(f"{resident} blocks, {len(leaves)} leaves; {self._resident}, {len(self._leaves)} kept")

    def on_create(self, segment: Segment) -> None:
        self._reserve(segment)

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._reserve(head)
        extent = self._extents[tail.id]
        self._extents[head.id] = min(extent, head.length)
        self._extents[tail.id] = max(0, extent - head.length)
        if extent > head.length:
            self._resident_children[head.id] = 1
        elif self._leaves.pop(tail.id, None) is not None:
            self._leaves[head.id] = head

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        extent = self._extents[segment.id]
        if extent > segment.length:
            self._extents[segment.id] = segment.length
            self._resident -= extent - segment.length

    def on_remove(self, segment: Segment) -> None:
        extent, self._extents[segment.id] = self._extents[segment.id], 0
        self._resident -= extent
        if extent:
            self._disappear(segment)

    def _reserve(self, segment: Segment) -> None:
        missing = segment.id + 1 - len(self._extents)
        if missing > 0:
            self._extents.extend([0] * missing)
            self._resident_children.extend([0] * missing)
        self._extents[segment.id] = 0
        self._resident_children[segment.id] = 0

    def _appear(self, segment: Segment) -> None:
        if not self._resident_children[segment.id]:
            self._leaves[segment.id] = segment
        parent = segment.parent
        if parent is not None:
            self._resident_children[parent.id] += 1
            self._leaves.pop(parent.id, None)

    def _disappear(self, segment: Segment) -> None:
        self._leaves.pop(segment.id, None)
        parent = segment.parent
        if parent is not None:
            self._resident_children[parent.id] -= 1
            if not self._resident_children[parent.id] and self._extents[parent.id]:
                self._leaves[parent.id] = parent
