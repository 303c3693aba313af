"""The way down: which computed rows memory takes, and the write-through that follows.

Memory rows are reserved here and filled by the engine's worker; when it says so they are published and copied to every
lower level at the lowest urgency. Admission is asked once per chain and never takes a tail without its head. Lower
levels publish in the order of submission, because a later write may end first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.manifest import RowIds, RowViews, row_keys
from kvtier.cache.mover import Transfer, Urgency
from kvtier.cache.request import CachedRequest
from kvtier.index.residency import ABSENT
from kvtier.model.keys import key_at
from kvtier.tiers.protocol import RowStatus

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Slots = npt.NDArray[np.int32]


class RowRef(NamedTuple):
    """One row of a request: block (position in its chain) and group."""

    block: int
    group: int


@dataclass(slots=True, eq=False)
class WriteThrough:
    """Rows being copied from memory to a lower level."""

    level: Level
    chain: bytes
    blocks: npt.NDArray[np.intp]
    groups: npt.NDArray[np.intp]
    source: Lease
    generation: int
    transfer: Transfer | None = None
    ended: bool = False


@dataclass(slots=True)
class UnderWay:
    """What is being written to one level: in order of submission, by key, and how many rows were submitted and not yet
    published (a write that ended may still wait for one before it)."""

    writes: deque[WriteThrough] = field(default_factory=deque)
    keys: set[tuple[bytes, int]] = field(default_factory=set)
    rows: int = 0


class Storer:
    """Takes rows into memory and writes them through, for one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._storing: set[tuple[bytes, int]] = set()
        self._below: dict[Level, UnderWay] = {}
        self._generation = 0

    def offer(self, request: CachedRequest, rows: Sequence[RowRef]) -> list[tuple[RowRef, int]]:
        """Which of the offered rows the engine shall write, and into which memory slot. In order of the offer.

        Rows resident or under way are left out. If memory has no room for all, the tail is refused.
        """
        cache = self._cache
        if cache.memory.lossy and not request.context.lossy:
            return []
        memory = cache.memory.residency.slots_of(cache.tree.walk(request.chain))
        known = len(memory)
        wanted: list[RowRef] = []
        again: list[RowRef] = []
        for row in sorted(rows):
            key = key_at(request.chain, row.block)
            if row.block < known and memory[row.block, row.group] != ABSENT:
                again.append(row)
            elif (key, row.group) not in self._storing:
                wanted.append(row)
        if again:
            self._write_through(request.chain, again, request.context.lossy)
        wanted += cache.canary.choose(request, again)
        slots = self._reserve(wanted)
        wanted = wanted[: len(slots)]
        granted = dict(zip(wanted, slots.tolist(), strict=True))
        for row, slot in granted.items():
            request.pending[row] = slot
            if row not in request.compared:
                self._storing.add((key_at(request.chain, row.block), row.group))
        return [(row, granted[row]) for row in rows if row in granted]

    def commit(self, request: CachedRequest, rows: Sequence[RowRef]) -> None:
        """The engine has written these rows: publish them and write them through. Unknown rows (stored before a reset)
        are ignored."""
        cache = self._cache
        done = sorted(row for row in rows if row in request.pending)
        taken = {row: request.pending.pop(row) for row in done}
        compared = [row for row in done if row in request.compared]
        if compared:
            for row in compared:
                cache.canary.compare(request, row, taken[row])
            cache.memory.release(np.array([taken[row] for row in compared], np.int32))
            done = [row for row in done if row not in request.compared]
        for row in done:
            self._storing.discard((key_at(request.chain, row.block), row.group))
        for group in cache.group_order:
            mine = [row for row in done if row.group == group]
            if not mine:
                continue
            blocks = np.array([row.block for row in mine], np.intp)
            slots = np.array([taken[row] for row in mine], np.int32)
            cache.levels.publish_in_memory(request.chain, group, blocks, slots, 0)
        if done:
            cache.epoch += 1
            cache.memory.copied("write", len(done))
            self._write_through(request.chain, done, request.context.lossy)
            if request.ended:
                cache.writing.ended(request, cache.tree.walk(request.chain).path)

    def abort(self, request: CachedRequest) -> None:
        """Give back what the request was granted and will never write."""
        if request.pending:
            for row in request.pending:
                self._storing.discard((key_at(request.chain, row[0]), row[1]))
            self._cache.memory.release(np.array(list(request.pending.values()), np.int32))
            request.pending.clear()

    def finished(self, transfer: Transfer) -> None:
        """A write ended. Publish it, and those before and after it that ended too, in order of submission."""
        write = transfer.tag
        assert isinstance(write, WriteThrough)
        write.ended = True
        self._cache.note_transfer(write.level, transfer)
        queue = self._below[write.level].writes
        while queue and queue[0].ended:
            self._land(queue.popleft())

    def under_way(self, level: Level) -> bool:
        """Whether anything is being written to a level."""
        return level in self._below

    def reset(self) -> None:
        """Writes under way belong to nobody: their slots are given back when they end."""
        self._storing.clear()
        self._generation += 1

    # --- internals ----------------------------------------------------------------------------------------------

    def _reserve(self, wanted: list[RowRef]) -> Slots:
        """Slots for as many leading rows as there is room for."""
        cache, n = self._cache, len(wanted)
        while n:
            slots = cache.memory.make_room(n)
            if slots is not None:
                if n < len(wanted):
                    cache.recorder.add("kvtier_stores_refused", len(wanted) - n, cache.memory.name, "no_room")
                cache.seals.broken(slots)
                return slots
            n //= 2
        if wanted:
            cache.recorder.add("kvtier_stores_refused", len(wanted), cache.memory.name, "no_room")
        return np.empty(0, np.int32)

    def _write_through(self, chain: bytes, rows: Sequence[RowRef], lossy: bool) -> None:
        """Queue copies of memory rows up to the last of `rows` to every lower level that lacks them: those refused
        earlier, too, without which the new ones could not be published."""
        stop = max(row.block for row in rows) + 1
        for level in self._cache.lower:
            if not self._cache.writing.waits_for_end(level):
                self.write_down(level, chain, stop, lossy)

    def write_down(self, level: Level, chain: bytes, stop: int, lossy: bool) -> None:
        """Queue copies of what memory has of the first `stop` blocks and `level` lacks, without a hole before them."""
        cache = self._cache
        if level.lossy and not lossy:
            return
        match = cache.tree.walk(chain)
        memory = cache.memory.residency.slots_of(match)[:stop]
        there = level.residency.slots_of(match)[:stop] != ABSENT
        wanted = (memory != ABSENT) & ~there
        writing = self._below[level].keys if level in self._below else ()
        if writing:
            for block, group in np.argwhere(wanted).tolist():
                if (key_at(chain, block), group) in writing:
                    wanted[block, group], there[block, group] = False, True
        for group in cache.closed_groups:
            holes = np.flatnonzero(~(there | wanted)[:, group])
            wanted[int(holes[0]) if holes.size else stop :] = False
        if not wanted.any():
            return
        blocks, groups = np.nonzero(wanted)
        if cache.conservative:
            # Made up for at the next store of this chain: what memory has and the level lacks is looked for each time.
            cache.recorder.add("kvtier_stores_refused", len(blocks), level.name, "conservative")
        elif level.health.usable():
            self._write(level, chain, blocks, groups, memory[blocks, groups])
        else:
            cache.recorder.add("kvtier_stores_refused", len(blocks), level.name, "tier_down")

    def _write(
        self,
        level: Level,
        chain: bytes,
        blocks: npt.NDArray[np.intp],
        groups: npt.NDArray[np.intp],
        memory_slots: Slots,
    ) -> None:
        cache, n = self._cache, len(blocks)
        below = self._below.setdefault(level, UnderWay())
        fits = max(0, cache.config.store_backlog_bytes // level.row_bytes - below.rows)
        if n > fits:
            cache.recorder.add("kvtier_stores_refused", n - fits, level.name, "backlog")
            blocks, groups, memory_slots, n = blocks[:fits], groups[:fits], memory_slots[:fits], fits
        if not n:
            return
        # Leased first: what makes room below may take from memory what built on it.
        source = cache.memory.book.take(memory_slots, f"write-through to {level.name}")
        slots = level.make_room(n)
        if slots is None:
            source.release()
            cache.recorder.add("kvtier_stores_refused", n, level.name, "no_room")
            return
        below.rows += n
        write = WriteThrough(level, chain, blocks, groups, source, self._generation)
        below.keys.update(row_keys(chain, blocks, groups))
        ids, views = RowIds(chain, blocks, groups), RowViews(cache.memory_row, memory_slots)
        write.transfer = Transfer(level.tier, slots, ids, views, False, Urgency.STORE, write)
        write.transfer.seals, write.transfer.memory_slots = cache.seals, memory_slots
        below.writes.append(write)
        cache.submit(level, write.transfer)

    def _land(self, write: WriteThrough) -> None:
        transfer = write.transfer
        assert transfer is not None
        write.source.release()
        below = self._below[write.level]
        below.rows -= len(transfer.rows)
        below.keys.difference_update(row_keys(write.chain, write.blocks, write.groups))
        if not below.rows:
            del self._below[write.level]
        for block in write.blocks[transfer.damaged].tolist():
            self._cache.damage.found(write.chain, block)
        ok = np.array([status is RowStatus.OK for status in transfer.statuses])
        if write.generation != self._generation:
            ok[:] = False
        if (~ok).any():
            write.level.release(transfer.slots[~ok])
        for group in self._cache.group_order:
            mine = ok & (write.groups == group)
            if mine.any():
                write.level.publish(write.chain, group, write.blocks[mine], transfer.slots[mine])
