"""Where the rows of a StorageCache are, and those on their way into its tiers: what is missing, where it goes.

A row that one call is writing is not written by another; it can be found when its bytes and its checksum are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.copies import Buffers, Copy
from kvtier.cache.level import Level
from kvtier.cache.paths import Paths, Run
from kvtier.index.residency import ABSENT
from kvtier.index.tree import PrefixTree
from kvtier.model.request import MissReason
from kvtier.observe.metrics import Recorder

if TYPE_CHECKING:
    from kvtier.cache.geometry import Geometry

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class Storing:
    """Stores of one StorageCache. All under the cache's lock; `levels` is the cache's own list."""

    def __init__(
        self,
        levels: Sequence[Level],
        tree: PrefixTree,
        paths: Paths,
        recorder: Recorder,
        geometry: Geometry,
        worth: Callable[[Level, Sequence[Run], Mask], Mask],
    ) -> None:
        """`worth` says which of the rows missing in a level are written there."""
        self._worth = worth
        self._levels = levels
        self._tree = tree
        self._paths = paths
        self._recorder = recorder
        self._groups = geometry.groups
        self._writing: dict[Level, set[tuple[bytes, int]]] = {}

    def under_way(self, level: Level, runs: list[Run], n: int) -> Mask:
        """Rows another call is writing to a level: (blocks, groups)."""
        rows, writing = np.zeros((n, self._groups), np.bool_), self._writing.get(level, set())
        for run in runs if writing else []:
            for i, key in enumerate(run.keys):
                for group in range(self._groups):
                    rows[run.start + i, group] = (key, group) in writing
        return rows

    def idle(self, level: Level) -> bool:
        """Whether nothing is being written to a level."""
        return level not in self._writing

    def present(self, runs: list[Run], n: int) -> Mask:
        """Blocks that some tier has, or is being given."""
        present = np.zeros(n, np.bool_)
        for level in self._levels:
            rows = self.under_way(level, runs, n)
            for run in runs:
                rows[run.part] |= self._paths.slots(level, run) != ABSENT
            present |= rows.all(axis=1)
        return present

    def where(self, runs: list[Run], n: int) -> tuple[npt.NDArray[np.int8], list[Slots], list[MissReason]]:
        """For every block the fastest usable level that has all of it (-1: none), its slots by level, and why it would
        be a miss."""
        where = np.full(n, -1, np.int8)
        slots = [np.full((n, self._groups), ABSENT, np.int32) for _ in self._levels]
        known, down, writing = (np.zeros(n, np.bool_) for _ in range(3))
        for run in runs:
            known[run.part] = run.known
        for index in range(len(self._levels) - 1, -1, -1):
            level = self._levels[index]
            for run in runs:
                slots[index][run.part] = self._paths.slots(level, run)
            whole = (slots[index] != ABSENT).all(axis=1)
            failed = self._failed_lately(level, runs, n)
            down |= whole & failed
            whole &= ~failed
            if whole.any() and level.health.usable():
                where[whole] = index
            else:
                down |= whole
            writing |= self.under_way(level, runs, n).any(axis=1)
        reasons = np.full(n, MissReason.NEVER_SEEN, object)
        reasons[known] = MissReason.EVICTED
        reasons[writing] = MissReason.IN_FLIGHT
        reasons[down] = MissReason.TIER_DOWN
        return where, slots, reasons.tolist()

    def _failed_lately(self, level: Level, runs: list[Run], n: int) -> Mask:
        """Blocks of which a row could not be read a while ago: left alone for now."""
        failed, rows = np.zeros(n, np.bool_), level.health.failed_rows
        for run in runs if len(rows) else []:
            for i, key in enumerate(run.keys):
                failed[run.start + i] = any(rows.holds(key, group) for group in range(self._groups))
        return failed

    def begin(self, level: Level, runs: list[Run], sources: Buffers, generation: int) -> list[Copy]:
        """Copies of the rows the level lacks, with slots reserved; the head of them if there is not room for all."""
        n = runs[-1].start + runs[-1].count
        missing = ~self.under_way(level, runs, n)
        for run in runs:
            missing[run.part] &= self._paths.slots(level, run) == ABSENT
        if not missing.any():
            return []
        if not level.health.usable():
            self._recorder.add("kvtier_stores_refused", int(missing.sum()), level.name, "tier_down")
            return []
        missing = self._worth(level, runs, missing)
        copies = []
        for run in runs:
            rows = missing[run.part]
            slots = self._room(level, run, rows)
            if len(slots):
                copy = Copy.of(level, run, rows, slots, sources, read=False, generation=generation)
                self._writing.setdefault(level, set()).update((row.key, row.group) for row in copy.rows)
                copies.append(copy)
        return copies

    def landed(self, copy: Copy, generation: int) -> None:
        """What arrived can be found from now on, unless the cache was cleared meanwhile."""
        self._ended(copy)
        ok = copy.ok & (copy.generation == generation)
        if (~ok).any():
            copy.level.release(copy.slots[~ok])
        blocks = copy.at - copy.run.start + copy.run.depth
        # The engine has the blocks before these in its own memory, so they can be reached even if this tier lost them.
        elsewhere = np.ones(copy.run.depth, np.bool_)
        for group in np.unique(copy.groups[ok]):
            mine = ok & (copy.groups == group)
            copy.level.publish(copy.run.chain, int(group), blocks[mine], copy.slots[mine], elsewhere)

    def landed_for_nobody(self, copy: Copy) -> None:
        """A copy that was given up has ended: its slots are free again."""
        self._ended(copy)
        copy.level.release(copy.slots)

    def _ended(self, copy: Copy) -> None:
        writing = self._writing.get(copy.level, set())
        writing.difference_update((row.key, row.group) for row in copy.rows)
        if not writing:
            self._writing.pop(copy.level, None)

    def _room(self, level: Level, run: Run, rows: Mask) -> Slots:
        """Slots for the rows marked, in order of blocks; where there is not room for all, unmarks the last ones."""
        wanted, slots = int(rows.sum()), np.empty(0, np.int32)
        held = level.residency.slots_of(self._tree.walk(run.chain)).ravel()
        with level.book.take(held[held != ABSENT], "the head of a store"):
            while rows.any():
                made = level.make_room(int(rows.sum()))
                if made is not None:
                    slots = made
                    break
                blocks = np.flatnonzero(rows.any(axis=1))
                rows[blocks[len(blocks) // 2] :] = False
        self._recorder.add("kvtier_stores_refused", wanted - len(slots), level.name, "no_room")
        return slots
