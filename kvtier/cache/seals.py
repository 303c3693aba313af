"""Seals: xxh3 of memory rows, made where the bytes are read anyway, so that no tier is given what memory has corrupted.

The engine's own worker writes memory rows; a checksum at that moment would cost its thread a pass over every byte. So a
row is sealed by the I/O thread that first carries it: down, just before the tier takes it, or up, just after the tier
has verified it. Whoever carries it again compares. A slot written anew is unsealed first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.codec.checksum import checksum64

Slots = npt.NDArray[np.int32]


class Seals:
    """One 64-bit seal a slot; 0: none. Any thread, for slots that are held: rows being carried are leased."""

    def __init__(self, capacity_rows: int) -> None:
        self._seals = np.zeros(capacity_rows, np.uint64)

    def broken(self, slots: Slots) -> None:
        """The engine writes these slots anew: nothing is known of them."""
        self._seals[slots] = 0

    def set(self, slots: Slots, views: Sequence[memoryview]) -> None:
        """Seal rows just verified."""
        for slot, view in zip(slots.tolist(), views, strict=True):
            self._seals[slot] = checksum64(view) or 1

    def intact(self, slots: Slots, views: Sequence[memoryview]) -> list[bool]:
        """Which rows are as they were sealed; those without a seal are sealed now."""
        answers = []
        for slot, view in zip(slots.tolist(), views, strict=True):
            found = checksum64(view) or 1
            if self._seals[slot] == 0:
                self._seals[slot] = found
            answers.append(int(self._seals[slot]) == found)
        return answers
