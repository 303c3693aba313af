"""Seals: xxh3 of memory rows. They are made where a row is written, and compared wherever it is read.

The engine's worker seals what it has copied into memory before it says so, and verifies what it copies out (in vLLM:
`kvtier_vllm.sealed_worker`); I/O threads seal what they bring from a tier that verified it, and compare what they carry
down. Each rank writes its own part of a row, so each part has its own seal. Seals lie in memory that the engine's
processes share: nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.codec.checksum import checksum64

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

_NONE = 0
_DAMAGED = (1 << 64) - 1


class Seals:
    """One 64-bit seal for each part of each row. Any thread of any process, for rows that are held."""

    def __init__(self, seals: npt.NDArray[np.uint64], part_bytes: int) -> None:
        """`seals` is [rows, parts], zero for rows nothing is known of; part p of a row is its bytes from p · part_bytes
        on. What follows the last part is padding."""
        self._seals = seals
        self._parts = seals.shape[1]
        self._part_bytes = part_bytes

    @classmethod
    def own(cls, rows: int, row_bytes: int) -> Seals:
        """Seals of rows that one process writes, each in one part."""
        return cls(np.zeros((rows, 1), np.uint64), row_bytes)

    def broken(self, slots: Slots) -> None:
        """These slots are about to be written anew: nothing is known of them."""
        self._seals[slots] = _NONE

    def set(self, slots: Slots, views: Sequence[memoryview]) -> None:
        """Seal whole rows just verified."""
        for slot, view in zip(slots.tolist(), views, strict=True):
            for part in range(self._parts):
                self.set_part(slot, part, self._part(view, part))

    def intact(self, slots: Slots, views: Sequence[memoryview]) -> list[bool]:
        """Which whole rows are as they were sealed; parts without a seal are sealed now."""
        return [
            all([self.intact_part(slot, part, self._part(view, part)) for part in range(self._parts)])
            for slot, view in zip(slots.tolist(), views, strict=True)
        ]

    def set_part(self, slot: int, part: int, view: memoryview) -> None:
        """Seal the part of a row that lies in `view`."""
        self._seals[slot, part] = _seal(view)

    def intact_part(self, slot: int, part: int, view: memoryview) -> bool:
        """Whether the part of a row in `view` is as it was sealed; one without a seal is sealed now. One that is not is
        marked, for `damaged`."""
        found, seal = _seal(view), int(self._seals[slot, part])
        if seal == _NONE:
            self._seals[slot, part] = found
            return True
        if seal != found:
            self._seals[slot, part] = _DAMAGED
        return seal == found

    def damaged(self, slots: Slots) -> Mask:
        """Which rows somebody found damaged."""
        found: Mask = (self._seals[slots] == np.uint64(_DAMAGED)).any(axis=1)
        return found

    def _part(self, view: memoryview, part: int) -> memoryview:
        return view[part * self._part_bytes : (part + 1) * self._part_bytes]


def _seal(view: memoryview) -> int:
    """xxh3, without the two values that mean something else."""
    return min(max(checksum64(view), 1), _DAMAGED - 1)
