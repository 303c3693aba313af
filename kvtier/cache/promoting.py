"""Promotions under way: which rows of the tree are on their way to memory, for whom, and which of them hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.mover import Transfer
from kvtier.index.marks import Marks
from kvtier.index.tree import Match, PrefixTree

if TYPE_CHECKING:
    from kvtier.cache.request import CachedRequest

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
_MOST_NUMBERS = 2**31 - 1


@dataclass(slots=True, eq=False)
class Promotion:
    """Rows of one request being read from `level` into reserved memory slots; others may wait for them too."""

    start: int
    level: Level
    chain: bytes
    blocks: Indices
    groups: Indices
    memory_slots: Slots
    source: Lease
    waiters: list[CachedRequest]
    transfer: Transfer | None = None
    number: int = 0  # among those under way
    void: bool = False
    # Somebody's deadline passed while it was under way: nobody else waits for it.
    late: bool = False


class Promoting:
    """The promotions of one TierCache. One control thread."""

    def __init__(self, tree: PrefixTree, groups: int) -> None:
        self._tree = tree
        self._marks = Marks(tree, groups)
        self._by_number: dict[int, Promotion] = {}
        self._hung: set[Promotion] = set()
        self._number = 0

    @property
    def rows(self) -> int:
        """Rows now on their way to memory."""
        return sum(len(promotion.blocks) for promotion in self._by_number.values())

    def begin(self, promotions: Sequence[Promotion], match: Match, blocks: Indices, groups: Indices) -> None:
        """They start: their rows, given once more all together, are found by those who ask from now on."""
        for promotion in promotions:
            self._number = promotion.number = self._number % _MOST_NUMBERS + 1
            self._by_number[promotion.number] = promotion
        numbers = np.array([promotion.number for promotion in promotions], np.int32)
        self._marks.set(match, blocks, groups, np.repeat(numbers, [len(promotion.blocks) for promotion in promotions]))

    def end(self, promotion: Promotion) -> None:
        """It has ended. What somebody else promotes again meanwhile stays marked."""
        self._hung.discard(promotion)
        if self._by_number.pop(promotion.number, None) is not None:
            match = self._tree.walk(promotion.chain)
            self._marks.clear(match, promotion.blocks, promotion.groups, promotion.number)

    def coming(self, match: Match) -> Mask:
        """Rows on their way, for anybody, that are not late."""
        numbers = self._marks.of(match)
        coming: Mask = numbers != 0
        if self._hung:
            coming &= ~np.isin(numbers, [promotion.number for promotion in self._hung])
        return coming

    def hanging(self, match: Match, level: Level) -> Mask | None:
        """Rows somebody waited for in vain, whose read from `level` has not ended. None: no read hangs."""
        hung = [promotion.number for promotion in self._hung if promotion.level is level]
        return np.isin(self._marks.of(match), hung) if hung else None

    def of(self, match: Match, rows: Mask) -> list[Promotion]:
        """The promotions of these rows, each once, in order of their beginning."""
        if not self._by_number:
            return []
        numbers = self._marks.of(match)[rows]
        first = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1  # of each run of equal ones, but for the first run
        return [self._by_number[n] for n in sorted({*numbers[:1].tolist(), *numbers[first].tolist()})]

    def under_way(self, promotions: Iterable[Promotion]) -> list[Promotion]:
        """Those of these that have not ended, in order of their beginning."""
        return sorted((p for p in promotions if p.number in self._by_number), key=lambda promotion: promotion.number)

    def hangs(self, promotion: Promotion) -> None:
        """Somebody's deadline passed: nobody who comes next waits for it."""
        promotion.late = True
        self._hung.add(promotion)

    def reset(self) -> None:
        """What is under way is for nobody."""
        for promotion in self._by_number.values():
            promotion.waiters.clear()
            promotion.void = True
        self._by_number.clear()
        self._marks.reset()
