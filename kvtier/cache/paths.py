"""Blocks named by their keys alone, found again as paths of the prefix tree.

An engine with a storage interface names a page by the hash of everything up to it, and does not always say what comes
before. What the tree knows tells; blocks nobody placed yet go after what the call says precedes them, or at the root.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.cache.level import Level
from kvtier.cache.locator import Locator
from kvtier.index.residency import ABSENT
from kvtier.index.tree import PrefixTree
from kvtier.model.keys import KEY_BYTES, chain_length, key_at
from kvtier.tiers.protocol import RowId

Slots = npt.NDArray[np.int32]


@dataclass(slots=True)
class Run:
    """Blocks [start, start + count) of a call that follow each other on one path of the tree. `chain` are the keys
    from the root to the last of them."""

    chain: bytes
    start: int
    count: int
    known: bool

    @property
    def depth(self) -> int:
        """Blocks before the first one."""
        return chain_length(self.chain) - self.count

    @property
    def part(self) -> slice:
        """The run's blocks among those of the call."""
        return slice(self.start, self.start + self.count)

    @property
    def before(self) -> bytes:
        """The key of the block before the first one, empty if there is none."""
        return key_at(self.chain, self.depth - 1) if self.depth else b""

    @property
    def keys(self) -> list[bytes]:
        """The keys of the run's blocks."""
        return [key_at(self.chain, self.depth + i) for i in range(self.count)]

    def row_id(self, block: int, group: int) -> RowId:
        """The identity of a row; `block` counts from the run's first."""
        at = self.depth + block
        return RowId(key_at(self.chain, at), key_at(self.chain, at - 1) if at else b"", group)


class Paths:
    """Turns the keys of a call into runs. One writer."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self._locator = Locator(tree)

    def place(self, keys: bytes, head: bytes) -> list[Run]:
        """All blocks of a call as runs; those unknown are inserted after what precedes them. `head` are keys before
        the first one, the last of them at least, or empty if the engine does not tell."""
        before = head
        if head:
            place = self._locator.find(head[-KEY_BYTES:])
            if place is not None:
                before = self._locator.chain_to(place) + head[-KEY_BYTES:]
        runs: list[Run] = []
        position, total = 0, chain_length(keys)
        while position < total:
            run = self._known(keys, position) or self._unknown(keys, position, before)
            runs.append(run)
            before = run.chain
            position += run.count
        for run in runs:
            if not run.known:
                self.tree.insert(run.chain)
        return runs

    def known(self, keys: bytes) -> list[Run]:
        """The blocks of a call that the tree holds. Changes nothing."""
        runs: list[Run] = []
        position, total = 0, chain_length(keys)
        while position < total:
            run = self._known(keys, position)
            if run is not None:
                runs.append(run)
            position += run.count if run is not None else 1
        return runs

    def slots(self, level: Level, run: Run) -> Slots:
        """Slots of a run's blocks in a level: (blocks, groups), -1 where absent."""
        slots = np.full((run.count, level.residency.groups), ABSENT, np.int32)
        found = level.residency.slots_of(self.tree.walk(run.chain))[run.depth :]
        slots[: len(found)] = found
        return slots

    def _known(self, keys: bytes, position: int) -> Run | None:
        place = self._locator.find(key_at(keys, position))
        if place is None:
            return None
        before = self._locator.chain_to(place)
        rest = keys[position * KEY_BYTES :]
        count = self.tree.walk(before + rest).blocks - chain_length(before)
        return Run(before + rest[: count * KEY_BYTES], position, count, True)

    def _unknown(self, keys: bytes, position: int, before: bytes) -> Run:
        stop, total = position + 1, chain_length(keys)
        while stop < total and self._locator.find(key_at(keys, stop)) is None:
            stop += 1
        return Run(before + keys[position * KEY_BYTES : stop * KEY_BYTES], position, stop - position, False)
