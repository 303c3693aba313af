"""The way up: what a lookup finds, what the gate offers, and the promotions that bring it to memory.

A plan is made once a lookup: one walk of the tree, one vector pass over residency, one gate decision. What it promises
is leased at once; what lies below memory is read by the mover, verified, published in memory and leased to everyone who
waits for it. While a request waits, lookups answer from its plan and cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.level import Level
from kvtier.cache.manifest import RowIds, RowViews
from kvtier.cache.mover import Transfer, Urgency
from kvtier.cache.promoting import Promoting, Promotion
from kvtier.cache.reach import needed_rows, reach
from kvtier.cache.request import BlockState, CachedRequest, LoadPlan
from kvtier.index.residency import ABSENT
from kvtier.index.tree import Match
from kvtier.model.request import MissReason
from kvtier.place.gate import Cut, LinkLoad, choose_cut, patience_s, recompute_by_cut
from kvtier.tiers.protocol import RowStatus

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_ROWS_AT_ONCE = 1024
"""Rows of one promotion: a long prompt arrives in parts, the first ones first."""


class Loader:
    """Plans loads and runs promotions for one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._promoting = Promoting(cache.tree, cache.groups)
        self._to_submit: list[tuple[Level, Transfer]] = []

    @property
    def promoting_rows(self) -> int:
        """Rows now on their way to memory."""
        return self._promoting.rows

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
            shunned = self._shunned(request, cache.lower[index], match, there, start)
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
        coming = np.zeros_like(in_memory)
        if not request.refuses_to_wait:
            coming[start:] = self._promoting.coming(match)[start:] & ~in_memory[start:]
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
        self._join(request, self._promoting.of(match, pending), urgency)
        wanted = needed & ~in_memory & ~coming
        if wanted[window].any():
            pending |= self._promote(request, start, match, wanted, where, lower, urgency)
            reached = min(stop, reach(cache, available & (in_memory | pending), start))
            if reached < stop:
                request.cut_reason = MissReason.NO_ROOM
                stop, window = reached, slice(start, reached)
        request.expects(pending)
        states = np.zeros((stop - start, cache.groups), np.uint8)
        states[(in_memory & available)[window]] = BlockState.HIT
        states[pending[window]] = BlockState.PENDING
        plan = LoadPlan(start, stop - start, states, cache.epoch)
        if urgency is Urgency.DEMAND:
            self._wait(request, plan)
        request.plan = plan
        self._submit()
        return plan

    def finished(self, transfer: Transfer) -> None:
        """A promotion's reads ended: publish what was verified, remember what was not, wake who waits."""
        cache, promotion = self._cache, transfer.tag
        assert isinstance(promotion, Promotion)
        level = promotion.level
        self._promoting.end(promotion)
        ok = np.array([status is RowStatus.OK for status in transfer.statuses])
        cache.note_transfer(level, transfer)
        promotion.source.release()
        if promotion.void:
            cache.memory.release(promotion.memory_slots)
            return
        if (~ok).any():
            cache.memory.release(promotion.memory_slots[~ok])
            self._forget_failed(promotion, transfer)
        for group in cache.group_order:
            mine = promotion.groups == group
            good = mine & ok
            if good.any():
                cache.levels.publish_in_memory(
                    promotion.chain, group, promotion.blocks[good], promotion.memory_slots[good], promotion.start
                )
        cache.epoch += 1
        for waiter in promotion.waiters:
            waiter.arrived(promotion)
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
        for promotion in self._promoting.under_way(request.awaited):
            if request in promotion.waiters:
                promotion.waiters.remove(request)
                if not promotion.waiters and promotion.transfer is not None:
                    self._cache.mover.cancel(promotion.transfer)

    def give_up(self, request: CachedRequest) -> None:
        """The request's deadline passed. Whoever comes next does not wait for the same transfers."""
        for promotion in self._promoting.under_way(request.awaited):
            self._promoting.hangs(promotion)
        self.forget(request)
        request.waits_no_more()

    def reset(self) -> None:
        """Everything in flight is for nobody: its rows are given back when the reads end."""
        self._promoting.reset()

    # --- planning -----------------------------------------------------------------------------------------------

    def _shunned(self, request: CachedRequest, level: Level, match: Match, there: Mask, start: int) -> Mask:
        """Rows of a level that are not asked for now: they failed a while ago, or somebody waited for them in vain and
        the read still hangs."""
        shunned = np.zeros_like(there)
        hanging = self._promoting.hanging(match, level)
        if hanging is not None:
            shunned |= hanging
        for block, group in level.health.failed_rows.among(request.chain, match.blocks):
            shunned[block, group] = True
        shunned[:start] = False
        return shunned & there

    def _join(self, request: CachedRequest, promotions: Sequence[Promotion], urgency: Urgency) -> None:
        """Wait for what is on its way already, now at this urgency."""
        for promotion in promotions:
            if request not in promotion.waiters:
                promotion.waiters.append(request)
            if promotion.transfer is not None:
                self._cache.mover.hasten(promotion.transfer, urgency)
            request.awaited.add(promotion)

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
            tokens, most_s = request.context.prompt_tokens, cache.config.load_deadline_s
            request.deadline_s = now + patience_s(cache.prefill, begin, tokens, most_s, cache.conservative)

    # --- promotions ---------------------------------------------------------------------------------------------

    def _promote(
        self,
        request: CachedRequest,
        start: int,
        match: Match,
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
        n = len(blocks)
        started[blocks, groups] = True
        source = where[wanted][:n]
        for index, level in enumerate(cache.lower):
            mine = np.flatnonzero(source == index)
            if len(mine):
                part = slice(None) if len(mine) == n else mine
                below = lower[index][wanted][:n][part]
                self._read(request, start, level, match, (blocks[part], groups[part]), below, slots[part], urgency)
        return started

    def _read(
        self,
        request: CachedRequest,
        start: int,
        level: Level,
        match: Match,
        at: tuple[Indices, Indices],
        slots: Slots,
        memory_slots: Slots,
        urgency: Urgency,
    ) -> None:
        """Begin promotions of these rows (blocks, groups) of a level, from and into these slots."""
        cache, chain = self._cache, request.chain
        parts = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, len(slots), _ROWS_AT_ONCE)]
        sources = level.book.take_parts([slots[part] for part in parts], request.context.request_id)
        promotions = []
        for part, source in zip(parts, sources, strict=True):
            blocks, groups, targets = at[0][part], at[1][part], memory_slots[part]
            rows, views = RowIds(chain, blocks, groups), RowViews(cache.memory_row, targets)
            promotion = Promotion(start, level, chain, blocks, groups, targets, source, [request])
            promotion.transfer = transfer = Transfer(level.tier, source.slots, rows, views, True, urgency, promotion)
            transfer.seals, transfer.memory_slots = cache.seals, targets
            self._to_submit.append((level, transfer))
            promotions.append(promotion)
        self._promoting.begin(promotions, match, *at)
        request.awaited.update(promotions)
        request.comes_from(level.name, at[0])

    def _submit(self) -> None:
        """Hand over what was planned, when all else is done: I/O threads that have begun hold up this one whenever it
        lets go of Python's lock, as every large vector operation does."""
        for level, transfers in itertools.groupby(self._to_submit, lambda pair: pair[0]):
            self._cache.submit(level, *[transfer for _, transfer in transfers])
        self._to_submit.clear()

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
