"""Checks of memory: rows are sealed on I/O threads as soon as the engine has written them, and compared with their
seals before they are offered for a load.

The engine's own worker copies rows between the device and memory, so nobody reads them on the way and nobody would
see a byte that changed. A check is a transfer of the mover that moves nothing: into memory (lowest urgency) it seals,
out of memory it verifies. While it runs, rows are leased and the lookup says "ask again", as for a promotion. A row
that is not what was sealed leaves memory with all that builds on it; a tier below may still have it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.manifest import RowIds, RowViews
from kvtier.cache.mover import Transfer, Urgency
from kvtier.cache.request import CachedRequest
from kvtier.cache.seals import Seals
from kvtier.index.residency import ABSENT
from kvtier.model.request import MissReason
from kvtier.tiers.protocol import RowId, RowStatus

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_SEALING_BYTES = 256 << 20
"""Most bytes that wait for their seals: they are leased, and cannot be evicted. What exceeds it is sealed when it is
first carried or verified."""
_SEALING_SHARE = 4
"""Nor more than one part in so many of memory."""


class SealedRows:
    """What the mover asks in the place of a tier: rows stay where they are, and are compared with their seals."""

    def __init__(self, name: str, row_bytes: int, seals: Seals) -> None:
        self.name = name
        self.row_bytes = row_bytes
        self._seals = seals

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """Seal rows that have no seal, compare those that have one."""
        return self.read(slots, rows, sources)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """CORRUPT for a row that is not what was sealed; one without a seal is sealed now."""
        return [RowStatus.OK if intact else RowStatus.CORRUPT for intact in self._seals.intact(slots, targets)]


@dataclass(slots=True, eq=False)
class Check:
    """Rows of one chain being sealed or verified, and who waits for that."""

    chain: bytes
    blocks: Indices
    groups: Indices
    lease: Lease
    waiters: list[CachedRequest]
    transfer: Transfer | None = None


class MemoryChecks:
    """Seals and verifies memory rows for one TierCache, if `memory_checks` is on. One control thread.

    A row is verified for a request if a check of it ended after the request arrived: eight bytes a row say which.
    """

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self.on = cache.config.memory_checks
        memory = cache.memory
        capacity = memory.tier.stats().capacity_rows
        self._carrier = SealedRows(memory.name, memory.row_bytes, cache.seals)
        self._sealing_bytes = min(_SEALING_BYTES, capacity * memory.row_bytes // _SEALING_SHARE)
        # Checks so far: a request is served by those that end after it arrived.
        self.ended = 0
        self._verified = np.zeros(capacity, np.int64)
        self._under_way: dict[int, Check] = {}

    def written(self, slots: Slots) -> None:
        """The engine wrote these slots anew: nothing is known of them."""
        self._cache.seals.broken(slots)
        self._verified[slots] = 0

    def brought(self, slots: Slots) -> None:
        """Rows were read from a tier that verified them."""
        self.ended += 1
        self._verified[slots] = self.ended

    def unverified(self, request: CachedRequest, memory: Slots) -> Mask:
        """Which of these rows of memory have to be verified before the request is offered them."""
        if not self.on:
            return np.zeros(memory.shape, np.bool_)
        unverified: Mask = (memory != ABSENT) & (self._verified[memory] <= request.checked_after)
        return unverified

    def seal(self, chain: bytes, blocks: Indices, groups: Indices) -> None:
        """The engine has just written these rows: seal them soon."""
        cache = self._cache
        if not self.on or not len(blocks):
            return
        found = cache.memory.residency.slots_of(cache.tree.walk(chain))
        inside = blocks < len(found)
        blocks, groups = blocks[inside], groups[inside]
        here = found[blocks, groups] != ABSENT  # a row that was there already was given back
        waiting = cache.mover.backlog_bytes(cache.memory.name, False)
        fits = max(0, self._sealing_bytes - waiting) // cache.memory.row_bytes
        blocks, groups = blocks[here][:fits], groups[here][:fits]
        if len(blocks):
            self._submit(chain, blocks, groups, found[blocks, groups], Urgency.STORE, [])

    def verify(self, request: CachedRequest, rows: Mask, memory: Slots, urgency: Urgency) -> None:
        """Have these rows of memory verified, for a request that waits until they are."""
        blocks, groups = np.nonzero(rows)
        slots = memory[blocks, groups]
        begun = np.array([slot in self._under_way for slot in slots.tolist()], np.bool_)
        for check in {self._under_way[slot]: None for slot in slots[begun].tolist()}:
            if request not in check.waiters:
                check.waiters.append(request)
                request.checks.add(check)
            assert check.transfer is not None
            self._cache.mover.hasten(check.transfer, urgency)
        new = ~begun
        if new.any():
            check = self._submit(request.chain, blocks[new], groups[new], slots[new], urgency, [request])
            self._under_way.update(dict.fromkeys(slots[new].tolist(), check))
            request.checks.add(check)

    def finished(self, transfer: Transfer) -> None:
        """A check ended: what is damaged goes, and who waits asks again."""
        check = transfer.tag
        assert isinstance(check, Check)
        check.lease.release()
        ok = np.array([status is RowStatus.OK for status in transfer.statuses])
        if transfer.read:
            self.brought(transfer.slots[ok])
            for slot in transfer.slots.tolist():
                del self._under_way[slot]
            for waiter in check.waiters:
                waiter.checks.discard(check)
        damaged = [i for i, status in enumerate(transfer.statuses) if status is RowStatus.CORRUPT]
        if damaged:
            for waiter in check.waiters:
                self._cache.loader.release_hold(waiter)
            for i in damaged:
                self.drop(check.chain, int(check.blocks[i]))
            for i in damaged:
                self._tell(check, int(check.blocks[i]), int(check.groups[i]))

    def drop(self, chain: bytes, block: int) -> None:
        """Memory no longer holds what was sealed: the block and what builds on it leave memory."""
        cache = self._cache
        cache.recorder.add("kvtier_faults", 1, cache.memory.name, RowStatus.CORRUPT.value)
        for segment in cache.tree.walk(chain).path:
            if segment.depth <= block < segment.stop:
                cache.memory.evict_below(segment, block - segment.depth, RowStatus.CORRUPT.value)
        cache.epoch += 1

    def _tell(self, check: Check, block: int, group: int) -> None:
        """Those who waited for a damaged row: unless a tier below has it, or somebody who loads it just now keeps it in
        memory, it is a miss with this reason, and not tried again."""
        cache = self._cache
        match = cache.tree.walk(check.chain)

        def holds(residency_slots: Slots) -> bool:
            return block < len(residency_slots) and bool(residency_slots[block, group] != ABSENT)

        kept = holds(cache.memory.residency.slots_of(match))
        for waiter in check.waiters:
            below = any(
                holds(level.residency.slots_of(match))
                for level in cache.lower
                if waiter.context.lossy or not level.lossy
            )
            if kept or not below:
                waiter.failed.setdefault(block, MissReason.CORRUPT)

    def _submit(
        self,
        chain: bytes,
        blocks: Indices,
        groups: Indices,
        slots: Slots,
        urgency: Urgency,
        waiters: list[CachedRequest],
    ) -> Check:
        cache = self._cache
        check = Check(chain, blocks, groups, cache.memory.book.take(slots, "a check"), waiters)
        rows, views = RowIds(chain, blocks, groups), RowViews(cache.memory_row, slots)
        check.transfer = Transfer(self._carrier, slots, rows, views, bool(waiters), urgency, check)
        cache.mover.submit(check.transfer)
        return check
