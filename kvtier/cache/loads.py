"""The way up: what a lookup finds, what the gate offers, and the promotions that bring it to memory.

A plan is made once a lookup: one walk of the tree, one vector pass over residency, one gate decision. What it promises
is leased at once; what lies below memory is read by the mover, verified, published in memory and leased to everyone who
waits for it. While a request waits, lookups answer from its plan and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.manifest import RowIds, RowViews, row_keys
from kvtier.cache.mover import Transfer, Urgency
from kvtier.cache.reach import needed_rows, reach
from kvtier.cache.request import BlockState, CachedRequest, LoadPlan
from kvtier.index.residency import ABSENT
from kvtier.model.keys import key_at
from kvtier.model.request import MissReason
from kvtier.place.gate import Cut, LinkLoad, choose_cut, recompute_by_cut
from kvtier.tiers.protocol import RowStatus

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

_ROWS_AT_ONCE = 512
"""Rows of one promotion: a long prompt arrives in parts, the first ones first."""


@dataclass(slots=True, eq=False)
class Promotion:
    """Rows of one request being read from `level` into reserved memory slots; others may wait for them too."""

    start: int
    level: Level
    chain: bytes
    blocks: npt.NDArray[np.intp]
    groups: npt.NDArray[np.intp]
    memory_slots: Slots
    source: Lease
    waiters: list[CachedRequest]
    transfer: Transfer | None = None
    void: bool = False
    # Somebody's deadline passed while it was under way: nobody else waits for it.
    late: bool = False


class Loader:
    """Plans loads and runs promotions for one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._promoting: dict[tuple[bytes, int], Promotion] = {}
        self._hung: set[Promotion] = set()

    @property
    def promoting_rows(self) -> int:
        """Rows now on their way to memory."""
        return len(self._promoting)

    def plan(self, request: CachedRequest, start: int, urgency: Urgency = Urgency.DEMAND) -> LoadPlan:
        """States of the request's blocks from `start` on, as far as they are offered. Starts promotions and leases
        what it promises. With a lower urgency nobody waits yet: no deadline runs, and what is speculative is not asked
        of the gate, which weighs a load against computing now."""
        cache = self._cache
        self.release_hold(request)
        match = cache.tree.walk(request.chain)
        damaged = cache.damage.lingering(match, request.chain)
        memory = cache.memory.residency.slots_of(match)
        where = np.full(memory.shape, -1, np.int8)
        lower = [level.residency.slots_of(match) for level in cache.lower]
        down = np.zeros(memory.shape, np.bool_)
        for index in range(len(cache.lower) - 1, -1, -1):
            if cache.lower[index].lossy and not request.context.lossy:
                continue
            there = (lower[index] != ABSENT) & (memory == ABSENT)
            shunned = self._shunned(request, cache.lower[index], there, start)
            there &= ~shunned
            down |= shunned
            if not request.refuses_to_wait and there[start:].any():
                if cache.lower[index].health.usable():
                    where[there] = index
                else:
                    down |= there
        in_memory = memory != ABSENT
        if damaged is not None:
            in_memory &= ~damaged
        coming = self._coming(request, in_memory, start)
        blocked = self._blocked(request, match.blocks)[:, None]
        available = (in_memory | coming | (where >= 0)) & ~(blocked & ~in_memory)
        if request.refuses_to_wait:
            available &= in_memory
        stop = reach(cache, available, start)
        if request.limit_blocks is not None:
            stop = min(stop, request.limit_blocks)
        elif not request.started:
            request.declined = 0
            request.cut_reason = MissReason.TIER_DOWN if down[stop : stop + 1].any() else None
        needed = needed_rows(cache, available, start, stop)
        cut = Cut(stop - start, 0.0, 0.0)
        if urgency < Urgency.SPECULATIVE:
            cut = self._gate(request, start, stop, needed & ~in_memory & ~coming, where, needed & in_memory)
        if urgency is Urgency.DEMAND and request.limit_blocks is None and cut.found:
            context = request.context
            cache.traffic.decided(context.request_id, start * cache.block_tokens, context.prompt_tokens, cut)
        if cut.blocks < stop - start:
            request.declined = max(request.declined, stop - start - cut.blocks)
            stop = start + cut.blocks
            needed = needed_rows(cache, available, start, stop)
        request.limit_blocks = stop if request.limit_blocks is None else min(stop, request.limit_blocks)
        window = slice(start, stop)
        self._hold(request, memory[window][(available & in_memory)[window]])
        pending = needed & coming
        self._join(request, pending, urgency)
        wanted = needed & ~in_memory & ~coming
        if wanted[window].any():
            pending |= self._promote(request, start, wanted, where, lower, urgency)
            reached = min(stop, reach(cache, available & (in_memory | pending), start))
            if reached < stop:
                request.cut_reason = MissReason.NO_ROOM
                stop, window = reached, slice(start, reached)
        states = np.zeros((stop - start, cache.groups), np.uint8)
        states[(in_memory & available)[window]] = BlockState.HIT
        states[pending[window]] = BlockState.PENDING
        plan = LoadPlan(start, stop - start, states, cache.epoch)
        if urgency is Urgency.DEMAND:
            self._wait(request, plan)
        request.plan = plan
        return plan

    def finished(self, transfer: Transfer) -> None:
        """A promotion's reads ended: publish what was verified, remember what was not, wake who waits."""
        cache, promotion = self._cache, transfer.tag
        assert isinstance(promotion, Promotion)
        level = promotion.level
        self._hung.discard(promotion)
        ok = np.array([status is RowStatus.OK for status in transfer.statuses])
        cache.note_transfer(level, transfer)
        promotion.source.release()
        if promotion.void:
            cache.memory.release(promotion.memory_slots)
            return
        if (~ok).any():
            cache.memory.release(promotion.memory_slots[~ok])
            self._forget_failed(promotion, transfer)
        for key in row_keys(promotion.chain, promotion.blocks, promotion.groups):
            if self._promoting.get(key) is promotion:
                del self._promoting[key]
        for group in cache.group_order:
            mine = promotion.groups == group
            good = mine & ok
            if good.any():
                cache.levels.publish_in_memory(
                    promotion.chain, group, promotion.blocks[good], promotion.memory_slots[good], promotion.start
                )
        cache.epoch += 1
        for waiter in promotion.waiters:
            waiter.awaited.difference_update(zip(promotion.blocks.tolist(), promotion.groups.tolist(), strict=True))
            if not waiter.ended:
                self._extend_hold(waiter)

    def release_hold(self, request: CachedRequest) -> None:
        """Let go of what the last plan promised."""
        if request.hold is not None:
            request.hold.release()
            request.hold = None
        request.plan = None

    def forget(self, request: CachedRequest) -> None:
        """The request is gone, or waits no more. What it waited for and nobody else does is cancelled as far as it has
        not begun."""
        for promotion in {self._promoting[key]: None for key in self._keys_awaited(request)}:
            if request in promotion.waiters:
                promotion.waiters.remove(request)
                if not promotion.waiters and promotion.transfer is not None:
                    self._cache.mover.cancel(promotion.transfer)

    def give_up(self, request: CachedRequest) -> None:
        """The request's deadline passed. Whoever comes next does not wait for the same transfers."""
        for key in self._keys_awaited(request):
            promotion = self._promoting[key]
            promotion.late = True
            self._hung.add(promotion)
        self.forget(request)
        request.awaited.clear()

    def reset(self) -> None:
        """Everything in flight is for nobody: its rows are given back when the reads end."""
        for promotion in set(self._promoting.values()):
            promotion.waiters.clear()
            promotion.void = True
        self._promoting.clear()

    # --- planning -----------------------------------------------------------------------------------------------

    def _coming(self, request: CachedRequest, in_memory: Mask, start: int) -> Mask:
        """Rows not in memory that another request (or this one) is promoting already."""
        coming = np.zeros_like(in_memory)
        if self._promoting and not request.refuses_to_wait:
            for block, group in np.argwhere(~in_memory[start:]).tolist():
                promotion = self._promoting.get((key_at(request.chain, start + block), group))
                coming[start + block, group] = promotion is not None and not promotion.late
        return coming

    def _shunned(self, request: CachedRequest, level: Level, there: Mask, start: int) -> Mask:
        """Rows of a level that are not asked for now: they failed a while ago, or somebody waited for them in vain and
        the read still hangs."""
        shunned = np.zeros_like(there)
        failed = level.health.failed_rows
        if self._hung or len(failed):
            for block, group in np.argwhere(there[start:]).tolist():
                key = key_at(request.chain, start + block)
                promotion = self._promoting.get((key, group))
                hangs = promotion is not None and promotion.late and promotion.level is level
                shunned[start + block, group] = hangs or failed.holds(key, group)
        return shunned

    def _keys_awaited(self, request: CachedRequest) -> list[tuple[bytes, int]]:
        keys = [(key_at(request.chain, block), group) for block, group in request.awaited]
        return [key for key in keys if key in self._promoting]

    def _join(self, request: CachedRequest, rows: Mask, urgency: Urgency) -> None:
        """Wait for rows that are on their way already, now at this urgency."""
        cache = self._cache
        for block, group in np.argwhere(rows).tolist():
            promotion = self._promoting[key_at(request.chain, block), group]
            if request not in promotion.waiters:
                promotion.waiters.append(request)
            if promotion.transfer is not None:
                cache.mover.hasten(promotion.transfer, urgency)
            request.awaited.add((block, group))

    @staticmethod
    def _blocked(request: CachedRequest, blocks: int) -> Mask:
        """Blocks whose load failed for this request: not tried twice."""
        blocked = np.zeros(blocks, np.bool_)
        for block in request.failed:
            if block < blocks:
                blocked[block] = True
        return blocked

    def _gate(
        self, request: CachedRequest, start: int, stop: int, below: Mask, where: npt.NDArray[np.int8], above: Mask
    ) -> Cut:
        cache = self._cache
        if not cache.config.gate or stop <= start:
            return Cut(max(0, stop - start), 0.0, 0.0)
        window, n = slice(start, stop), stop - start
        up = []
        for index, level in enumerate(cache.lower):
            rows = below[window] & (where[window] == index)
            if rows.any():
                price = cache.traffic.link_price(level.name)
                up.append(LinkLoad(cache.load_curve(level), _cumulative(rows, level.row_bytes), price))
        # All of it lands in memory before the engine copies any of it.
        copied = LinkLoad(cache.memory.curve(0), _cumulative((above | below)[window], cache.memory.row_bytes))
        recompute = recompute_by_cut(
            cache.prefill, start * cache.block_tokens, cache.block_tokens, request.context.prompt_tokens, n
        )
        # Windows were stored at the boundary only: no cut before it can be loaded.
        gpu = cache.traffic.gpu_for(request)
        return choose_cut([up, [copied]], recompute, n, gpu, whole=bool(cache.window_groups))

    def _wait(self, request: CachedRequest, plan: LoadPlan) -> None:
        """Start or end the clock of a wait. vLLM itself never gives up on a deferred request."""
        cache, now = self._cache, self._cache.clock.now()
        if not plan.waiting:
            if request.wait_began_s is not None:
                cache.recorder.observe("kvtier_load_wait_seconds", now - request.wait_began_s)
                cache.traffic.load_waits.add(now - request.wait_began_s, now)
            request.wait_began_s = request.deadline_s = None
        elif request.wait_began_s is None:
            request.wait_began_s = now
            request.waited = True
            begin = plan.start * cache.block_tokens
            recompute_s = cache.prefill.seconds_from(np.array([begin]), request.context.prompt_tokens)[0]
            limit_s = cache.config.load_deadline_s
            # An estimate that the gate does not trust yet ends no load either.
            if recompute_s > 0 and cache.prefill.knows(request.context.prompt_tokens - begin):
                patience = 1.0 if cache.conservative else 2.0
                limit_s = min(limit_s, max(0.1, patience * recompute_s))
            request.deadline_s = now + limit_s

    # --- promotions ---------------------------------------------------------------------------------------------

    def _promote(
        self,
        request: CachedRequest,
        start: int,
        wanted: Mask,
        where: npt.NDArray[np.int8],
        lower: list[Slots],
        urgency: Urgency,
    ) -> Mask:
        """Start reading `wanted` rows from the fastest tier that has them, in prefix order, as far as memory has room.
        Returns the rows now on their way."""
        cache = self._cache
        started = np.zeros_like(wanted)
        blocks, groups = np.nonzero(wanted)
        slots = cache.memory.make_room(len(blocks))
        while slots is None and len(blocks) > 1:
            blocks, groups = blocks[: len(blocks) // 2], groups[: len(groups) // 2]
            slots = cache.memory.make_room(len(blocks))
        if slots is None:
            return started
        for index, level in enumerate(cache.lower):
            mine = np.flatnonzero(where[blocks, groups] == index)
            for at in range(0, len(mine), _ROWS_AT_ONCE):
                part = mine[at : at + _ROWS_AT_ONCE]
                self._read(request, start, level, blocks[part], groups[part], lower[index], slots[part], urgency)
                started[blocks[part], groups[part]] = True
        return started

    def _read(
        self,
        request: CachedRequest,
        start: int,
        level: Level,
        blocks: npt.NDArray[np.intp],
        groups: npt.NDArray[np.intp],
        where: Slots,
        memory_slots: Slots,
        urgency: Urgency,
    ) -> None:
        cache = self._cache
        source = level.book.take(where[blocks, groups], request.context.request_id)
        promotion = Promotion(start, level, request.chain, blocks, groups, memory_slots, source, [request])
        self._promoting.update(dict.fromkeys(row_keys(request.chain, blocks, groups), promotion))
        request.awaited.update(zip(blocks.tolist(), groups.tolist(), strict=True))
        request.promoted_from.update(dict.fromkeys(blocks.tolist(), level.name))
        rows, views = RowIds(request.chain, blocks, groups), RowViews(cache.memory_row, memory_slots)
        promotion.transfer = Transfer(level.tier, source.slots, rows, views, True, urgency, promotion)
        promotion.transfer.seals, promotion.transfer.memory_slots = cache.seals, memory_slots
        cache.submit(level, promotion.transfer)

    def _forget_failed(self, promotion: Promotion, transfer: Transfer) -> None:
        """A row that could not be read or verified is a miss for good: it and all that builds on it leave the tier."""
        cache, level = self._cache, promotion.level
        match = cache.tree.walk(promotion.chain)
        for i, (block, status) in enumerate(zip(promotion.blocks.tolist(), transfer.statuses, strict=True)):
            if status is RowStatus.OK or transfer.dropped[i]:
                continue
            gone = status in (RowStatus.CORRUPT, RowStatus.FOREIGN, RowStatus.VANISHED)
            reason = MissReason.CORRUPT if gone else MissReason.LOAD_FAILED
            if status is RowStatus.VANISHED:
                reason = MissReason.VANISHED
            for waiter in promotion.waiters:
                waiter.failed.setdefault(block, reason)
            if not gone:
                continue
            for segment in match.path:
                if segment.depth <= block < segment.stop:
                    level.evict_below(segment, block - segment.depth, status.value)

    def _hold(self, request: CachedRequest, slots: Slots) -> None:
        if len(slots):
            request.hold = self._cache.memory.book.take(slots, request.context.request_id)

    def _extend_hold(self, request: CachedRequest) -> None:
        """Lease what has just arrived for a waiting request, on top of what it holds."""
        plan = request.plan
        if plan is None:
            return
        cache = self._cache
        match = cache.tree.walk(request.chain)
        window = slice(plan.start, min(plan.start + plan.blocks, match.blocks))
        slots = cache.memory.residency.slots_of(match)[window]
        offered = plan.states[: len(slots)] != BlockState.MISS
        old, request.hold = request.hold, None
        self._hold(request, slots[offered & (slots != ABSENT)])
        if old is not None:
            old.release()


def _cumulative(rows: Mask, row_bytes: int) -> npt.NDArray[np.float64]:
    counts = rows.sum(axis=1).astype(np.float64) * row_bytes
    return np.concatenate([[0.0], np.cumsum(counts)])
