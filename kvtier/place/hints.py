"""Hints: what a client says about a session, and what of it stands now.

"This session returns in about 3 s" is worth ten forecasts (docs/placement.md), and still it is only a claim. So every
hint is a lease: it holds for its time and no longer, a return is waited for three times as long as announced, pins are
capped by client, and what happens afterwards overrides what was said before: a session that is back needs no prefetch,
one hinted to return is not demoted. A false hint costs one prefetch, a late one nothing, a missing one what was never
promised.

The book decides what stands; its owner (TierCache, the simulator) moves and protects blocks accordingly.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec

PATIENCE = 3.0  # a return is waited for so many times as long as it was announced
_PREFETCH_S = 60.0  # what was fetched without saying for how long is kept so long


class HintKind(Enum):
    """What can be said of a session."""

    RETURNS_IN = "returns_in"
    """It is back in so many seconds: have it in memory by then."""
    PIN = "pin"
    """Keep it in memory for so many seconds, up to so many bytes."""
    RETAIN_UNTIL = "retain_until"
    """Keep it in some tier until then."""
    DEMOTE = "demote"
    """It will not be back soon: its room in memory is free to go first."""
    PREFETCH = "prefetch"
    """Have it in memory now."""
    SHARE = "share"
    """Other sessions will use its prefix: worth writing down whatever this session does."""


class HintOutcome(Enum):
    """What became of a hint."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


class Return(Enum):
    """How an announced return went."""

    ON_TIME = "on_time"
    EARLY = "early"
    LATE = "late"
    NEVER = "never"


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """One claim. `seconds` is the time until the return, or how long the rest holds; `max_bytes` bounds a pin (0: all
    the session has). `client` is who said so: caps on pins are per client."""

    session: str
    kind: HintKind
    seconds: float = 0.0
    max_bytes: int = 0
    client: str = ""


class Answer(NamedTuple):
    """What became of a hint, and why it was not simply accepted."""

    outcome: HintOutcome
    reason: str = ""


class HintLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may ask for."""

    sessions: int = 10_000
    """Sessions with hints at a time."""
    pin_bytes_per_client: int = 0
    """Bytes one client may have pinned; 0: pins are rejected."""
    longest_s: float = 3600.0
    """Longest time a hint may hold; longer ones are clipped."""
    lead_max_s: float = 30.0
    """A prefetch starts no sooner than this before the session is back."""


class Standing(NamedTuple):
    """What holds for a session now. Times are 0 where nothing holds."""

    returns_s: float = 0.0
    protected_until_s: float = 0.0
    pinned_until_s: float = 0.0
    pinned_bytes: int = 0
    retained_until_s: float = 0.0
    demoted: bool = False
    shared: bool = False

    def keeps_in_memory(self, now: float) -> bool:
        """Blocks of the session may not leave memory now."""
        return now < max(self.protected_until_s, self.pinned_until_s)

    def keeps_somewhere(self, now: float) -> bool:
        """Blocks of the session may not leave the last tier that has them now."""
        return now < max(self.protected_until_s, self.pinned_until_s, self.retained_until_s)


NOTHING = Standing()


class _Entry:
    """What was said of one session; `client` is whose pin it is."""

    __slots__ = ("client", "demoted_until_s", "standing")

    def __init__(self) -> None:
        self.standing = NOTHING
        self.client = ""
        self.demoted_until_s = 0.0

    def ends_s(self, after_s: float) -> list[float]:
        """When what holds now ends."""
        s = self.standing
        times = (s.protected_until_s, s.pinned_until_s, s.retained_until_s, self.demoted_until_s)
        return [time for time in times if time > after_s]


class _Alarms:
    """At most one moment a session, told when it has come. Memory stays in proportion to the sessions."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, session: str, at_s: float) -> None:
        self._at[session] = at_s
        heapq.heappush(self._heap, (at_s, session))
        if len(self._heap) > 64 + 2 * len(self._at):
            self._heap = [(at, session) for session, at in self._at.items()]
            heapq.heapify(self._heap)

    def cancel(self, session: str) -> None:
        self._at.pop(session, None)

    def ring(self, now: float) -> list[str]:
        """Sessions whose moment has come since the last call."""
        rung = []
        while self._heap and self._heap[0][0] <= now:
            at_s, session = heapq.heappop(self._heap)
            if self._at.get(session) == at_s:
                del self._at[session]
                rung.append(session)
        return rung


class HintBook:
    """The hints that hold. Not thread-safe: one control thread. `now` is the owner's clock."""

    def __init__(self, limits: HintLimits | None = None) -> None:
        self.limits = limits or HintLimits()
        self.returns: Counter[Return] = Counter()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._pinned: Counter[str] = Counter()  # bytes by client
        self._ends = _Alarms()  # when something of a session ends
        self._starts = _Alarms()  # when a prefetch may start at the earliest
        self._startable: dict[str, None] = {}

    def __len__(self) -> int:
        """Sessions with hints that hold."""
        return len(self._entries)

    def pinned_bytes(self, client: str) -> int:
        """Bytes a client has pinned now."""
        return self._pinned[client]

    def standing(self, session: str, now: float) -> Standing:
        """What holds for a session now."""
        entry = self._entries.get(session)
        if entry is None or not entry.ends_s(now):
            return NOTHING
        return entry.standing._replace(demoted=now < entry.demoted_until_s)

    def offer(self, hint: Hint, now: float, session_bytes: int) -> Answer:
        """Take in a hint about a session that has `session_bytes` of blocks. Nothing changed if it is rejected."""
        limits = self.limits
        if not hint.session or not (hint.seconds >= 0 and math.isfinite(hint.seconds)) or hint.max_bytes < 0:
            return Answer(HintOutcome.REJECTED, "malformed")
        entry = self._entries.get(hint.session)
        if entry is None and len(self._entries) >= limits.sessions:
            self.expire(now)
            if len(self._entries) >= limits.sessions:
                return Answer(HintOutcome.REJECTED, "too_many_sessions")
        seconds = min(hint.seconds, limits.longest_s)
        clipped = "time" if seconds < hint.seconds else ""
        granted = 0
        if hint.kind is HintKind.PIN:
            asked = min(session_bytes, hint.max_bytes) if hint.max_bytes else session_bytes
            already = entry.standing.pinned_bytes if entry is not None and entry.client == hint.client else 0
            granted = min(asked, limits.pin_bytes_per_client - self._pinned[hint.client] + already)
            if granted <= 0:
                return Answer(HintOutcome.REJECTED, "pin_bytes" if asked else "unknown_session")
            clipped = "pin_bytes" if granted < asked else clipped
        if entry is None:
            entry = self._entries[hint.session] = _Entry()
        self._take(hint.session, entry, hint, now, seconds, granted)
        self._close_if_over(hint.session, entry, now)
        return Answer(HintOutcome.CLIPPED, clipped) if clipped else Answer(HintOutcome.ACCEPTED)

    def arrived(self, session: str, now: float) -> None:
        """The session is back: what was said of its return is settled; pins and retention hold for their time."""
        entry = self._entries.get(session)
        if entry is None:
            return
        s = entry.standing
        if s.returns_s:
            announced_s = (s.protected_until_s - s.returns_s) / (PATIENCE - 1)
            slack = max(0.5, 0.5 * announced_s)
            self.returns[
                Return.EARLY
                if now < s.returns_s - slack
                else Return.LATE
                if now > s.returns_s + slack
                else Return.ON_TIME
            ] += 1
        self._unwant(session)
        entry.demoted_until_s = 0.0
        entry.standing = s._replace(returns_s=0.0, protected_until_s=0.0)
        self._close_if_over(session, entry, now)

    def due(self, now: float, lead_s: Callable[[str], float]) -> list[str]:
        """Sessions whose blocks must begin to move to memory now, those back soonest first; each is named once per
        hint. `lead_s` says how long moving what is missing takes."""
        self._startable.update(dict.fromkeys(self._starts.ring(now)))
        ready = []
        for session in self._startable:
            returns_s = self._entries[session].standing.returns_s
            if now >= returns_s - min(lead_s(session), self.limits.lead_max_s):
                ready.append((returns_s, session))
        ready.sort()
        for _, session in ready:
            self._unwant(session)
        return [session for _, session in ready]

    def expire(self, now: float) -> list[str]:
        """Sessions of which something has ended since the last call: look at their standing again."""
        ended = self._ends.ring(now)
        for session in ended:
            entry = self._entries[session]
            self._let_go(session, entry, now)
            self._close_if_over(session, entry, now)
        return ended

    def by_urgency(self, now: float) -> list[str]:
        """Sessions kept in memory, the last to be given up first: pins, then returns, the soonest first."""
        kept = [(e.standing, s) for s, e in self._entries.items() if e.standing.keeps_in_memory(now)]
        return [s for _, s in sorted(kept, key=lambda k: (k[0].pinned_until_s <= now, k[0].returns_s, k[1]))]

    def give_up(self, session: str, now: float) -> None:
        """The owner needs the room: the session is no longer kept in memory. Retention holds on."""
        entry = self._entries.get(session)
        if entry is not None:
            self._unwant(session)
            self._unpin(entry)
            entry.standing = entry.standing._replace(returns_s=0.0, protected_until_s=0.0)
            self._close_if_over(session, entry, now)

    def clear(self) -> None:
        """Forget everything."""
        for held in (self._entries, self._pinned, self._startable):
            held.clear()
        self._ends, self._starts = _Alarms(), _Alarms()

    # --- internals ----------------------------------------------------------------------------------------------

    def _take(self, session: str, entry: _Entry, hint: Hint, now: float, seconds: float, granted: int) -> None:
        s = entry.standing
        if hint.kind is HintKind.DEMOTE:
            self._unwant(session)
            self._unpin(entry)
            entry.standing = Standing(shared=s.shared)
            entry.demoted_until_s = now + (seconds or self.limits.longest_s)
            return
        entry.demoted_until_s = 0.0
        match hint.kind:
            case HintKind.RETURNS_IN:
                until_s = now + PATIENCE * max(seconds, 1.0)
                entry.standing = s._replace(returns_s=now + seconds, protected_until_s=until_s)
                self._want(session, now + seconds - self.limits.lead_max_s)
            case HintKind.PREFETCH:
                until_s = now + (seconds or _PREFETCH_S)
                entry.standing = s._replace(returns_s=0.0, protected_until_s=until_s)
                self._want(session, now)
            case HintKind.PIN:
                self._unpin(entry)
                entry.client = hint.client
                self._pinned[hint.client] += granted
                until_s = now + (seconds or self.limits.longest_s)
                entry.standing = entry.standing._replace(pinned_until_s=until_s, pinned_bytes=granted)
            case HintKind.RETAIN_UNTIL:
                entry.standing = s._replace(retained_until_s=now + seconds)
            case _:
                until_s = max(s.retained_until_s, now + (seconds or self.limits.longest_s))
                entry.standing = s._replace(shared=True, retained_until_s=until_s)

    def _let_go(self, session: str, entry: _Entry, now: float) -> None:
        s = entry.standing
        if s.returns_s and s.protected_until_s <= now:
            self.returns[Return.NEVER] += 1
            self._unwant(session)
            entry.standing = entry.standing._replace(returns_s=0.0, protected_until_s=0.0)
        if s.pinned_until_s and s.pinned_until_s <= now:
            self._unpin(entry)

    def _close_if_over(self, session: str, entry: _Entry, now: float) -> None:
        ends_s = entry.ends_s(now)
        if ends_s:
            self._ends.set(session, min(ends_s))
            return
        self._ends.cancel(session)
        self._unwant(session)
        self._unpin(entry)
        del self._entries[session]

    def _want(self, session: str, from_s: float) -> None:
        self._startable.pop(session, None)
        self._starts.set(session, from_s)

    def _unwant(self, session: str) -> None:
        self._starts.cancel(session)
        self._startable.pop(session, None)

    def _unpin(self, entry: _Entry) -> None:
        s = entry.standing
        if s.pinned_bytes:
            self._pinned[entry.client] -= s.pinned_bytes
            if not self._pinned[entry.client]:
                del self._pinned[entry.client]
        entry.standing = s._replace(pinned_until_s=0.0, pinned_bytes=0)
