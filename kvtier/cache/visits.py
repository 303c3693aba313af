"""Requests as storage calls show them: a question, perhaps asked in parts, then loads, then stores.

Engines with a storage interface (SGLang's HiCache) name neither request nor session. A visit begins with a question
("which of these blocks do you have?"), grows with every question that goes on where it ended, and settles when the
blocks it lacked are stored, when all it asked for was loaded, or after `SETTLE_S`. Only then do policies hear of it,
once: a question repeated meanwhile, as SGLang does while a request waits, is the same visit.

Tokens are counted when a visit settles: those loaded, by tier, and the rest by the one reason each had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.index.tree import PrefixTree
from kvtier.model.keys import chain_length
from kvtier.model.request import MissReason, Outcome, RequestContext
from kvtier.observe.metrics import Recorder
from kvtier.predict.forecast import Forecast

SETTLE_S = 30.0


@dataclass(slots=True, eq=False)
class Question:
    """One call's worth of blocks: `blocks` asked, the first `offered` promised, reasons for the others."""

    keys: bytes
    offered: int
    reasons: list[MissReason]
    promise: list[Lease] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    failure: MissReason | None = None

    @property
    def blocks(self) -> int:
        """Blocks asked for."""
        return chain_length(self.keys)

    def let_go(self) -> None:
        """Release what was promised."""
        for lease in self.promise:
            lease.release()
        self.promise.clear()


@dataclass(slots=True, eq=False)
class Visit:
    """Everything one request has asked so far. `chains` are the tree paths of its blocks: one, or several where the
    engine does not say what comes before a block (docs/sglang.md)."""

    asked_s: float
    chains: list[bytes]
    questions: list[Question]


class Visits:
    """Open visits of one cache, by the last key asked for. One writer."""

    def __init__(
        self, tree: PrefixTree, levels: Sequence[Level], recorder: Recorder, block_tokens: int, forecast: Forecast
    ) -> None:
        self._forecast = forecast
        self._tree = tree
        self._levels = levels
        self._recorder = recorder
        self._block_tokens = block_tokens
        self._open: OrderedDict[bytes, Visit] = OrderedDict()
        self._of_question: dict[bytes, Question] = {}
        self._settled = 0

    @property
    def open(self) -> int:
        """Visits not settled."""
        return len(self._open)

    def asked(self, question: Question, chains: list[bytes], before: bytes, now: float) -> None:
        """A question was answered. `before` is the key of the block before the first one asked for, if known."""
        first, last = question.keys[:32], question.keys[-32:]
        again = self._open.pop(last, None)
        visit = again or self._open.pop(before, None) or Visit(now, [], [])
        if again is not None:
            for old in [q for q in again.questions if q.keys[:32] == first]:
                self._drop(old)
                again.questions.remove(old)
        visit.chains = [c for c in visit.chains if not any(new.startswith(c) for new in chains)] + chains
        visit.questions.append(question)
        self._of_question[first] = question
        self._open[last] = visit

    def take(self, first_key: bytes) -> None:
        """The engine comes for what was promised from `first_key` on: the promise is kept, or not, from here."""
        question = self._of_question.get(first_key)
        if question is not None:
            question.let_go()

    def loaded(self, first_key: bytes, sources: list[str], failure: MissReason | None, now: float) -> None:
        """The engine loaded blocks from `first_key` on: `sources` says from where, `failure` why not all of them came.
        A visit that lacks nothing ends here."""
        question = self._of_question.get(first_key)
        if question is None or question.sources:  # asked by someone else meanwhile, who was counted
            for source in sources:
                self._recorder.add("kvtier_tokens", self._block_tokens, source)
            return
        question.sources = sources[: question.offered]
        question.failure = failure
        for last, visit in self._open.items():
            if question in visit.questions:
                if all(len(q.sources) == q.blocks for q in visit.questions):
                    self._settle(last, now)
                return

    def stored(self, keys: Sequence[bytes], before: bytes, chain: bytes, new: bool, now: float) -> None:
        """Blocks were stored: whoever asked for them ends here. Stores nobody asked for are a visit of their own if
        any block is `new` to the cache."""
        found = [key for key in (before, *keys) if key in self._open]
        for key in found:
            self._open[key].chains.append(chain)
            self._settle(key, now)
        if new and not found:
            self._tell(chain, now)

    def expire(self, now: float) -> None:
        """Settle what has been open for too long."""
        while self._open:
            last, visit = next(iter(self._open.items()))
            if now - visit.asked_s < SETTLE_S:
                return
            self._settle(last, now)

    def settle_all(self, now: float) -> None:
        """Settle everything: the cache closes or is cleared."""
        for last in list(self._open):
            self._settle(last, now)

    def _settle(self, last: bytes, now: float) -> None:
        visit = self._open.pop(last)
        for question in visit.questions:
            self._count(question)
            self._drop(question)
        longest = [c for c in visit.chains if not any(o != c and o.startswith(c) for o in visit.chains)]
        for chain in dict.fromkeys(longest):
            self._tell(chain, now)

    def _drop(self, question: Question) -> None:
        question.let_go()
        if self._of_question.get(question.keys[:32]) is question:
            del self._of_question[question.keys[:32]]

    def _count(self, question: Question) -> None:
        """Give every token of a question its source or its reason."""
        size, recorder = self._block_tokens, self._recorder
        loaded = len(question.sources)
        for source in question.sources:
            recorder.add("kvtier_tokens", size, source)
        missed = question.blocks - loaded
        recorder.add("kvtier_tokens", missed * size, "recompute")
        for i in range(loaded, question.blocks):
            reason = question.reasons[i - question.offered] if i >= question.offered else MissReason.NOT_TAKEN
            if i < question.offered and question.failure is not None:
                reason = question.failure
            recorder.add("kvtier_miss_tokens", size, reason.value)

    def _tell(self, chain: bytes, now: float) -> None:
        """One visit of this path, to every policy."""
        path = self._tree.insert(chain)
        if not path:
            return
        self._settled += 1
        tokens = chain_length(chain) * self._block_tokens
        context = RequestContext(request_id=f"visit-{self._settled}", arrival_s=now, prompt_tokens=tokens)
        outcome = Outcome(finished_s=now)
        self._forecast.on_arrival(path, context, now)
        self._forecast.on_finish(path, context, outcome, now)
        for level in self._levels:
            level.policy.on_arrival(path, context, now)
            level.policy.on_finish(path, context, outcome, now)
        self._recorder.add("kvtier_requests", 1, outcome.stop_reason.name.lower())
