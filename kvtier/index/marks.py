"""What is under way for which rows: one number a row of the prefix tree, 0 where nothing is.

A prompt of ten thousand blocks is marked and asked about by a few vector operations, and the marks follow their blocks
when a segment is split, grows or is cut. Those of a segment that is removed are lost: whoever marks rows that nothing
else keeps in the tree must not rely on finding them again.

One writer: not thread-safe.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.index.tree import Match, PrefixTree, Segment

Numbers = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]


class Marks:
    """A TreeListener. Costs nothing for segments without marks."""

    def __init__(self, tree: PrefixTree, groups: int) -> None:
        self._groups = groups
        self._marks: dict[int, Numbers] = {}
        tree.listen(self)

    def __bool__(self) -> bool:
        return bool(self._marks)

    @property
    def rows(self) -> int:
        """Rows marked now."""
        return sum(int(np.count_nonzero(marks)) for marks in self._marks.values())

    def of(self, match: Match) -> Numbers:
        """Marks of the matched blocks: (blocks, groups). A copy."""
        found = np.zeros((match.blocks, self._groups), np.int32)
        if not self._marks:
            return found
        position = 0
        for segment in match.path:
            n = min(segment.length, match.blocks - position)
            marks = self._marks.get(segment.id)
            if marks is not None:
                found[position : position + n] = marks[:n]
            position += n
        return found

    def set(self, match: Match, blocks: Indices, groups: Indices, numbers: int | Numbers) -> None:
        """Mark rows of a match, with one number or one for each; `blocks` ascend. Those beyond it are left out."""
        for segment, part in _by_segment(match, blocks):
            marks = self._marks.get(segment.id)
            if marks is None:
                marks = self._marks[segment.id] = np.zeros((segment.length, self._groups), np.int32)
            marks[blocks[part] - segment.depth, groups[part]] = numbers if isinstance(numbers, int) else numbers[part]

    def clear(self, match: Match, blocks: Indices, groups: Indices, number: int) -> None:
        """Take away marks with this number; `blocks` ascend. Rows marked otherwise are left as they are."""
        for segment, part in _by_segment(match, blocks):
            marks = self._marks.get(segment.id)
            if marks is None:
                continue
            at = blocks[part] - segment.depth, groups[part]
            marks[at] = np.where(marks[at] == number, 0, marks[at])
            if not marks.any():
                del self._marks[segment.id]

    def reset(self) -> None:
        """Take away every mark."""
        self._marks.clear()

    # --- TreeListener -------------------------------------------------------------------------------------------

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        marks = self._marks.get(segment.id)
        if marks is not None:
            more = np.zeros((segment.length - old_length, self._groups), np.int32)
            self._marks[segment.id] = np.concatenate([marks, more])

    def on_split(self, head: Segment, tail: Segment) -> None:
        marks = self._marks.pop(tail.id, None)
        if marks is not None:
            for segment, part in ((head, marks[: head.length]), (tail, marks[head.length :])):
                if part.any():
                    self._marks[segment.id] = part.copy()

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        marks = self._marks.pop(segment.id, None)
        if marks is not None and marks[: segment.length].any():
            self._marks[segment.id] = marks[: segment.length].copy()

    def on_remove(self, segment: Segment) -> None:
        self._marks.pop(segment.id, None)


def _by_segment(match: Match, blocks: Indices) -> list[tuple[Segment, slice]]:
    """Segments of the path and which of the ascending `blocks` lie in them."""
    parts, done = [], 0
    for segment in match.path:
        stop = int(np.searchsorted(blocks, min(segment.stop, match.blocks)))
        if stop > done:
            parts.append((segment, slice(done, stop)))
            done = stop
    return parts
