"""Hints carried out: sessions announced are fetched and kept, pinned ones kept, others let go first.

The book (place/hints.py) says what holds; here it becomes leases and promotions. For every session that is kept in
memory there is a keeper: a request that never runs, whose hold protects blocks as any request's does and for which they
are promoted, at the urgency of speculation, before the session is back. Keepers give way: when memory cannot make room
for somebody who is there now, the least urgent goes first.

What stands in a request's own parameters holds from the request's end: only then is it known what there is to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.mover import Urgency
from kvtier.cache.request import CachedRequest
from kvtier.index.residency import ABSENT
from kvtier.model.keys import Chain, chain_length
from kvtier.model.request import RequestContext
from kvtier.place.hints import Answer, Hint, HintBook, HintKind, HintLimits, HintOutcome, Standing

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

_KNOWN_SESSIONS = 20_000
_KNOWN_BYTES = 64 << 20
_KEPT_SHARE = 0.5
"""Of a tier, at most, kept for sessions that are not there: a cache that only waits serves nobody."""
_TICK_S = 0.1
_KEPT_A_TICK = 64
"""Sessions whose copies below are looked for anew in one tick: thousands at once would hold up the engine's thread."""
_TRIED_A_TICK = 8
"""Sessions tried again in one tick: each costs a look at its whole chain."""
_LEAD_MARGIN = 1.5


class Hinted:
    """The hints of one TierCache. One control thread."""

    def __init__(self, cache: TierCache, limits: HintLimits) -> None:
        self._cache = cache
        self.book = HintBook(limits)
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._chain_bytes = 0
        self._keepers: dict[str, CachedRequest] = {}
        self._below: dict[str, list[Lease]] = {}
        self._missing: dict[str, None] = {}  # due, and not all in memory yet
        self._fetching = False
        self._next_tick_s = 0.0

    def __len__(self) -> int:
        """Sessions with hints that hold."""
        return len(self.book)

    # --- told by the cache --------------------------------------------------------------------------------------

    def arrived(self, request: CachedRequest) -> None:
        """A request of a session came. What is kept for it stays until it starts."""
        session = request.context.session_id
        if session:
            self._learn(session, request.chain)
            self.book.arrived(session, self._cache.clock.now())

    def started(self, request: CachedRequest) -> None:
        """It has what it needs, or computes it: the keeper is done unless a pin holds."""
        session = request.context.session_id
        if session in self._keepers or session in self._below:
            self._count_use(request, session)
            self._refresh(session)

    def ended(self, request: CachedRequest) -> None:
        """Its hints hold from now on, and pins grow with what it has added."""
        session = request.context.session_id
        if not session:
            return
        self._learn(session, request.chain)
        for hint in request.hints:
            self.offer(hint)
        if session in self._keepers or session in self._below:
            self._refresh(session)

    def is_shared(self, session: str) -> bool:
        """Somebody said that others will use this session's prefix."""
        return bool(session) and self.book.standing(session, self._cache.clock.now()).shared

    def tick(self, now: float) -> None:
        """Fetch what is due, let go of what has ended. Called every step; does something ten times a second."""
        if not len(self.book) or now < self._next_tick_s:
            return
        self._next_tick_s = now + _TICK_S
        for session in self.book.expire(now):
            self._refresh(session)
        if not self._cache.conservative:
            self._bring(now)
        for _ in range(min(_KEPT_A_TICK, len(self._below))):
            session = next(iter(self._below))
            self._below[session] = self._below.pop(session)  # the others first, next time
            self._keep_below(session)
        self._count_returns()

    def relieve(self) -> bool:
        """Memory cannot make room: give up the least urgent session. False if there is none to give up."""
        if self._fetching or not self._keepers:
            return False
        now = self._cache.clock.now()
        order = [s for s in self.book.by_urgency(now) if s in self._keepers]
        session = order[-1] if order else next(iter(self._keepers))
        self.book.give_up(session, now)
        self._cache.recorder.add("kvtier_hints_given_up", 1)
        self._release(session)
        return True

    def clear(self) -> None:
        """Forget every hint: the blocks they are about are gone."""
        for session in [*self._keepers, *self._below]:
            self._release(session)
        self.book.clear()
        self._chains.clear()
        self._chain_bytes = 0

    # --- told by clients ----------------------------------------------------------------------------------------

    def offer(self, hint: Hint) -> Answer:
        """Take in one hint. Counted by kind and outcome."""
        cache = self._cache
        now, chain = cache.clock.now(), self._chains.get(hint.session)
        if chain is None:
            answer = Answer(HintOutcome.REJECTED, "unknown_session")
        else:
            answer = self.book.offer(hint, now, chain_length(chain) * cache.groups * cache.memory.row_bytes)
        cache.recorder.add("kvtier_hints", 1, hint.kind.value, answer.outcome.value)
        if answer.outcome is not HintOutcome.REJECTED:
            self._next_tick_s = 0.0
            if hint.kind is HintKind.DEMOTE:
                self._demote(hint.session)
            self._refresh(hint.session)
        return answer

    def standing(self, session: str) -> Standing:
        """What holds for a session now."""
        return self.book.standing(session, self._cache.clock.now())

    # --- inside -------------------------------------------------------------------------------------------------

    def _learn(self, session: str, chain: Chain) -> None:
        self._chain_bytes += len(chain) - len(self._chains.pop(session, b""))
        self._chains[session] = chain
        while len(self._chains) > _KNOWN_SESSIONS or (self._chain_bytes > _KNOWN_BYTES and len(self._chains) > 1):
            _, forgotten = self._chains.popitem(last=False)
            self._chain_bytes -= len(forgotten)

    def _refresh(self, session: str) -> None:
        """Make leases what the book says they are."""
        standing = self.standing(session)
        now = self._cache.clock.now()
        if not standing.keeps_somewhere(now) or session not in self._chains:
            self._release(session)
            return
        if standing.keeps_in_memory(now):
            self._keep(session, standing)
        else:
            self._release_keeper(session)
        self._below.setdefault(session, [])
        self._keep_below(session)

    def _keep(self, session: str, standing: Standing) -> None:
        """Protect what memory has of the session; a pin alone, as much of it as was granted."""
        cache, chain = self._cache, self._chains[session]
        keeper = self._keepers.get(session)
        if keeper is None or keeper.chain != chain:
            promoted = keeper.promoted_from if keeper is not None else {}
            self._release_keeper(session)
            keeper = self._keepers[session] = _keeper(session, chain)
            keeper.promoted_from = promoted
        cache.protect(cache.tree.walk(chain).path, max(standing.protected_until_s, standing.pinned_until_s))
        if keeper.plan is not None and keeper.awaited:
            return  # being fetched: it is leased as it lands
        blocks = self._granted_blocks(standing)
        slots = cache.memory.residency.slots_of(cache.tree.walk(chain))[:blocks]
        held = slots[slots != ABSENT]
        cache.loader.release_hold(keeper)
        if len(held) and len(held) <= self._room():
            keeper.hold = cache.memory.book.take(held, f"hint for {session}")

    def _granted_blocks(self, standing: Standing) -> int | None:
        cache = self._cache
        if cache.clock.now() < standing.protected_until_s or not standing.pinned_bytes:
            return None
        return max(1, standing.pinned_bytes // (cache.groups * cache.memory.row_bytes))

    def _room(self) -> int:
        """Rows of memory that may still be kept."""
        kept = sum(len(keeper.hold.slots) for keeper in self._keepers.values() if keeper.hold is not None)
        return max(0, int(_KEPT_SHARE * self._cache.memory.residency.capacity_rows) - kept)

    def _keep_below(self, session: str) -> None:
        """Protect the copies in lower tiers: until it is back, they are what a fetch would read."""
        cache, leases, chain = self._cache, self._below[session], self._chains.get(session)
        match = cache.tree.walk(chain or b"")
        fresh = []
        for level in cache.lower:
            slots = level.residency.slots_of(match)
            held = slots[slots != ABSENT]
            if len(held) and level.residency.pinned_rows + len(held) <= _KEPT_SHARE * level.residency.capacity_rows:
                fresh.append(level.book.take(held, f"hint for {session}"))
        self._below[session] = fresh
        for lease in leases:
            lease.release()

    def _bring(self, now: float) -> None:
        """Fetch what is due, and what was due before and found no room then: there may be some now."""
        again = [session for session in self.book.by_urgency(now) if session in self._missing] if self._missing else []
        due = self.book.due(now, self._lead_s)
        self._missing.update(dict.fromkeys(due))
        for session in dict.fromkeys([*due, *again[:_TRIED_A_TICK]]):
            keeper = self._keepers.get(session)
            if keeper is None or not self._is_below(session):
                self._missing.pop(session, None)
            elif not keeper.awaited:
                self._fetch(session)

    def _is_below(self, session: str) -> bool:
        """Whether a lower tier has blocks of the session that memory lacks and may keep."""
        cache = self._cache
        match, limit = cache.tree.walk(self._chains[session]), self._granted_blocks(self.standing(session))
        missing = cache.memory.residency.slots_of(match)[:limit] == ABSENT
        return any(bool((missing & (level.residency.slots_of(match)[:limit] != ABSENT)).any()) for level in cache.lower)

    def _fetch(self, session: str) -> None:
        """Bring the session's blocks to memory: not sooner than they are needed, and after everybody who waits."""
        cache, keeper = self._cache, self._keepers.get(session)
        if keeper is None:
            return
        cache.loader.release_hold(keeper)
        limit = self._granted_blocks(self.standing(session))
        most = chain_length(keeper.chain) if limit is None else limit
        keeper.limit_blocks = min(most, self._room() // cache.groups)
        before = np.count_nonzero(keeper.coming)
        self._fetching = True
        try:
            cache.loader.plan(keeper, 0, Urgency.SPECULATIVE)
        finally:
            self._fetching = False
        cache.recorder.add("kvtier_prefetched_rows", int(np.count_nonzero(keeper.coming) - before), "hint")

    def _lead_s(self, session: str) -> float:
        """How long before its return a session's fetch must begin."""
        cache, chain = self._cache, self._chains.get(session)
        if chain is None:
            return 0.0
        match = cache.tree.walk(chain)
        missing: npt.NDArray[np.bool_] = cache.memory.residency.slots_of(match) == ABSENT
        seconds = 0.0
        for level in cache.lower:
            rows = missing & (level.residency.slots_of(match) != ABSENT)
            missing &= ~rows
            n_bytes = np.array([float(rows.sum()) * level.row_bytes])
            seconds += float(cache.load_curve(level).seconds(n_bytes)[0])
        return _LEAD_MARGIN * seconds + 2 * _TICK_S

    def _demote(self, session: str) -> None:
        """Its own blocks leave memory now, where a lower tier has them: others may need the room."""
        cache = self._cache
        match = cache.tree.walk(self._chains[session])
        below = np.zeros((match.blocks, cache.groups), np.bool_)
        for level in cache.lower:
            below |= level.residency.slots_of(match) != ABSENT
        for segment in reversed(match.path):
            if cache.forecast.sessions.is_shared(segment) or segment.stop > match.blocks:
                return
            residency = cache.memory.residency
            if any(residency.extent(child) for child in segment.children.values()):
                return
            if residency.extent(segment) and below[segment.depth : segment.stop].all():
                cache.memory.evict(segment, residency.evictable_from(segment), "hinted")

    def _count_use(self, request: CachedRequest, session: str) -> None:
        keeper = self._keepers.get(session)
        if keeper is not None and keeper.promoted_from:
            on_device = (request.sources or {}).get("hbm", 0) // self._cache.block_tokens
            there = slice(on_device, max(on_device, request.miss_from_block))
            used = sum(int(np.count_nonzero(blocks[there])) for blocks in keeper.promoted_from.values())
            self._cache.recorder.add("kvtier_prefetched_rows_used", used * self._cache.groups, "hint")
            keeper.promoted_from = {}

    def _count_returns(self) -> None:
        for how, count in self.book.returns.items():
            self._cache.recorder.add("kvtier_hint_returns", count, how.value)
        self.book.returns.clear()

    def _release(self, session: str) -> None:
        self._release_keeper(session)
        for lease in self._below.pop(session, ()):
            lease.release()

    def _release_keeper(self, session: str) -> None:
        keeper = self._keepers.pop(session, None)
        self._missing.pop(session, None)
        if keeper is not None:
            keeper.ended = True
            self._cache.loader.forget(keeper)
            self._cache.loader.release_hold(keeper)


def _keeper(session: str, chain: Chain) -> CachedRequest:
    # Keys of exact requests are in no lossy tier: what is found there under this chain is for those who accept it.
    context = RequestContext(request_id=f"hint:{session}", arrival_s=0.0, session_id=session, lossy=True)
    return CachedRequest(context, chain, chain_length(chain))
