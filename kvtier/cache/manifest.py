"""What a transfer carries, written down in a few arrays: whoever needs names and views of rows makes them.

A prompt of 10,000 blocks is 10,000 names and as many views. The engine's thread only says which rows of which chain
travel between which slots; the I/O threads build the rest, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from kvtier.model.keys import KEY_BYTES, key_at
from kvtier.tiers.protocol import RowId

Slots = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]


def row_id(chain: bytes, block: int, group: int) -> RowId:
    """The identity of one row of a chain."""
    return RowId(key_at(chain, block), key_at(chain, block - 1) if block else b"", group)


def row_keys(chain: bytes, blocks: Indices, groups: Indices) -> list[tuple[bytes, int]]:
    """(key, group) of each row: what is under way is found by it."""
    starts = (blocks * KEY_BYTES).tolist()
    return [(chain[at : at + KEY_BYTES], group) for at, group in zip(starts, groups.tolist(), strict=True)]


class RowIds(Sequence[RowId]):
    """Identities of rows `blocks[i]`, `groups[i]` of a chain, made when asked for. Any thread."""

    def __init__(self, chain: bytes, blocks: Indices, groups: Indices) -> None:
        self._chain = chain
        self._blocks = blocks
        self._groups = groups

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[RowId]:
        for block, group in zip(self._blocks.tolist(), self._groups.tolist(), strict=True):
            yield row_id(self._chain, block, group)

    @overload
    def __getitem__(self, which: int) -> RowId: ...
    @overload
    def __getitem__(self, which: slice) -> list[RowId]: ...
    def __getitem__(self, which: int | slice) -> RowId | list[RowId]:
        if isinstance(which, slice):
            return list(RowIds(self._chain, self._blocks[which], self._groups[which]))
        return row_id(self._chain, int(self._blocks[which]), int(self._groups[which]))


class RowViews(Sequence[memoryview]):
    """Views of memory rows, made when asked for. Any thread, while the slots are held."""

    def __init__(self, view_of: Callable[[int], memoryview], slots: Slots) -> None:
        self._view_of = view_of
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, which: int) -> memoryview: ...
    @overload
    def __getitem__(self, which: slice) -> list[memoryview]: ...
    def __getitem__(self, which: int | slice) -> memoryview | list[memoryview]:
        if isinstance(which, slice):
            return [self._view_of(slot) for slot in self._slots[which].tolist()]
        return self._view_of(int(self._slots[which]))
