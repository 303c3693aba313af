"""The way down: which computed rows memory takes, and the write-through that follows.

Memory rows are reserved here and filled by the engine's worker; when it says so they are published and copied to every
lower level at the lowest urgency. Admission is asked once per chain and never takes a tail without its head. Lower
levels publish in the order of submission, because a later write may end first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.manifest import RowIds, RowViews
from kvtier.cache.mover import Transfer, Urgency
from kvtier.cache.request import CachedRequest
from kvtier.index.marks import Marks
from kvtier.index.residency import ABSENT
from kvtier.index.tree import Match
from kvtier.tiers.protocol import RowStatus

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Slots = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
_UNDER_WAY = 1


class RowRef(NamedTuple):
    """One row of a request: block (position in its chain) and group."""

    block: int
    group: int


Rows = Sequence[RowRef] | Indices
"""Rows one by one, or as an array of (block, group)."""


def as_rows(rows: Rows) -> tuple[Indices, Indices]:
    """Blocks and groups of rows, given as an array of pairs or one by one."""
    pairs = np.asarray(rows, np.intp).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True, slots=True)
class Granted:
    """Rows the engine shall write: which of those it offered (ascending), and into which memory slots."""

    at: Indices
    blocks: Indices
    groups: Indices
    slots: Slots

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[tuple[RowRef, int]]:
        for block, group, slot in zip(self.blocks.tolist(), self.groups.tolist(), self.slots.tolist(), strict=True):
            yield RowRef(block, group), slot


@dataclass(slots=True, eq=False)
class WriteThrough:
    """Rows being copied from memory to a lower level."""

    level: Level
    chain: bytes
    blocks: Indices
    groups: Indices
    source: Lease
    generation: int
    transfer: Transfer | None = None
    ended: bool = False


@dataclass(slots=True)
class UnderWay:
    """What is being written to one level: in order of submission, by row, and how many rows were submitted and not yet
    published (a write that ended may still wait for one before it)."""

    marks: Marks
    writes: deque[WriteThrough] = field(default_factory=deque)
    rows: int = 0


class Storer:
    """Takes rows into memory and writes them through, for one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._storing = Marks(cache.tree, cache.groups)
        self._below: dict[Level, UnderWay] = {}
        self._generation = 0

    @property
    def storing_rows(self) -> int:
        """Rows the engine was granted and has not written yet."""
        return self._storing.rows

    def offer(self, request: CachedRequest, rows: Rows) -> Granted:
        """Which of the offered rows the engine shall write, and into which memory slot. In order of the offer.

        Rows resident or under way are left out. If memory has no room for all, the tail is refused.
        """
        cache, chain = self._cache, request.chain
        blocks, groups = as_rows(rows)
        if not len(blocks) or (cache.memory.lossy and not request.context.lossy):
            return _granted(blocks, groups, blocks[:0], np.empty(0, np.int32))
        match = self._match(chain, blocks)
        resident = cache.memory.residency.slots_of(match)[blocks, groups] != ABSENT
        wanted = ~resident & (self._storing.of(match)[blocks, groups] == 0)
        if resident.any():
            self._write_through(chain, int(blocks[resident].max()) + 1, request.context.lossy)
        order = np.lexsort((groups, blocks))
        chosen = order[wanted[order]]
        compared = order[resident[order]]
        if request.canary:
            again = cache.canary.choose(request, blocks[compared], groups[compared])
            chosen = np.concatenate([chosen, compared[again]])
        slots = self._reserve(len(chosen))
        fits = chosen[: len(slots)]
        request.grant(blocks[fits], groups[fits], slots, cache.groups)
        new = fits[wanted[fits]]
        self._storing.set(match, blocks[new], groups[new], _UNDER_WAY)
        back = np.argsort(fits)
        return _granted(blocks, groups, fits[back], slots[back])

    def commit(self, request: CachedRequest, rows: Rows) -> None:
        """The engine has written these rows: publish them and write them through. Unknown rows (stored before a reset)
        are ignored."""
        cache, chain = self._cache, request.chain
        blocks, groups = as_rows(rows)
        order = np.lexsort((groups, blocks))
        blocks, groups = blocks[order], groups[order]
        slots = request.take_granted(blocks, groups)
        if request.compared:
            slots = self._compare(request, blocks, groups, slots)
        done = slots != ABSENT
        blocks, groups, slots = blocks[done], groups[done], slots[done]
        if not len(blocks):
            return
        self._storing.clear(self._match(chain, blocks), blocks, groups, _UNDER_WAY)
        for group in cache.group_order:
            mine = groups == group
            if mine.any():
                cache.levels.publish_in_memory(chain, group, blocks[mine], slots[mine], 0)
        cache.epoch += 1
        cache.memory.copied("write", len(blocks))
        self._write_through(chain, int(blocks[-1]) + 1, request.context.lossy)
        if request.ended:
            cache.writing.ended(request, cache.tree.walk(chain).path)

    def abort(self, request: CachedRequest) -> None:
        """Give back what the request was granted and will never write."""
        blocks, groups = np.nonzero(request.pending != ABSENT)
        if len(blocks):
            slots = request.take_granted(blocks, groups)
            self._storing.clear(self._cache.tree.walk(request.chain), blocks, groups, _UNDER_WAY)
            self._cache.memory.release(slots)

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
        self._storing.reset()
        self._generation += 1

    # --- internals ----------------------------------------------------------------------------------------------

    def _match(self, chain: bytes, blocks: Indices) -> Match:
        """The chain in the tree, as far as these blocks at least."""
        tree = self._cache.tree
        match = tree.walk(chain)
        if match.blocks <= int(blocks.max()):
            tree.insert(chain)
            match = tree.walk(chain)
        return match

    def _compare(self, request: CachedRequest, blocks: Indices, groups: Indices, slots: Slots) -> Slots:
        """Rows a canary wrote beside those that are cached: compared, given back, and not published."""
        for row in sorted(request.compared):
            at = np.flatnonzero((blocks == row[0]) & (groups == row[1]) & (slots != ABSENT))
            if at.size:
                self._cache.canary.compare(request, row, int(slots[at[0]]))
                self._cache.memory.release(slots[at])
                slots[at] = ABSENT
        return slots

    def _reserve(self, wanted: int) -> Slots:
        """Slots for as many leading rows as there is room for."""
        cache, n = self._cache, wanted
        while n:
            slots = cache.memory.make_room(n)
            if slots is not None:
                cache.seals.broken(slots)
                break
            n //= 2
        if n < wanted:
            cache.recorder.add("kvtier_stores_refused", wanted - n, cache.memory.name, "no_room")
        return slots if n and slots is not None else np.empty(0, np.int32)

    def _write_through(self, chain: bytes, stop: int, lossy: bool) -> None:
        """Queue copies of memory rows of the first `stop` blocks to every lower level that lacks them: those refused
        earlier, too, without which the new ones could not be published."""
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
        below = self._below.get(level)
        if below is not None:
            writing = wanted & (below.marks.of(match)[:stop] != 0)
            wanted, there = wanted & ~writing, there | writing
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
            self._write(level, chain, match, blocks, groups, memory[blocks, groups])
        else:
            cache.recorder.add("kvtier_stores_refused", len(blocks), level.name, "tier_down")

    def _write(
        self,
        level: Level,
        chain: bytes,
        match: Match,
        blocks: Indices,
        groups: Indices,
        memory_slots: Slots,
    ) -> None:
        cache, n = self._cache, len(blocks)
        below = self._below.get(level)
        fits = max(0, cache.config.store_backlog_bytes // level.row_bytes - (below.rows if below else 0))
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
        if below is None:
            below = self._below[level] = UnderWay(Marks(cache.tree, cache.groups))
        below.rows += n
        write = WriteThrough(level, chain, blocks, groups, source, self._generation)
        below.marks.set(match, blocks, groups, _UNDER_WAY)
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
        below.marks.clear(self._cache.tree.walk(write.chain), write.blocks, write.groups, _UNDER_WAY)
        if not below.rows:
            del self._below[write.level]
            self._cache.tree.unlisten([below.marks])
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


def _granted(blocks: Indices, groups: Indices, at: Indices, slots: Slots) -> Granted:
    return Granted(at, blocks[at], groups[at], slots)
