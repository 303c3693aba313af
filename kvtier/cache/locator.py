"""Finds a block by its key alone, for engines that name blocks without naming what comes before them.

One dictionary entry a block (about 150 bytes), kept by listening to the prefix tree. Keys of cut tails are dropped
lazily: an entry is believed only if its segment still holds the key.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtier.index.tree import PrefixTree, Segment

_SLACK = 1024


class Place(NamedTuple):
    """A block in the tree: the segment that holds it and its offset there."""

    segment: Segment
    offset: int

    @property
    def depth(self) -> int:
        """Blocks before this one, from the root."""
        return self.segment.depth + self.offset


class Locator:
    """Key to segment, for every block of a tree. A TreeListener; one writer."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._segment_of: dict[bytes, Segment] = {}
        for segment in tree.segments():
            self._add(segment, 0)
        tree.listen(self)

    def find(self, key: bytes) -> Place | None:
        """Where the block with this key is, or None if the tree does not hold it."""
        segment = self._segment_of.get(key)
        if segment is None:
            return None
        offset = _offset_of(segment, key, self._tree.key_bytes)
        if offset is None:
            del self._segment_of[key]
            return None
        return Place(segment, offset)

    def chain_to(self, place: Place) -> bytes:
        """The keys from the root to just before this block."""
        whole = self._tree.chain_of(place.segment)
        return whole[: place.depth * self._tree.key_bytes]

    def on_create(self, segment: Segment) -> None:
        self._add(segment, 0)

    def on_extend(self, segment: Segment, old_length: int) -> None:
        self._add(segment, old_length)

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._add(head, 0)

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        self._prune()

    def on_remove(self, segment: Segment) -> None:
        for key in _keys_of(segment, 0, self._tree.key_bytes):
            if self._segment_of.get(key) is segment:
                del self._segment_of[key]
        self._prune()

    def _add(self, segment: Segment, start: int) -> None:
        for key in _keys_of(segment, start, self._tree.key_bytes):
            self._segment_of[key] = segment

    def _prune(self) -> None:
        """Forget keys of cut tails once they outnumber the living ones."""
        if len(self._segment_of) > 2 * self._tree.blocks + _SLACK:
            self._segment_of.clear()
            for segment in self._tree.segments():
                self._add(segment, 0)


def _keys_of(segment: Segment, start: int, width: int) -> list[bytes]:
    keys = segment.keys
    return [keys[i : i + width] for i in range(start * width, segment.length * width, width)]


def _offset_of(segment: Segment, key: bytes, width: int) -> int | None:
    at = segment.keys.find(key)
    while at >= 0 and at % width:
        at = segment.keys.find(key, at + 1)
    return at // width if at >= 0 else None
