"""Hints in the simulator: who announces what, how wrong it is, and what the node does about it.

The announcer knows the trace; its errors are drawn from a seed: hints that are missing, that announce a return which
does not come, that name the wrong time. What stands of what was announced is decided by `place.hints.HintBook`, as in
production; the node protects the session's blocks and brings up what is missing, behind all demand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.errors import ConfigError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import StopReason
from kvtier.place.hints import Hint, HintBook, HintKind, HintOutcome
from kvtier.sim.node.arrivals import Session
from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.flight import Load
from kvtier.sim.node.links import Priority
from kvtier.sim.node.loads import Loader
from kvtier.sim.node.speculation import Speculation
from kvtier.sim.node.tier import NodeTier

_Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
_PROTECTED_SHARE = 0.5  # of a tier, at most


class Announcer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients say. A return is announced `lead_s` before it comes, or when the response before it ends if that is
    later. `missing` of the returns are not announced, `false_share` of all hints announce none, and the time named is
    wrong by up to `mistimed` of itself. With `tools_only` nobody announces what a person does: only returns after a
    tool call, in traces that know of them."""

    lead_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 3.0
    missing: _Share = 0.0
    false_share: _Share = 0.0
    mistimed: _Share = 0.0
    tools_only: bool = True


def parse_announcer(text: str) -> Announcer:
    """From e.g. `lead_s=3,missing=0.3`. Raises ConfigError."""
    given = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    try:
        return msgspec.convert(given, Announcer, strict=False)
    except msgspec.ValidationError as error:
        fields = ", ".join(Announcer.__struct_fields__)
        raise ConfigError(f"hints {text!r}: {str(error).replace('`', '')}; there are {fields}") from error


@dataclass(slots=True)
class _Known:
    """A session's latest prompt, and what of it is protected for its sake."""

    session: Session
    chain: bytes
    protects: bool = False


class Hinted:
    """Announces returns, keeps the book, protects and brings up. `allows` says whether prefetch is wanted now."""

    def __init__(
        self,
        loop: EventLoop,
        tree: PrefixTree,
        tiers: tuple[NodeTier, NodeTier, NodeTier],
        loader: Loader,
        speculation: Speculation,
        announcer: Announcer,
        *,
        block_bytes: int,
        seed: int,
        tools_known: bool,
    ) -> None:
        self.book = HintBook()
        self.allows: Callable[[], bool] = lambda: True
        self.hold: Callable[[Sequence[Segment], Sequence[Load], bytes], None]
        self.outcomes = dict.fromkeys(HintOutcome, 0)
        self._loop = loop
        self._tree = tree
        self._hbm, self._dram, self._nvme = tiers
        self._loader = loader
        self._speculation = speculation
        self._announcer = announcer
        self._block_bytes = block_bytes
        self._tools_only = announcer.tools_only and tools_known
        self._random = random.Random(f"hints {seed}")
        self._known: dict[str, _Known] = {}
        self._names: list[str] = []
        self._wanted: dict[str, None] = {}  # due, and not back yet

    def finished(self, name: str, session: Session, position: int, chain: bytes) -> None:
        """A response has ended: somebody may know when the session is back."""
        if name not in self._known:
            self._names.append(name)
        self._release(name)  # a false hint may have come while it ran
        self._known[name] = _Known(session, chain)
        now, announcer, drawn = self._loop.now, self._announcer, self._random
        following = position + 1
        if following >= len(session.requests):
            return
        reason = session.requests[position].outcome.stop_reason
        if self._tools_only and reason is not StopReason.TOOL_USE:
            return
        returns_s = now + session.pauses_s[following] if session.closed else session.at_s[following]
        lucky, factor = drawn.random(), 1.0 + drawn.uniform(-announcer.mistimed, announcer.mistimed)
        said_s = max(now, returns_s - announcer.lead_s)
        if lucky >= announcer.missing and returns_s >= now:
            self._loop.at(said_s, lambda: self._announce(name, (returns_s - said_s) * factor))
        # So many false ones for each true one that they are the share asked for of all.
        if drawn.random() < announcer.false_share / (1.0 - announcer.false_share) * (1.0 - announcer.missing):
            other = drawn.choice(self._names)
            self._loop.at(said_s, lambda: self._announce(other, announcer.lead_s * factor))

    def arrived(self, name: str) -> None:
        """The session is back: what was said of its return is settled."""
        self.book.arrived(name, self._loop.now)
        self._release(name)

    def _announce(self, name: str, seconds: float) -> None:
        known, now = self._known.get(name), self._loop.now
        if known is None:
            return
        path = self._tree.insert(known.chain)
        n_bytes = len(known.chain) // self._tree.key_bytes * self._block_bytes
        hint = Hint(session=name, kind=HintKind.RETURNS_IN, seconds=seconds)
        answer = self.book.offer(hint, now, n_bytes)
        self.outcomes[answer.outcome] += 1
        standing = self.book.standing(name, now)
        if answer.outcome is HintOutcome.REJECTED or not standing.keeps_in_memory(now):
            return
        self._protect(known, path)
        self._loop.at(standing.protected_until_s + 1e-6, self._expire)
        self._loop.at(standing.returns_s - self._lead_s(name), self._bring)

    def _bring(self) -> None:
        """Whoever is due: what is missing comes up."""
        due = self.book.due(self._loop.now, lambda session: self._lead_s(session) + 1e-6)
        self._wanted.update(dict.fromkeys(due))
        self.resume()

    def resume(self) -> None:
        """Protect and bring up what is due and not in HBM, the soonest back first: there may be room now that was not
        there before, and what had been brought may have had to give way."""
        if not self._wanted or not self.allows():
            return
        now = self._loop.now
        for name in [name for name in self.book.by_urgency(now) if name in self._wanted]:
            known = self._known[name]
            path = self._tree.insert(known.chain)
            self._protect(known, path)
            if not known.protects:
                continue
            in_hbm = self._hbm.leading(path)
            found = max(in_hbm, self._dram.leading(path), self._nvme.leading(path))
            room = self._hbm.make_room(found - in_hbm, now) if found > in_hbm else 0
            if room:
                loads = self._loader.to_hbm(path, in_hbm, in_hbm + room, Priority.SPECULATIVE)
                self._speculation.moved(loads)
                self.hold(path, loads, known.chain)

    def _lead_s(self, name: str) -> float:
        """How long before the return its blocks must begin to move: twice what it takes, and a second."""
        known = self._known.get(name)
        if known is None:
            return 0.0
        path = self._tree.insert(known.chain)
        in_hbm, in_dram, in_nvme = (tier.leading(path) for tier in (self._hbm, self._dram, self._nvme))
        return 1.0 + 2.0 * self._loader.estimate_s(in_hbm, max(in_hbm, in_dram), max(in_hbm, in_dram, in_nvme))

    def _expire(self) -> None:
        for name in self.book.expire(self._loop.now):
            if not self.book.standing(name, self._loop.now).keeps_in_memory(self._loop.now):
                self._release(name)

    def _protect(self, known: _Known, path: Sequence[Segment]) -> None:
        if not known.protects and all(
            tier.protected + tier.unprotected_blocks(path) <= _PROTECTED_SHARE * tier.capacity_rows
            for tier in (self._hbm, self._dram)
        ):
            known.protects = True
            self._hbm.protect(path)
            self._dram.protect(path)

    def _release(self, name: str) -> None:
        self._wanted.pop(name, None)
        known = self._known.get(name)
        if known is not None and known.protects:
            known.protects = False
            path = self._tree.insert(known.chain)
            self._hbm.unprotect(path)
            self._dram.unprotect(path)
