"""Finding what other engines have put into a shared tier (docs/decisions/0005).

The index of one engine knows only what that engine wrote or met. For the blocks of a prompt beyond what it knows, a
shared tier is asked, from threads of its own, so that a remote that hangs holds up neither the engine's thread nor
the mover's. What is there is adopted: the tier's slots become handles of it, and from then on it is a resident block
like any other. Answers of "no" are remembered for a moment, and the tier's breaker hears how long an answer took.

`ask`, `collect` and `adopt` from the thread (or under the lock) that owns the levels.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.cache.level import Level
from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.observe.metrics import Recorder
from kvtier.tiers.protocol import RowId, SharedTier, Slots, is_shared

_THREADS = 2
_MOST_WAITING = 256
_FIRST_BLOCKS = 32
_GROWTH = 4
_NO_FOR_S = 1.0
_NOES_KEPT = 1 << 16

RowOf = Callable[[int, int], RowId]
"""Block and group of a question to the row's identity."""
Publish = Callable[[Level, int, npt.NDArray[np.intp], Slots], None]
"""Level, group, blocks (ascending) and their new slots there: makes them resident."""


@dataclass(slots=True, eq=False)
class Question:
    """Which of blocks [first, stop) a shared level has. `found` holds blocks by group once `ended` is set.

    Of `closed` groups the leading blocks that are there whole are found; of the others every block before that.
    """

    level: Level
    first: int
    stop: int
    closed: Sequence[int]
    others: Sequence[int]
    row_of: RowOf
    publish: Publish
    tag: object = None
    found: dict[int, list[int]] = field(default_factory=dict)
    reach: int = 0
    error: str = ""
    seconds: float = 0.0
    void: bool = False
    late: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class Discovery:
    """Asks the shared ones among `levels`; each level's health decides whether, and hears how it went."""

    def __init__(self, levels: Sequence[Level], clock: Clock, recorder: Recorder) -> None:
        self.levels: list[Level] = []
        self._clock = clock
        self._recorder = recorder
        self._noes: dict[str, OrderedDict[bytes, float]] = {}
        self._queues: dict[str, queue.Queue[Question | None]] = {}
        self._done: deque[Question] = deque()
        self._open: set[Question] = set()
        self._closed = False
        self._nonce = b""
        for level in levels:
            self.attach(level)

    def attach(self, level: Level) -> None:
        """Ask this level, too, from now on, if it is shared."""
        if is_shared(level.tier):
            if self._nonce:
                level.tier.part(self._nonce)  # it was out, or not open yet, when the cache was reset
            self.levels.append(level)
            self._noes[level.name] = OrderedDict()
            waiting = self._queues[level.name] = queue.Queue(_MOST_WAITING)
            for i in range(_THREADS):
                name = f"kvtier-find-{level.name}-{i}"
                threading.Thread(target=self._answer, args=(waiting,), name=name, daemon=True).start()

    def detach(self, level: Level) -> None:
        """Ask this level no more; what it was asked is for nobody."""
        if level in self.levels:
            self.levels.remove(level)
            for question in [question for question in self._open if question.level is level]:
                question.void = True
                self._open.discard(question)
            del self._noes[level.name]
            for question in _end(self._queues.pop(level.name)):
                self._done.append(question)
                question.ended.set()

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited or not yet collected."""
        return bool(self._open)

    def ask(
        self,
        first: int,
        stop: int,
        closed: Sequence[int],
        others: Sequence[int],
        row_of: RowOf,
        publish: Publish,
        tag: object = None,
    ) -> list[Question]:
        """Ask every shared level that answers about blocks [first, stop); returns what was asked. Never blocks."""
        asked: list[Question] = []
        if first >= stop or self._closed:
            return asked
        for level in self.levels:
            if self._said_no(level, row_of(first, 0).key):
                outcome = "known_missing"
            elif not level.health.usable():
                outcome = "tier_down"
            else:
                question = Question(level, first, stop, closed, others, row_of, publish, tag, reach=first)
                try:
                    self._queues[level.name].put_nowait(question)
                except queue.Full:
                    outcome = "busy"
                else:
                    level.health.sent()
                    self._open.add(question)
                    asked.append(question)
                    continue
            self._recorder.add("kvtier_discoveries", 1, level.name, outcome)
        return asked

    def collect(self) -> list[Question]:
        """Adopt what was found since the last call; returns the questions that ended. Never blocks."""
        if not self._done:
            return []
        ended = []
        while self._done:
            question = self._done.popleft()
            self._open.discard(question)
            ended.append(question)
            self._take_in(question)
        return ended

    def gave_up(self, question: Question, *, blamed: bool) -> None:
        """Nobody waits for the answer any longer. What it finds is adopted all the same. `blamed` says that the tier
        had all the time it is given: its breaker hears of it."""
        if not question.late:
            question.late = blamed
            self._recorder.add("kvtier_discoveries", 1, question.level.name, "deadline")
            if blamed:
                question.level.health.asked("discovery_deadline")

    def forget(self) -> None:
        """The cache was reset: what was asked is for nobody, and the tiers are parted from what was written before."""
        for question in self._open:
            question.void = True
        self._nonce = os.urandom(16)
        for level in self.levels:
            assert is_shared(level.tier)
            level.tier.part(self._nonce)
        for noes in self._noes.values():
            noes.clear()

    def close(self) -> None:
        """Ask no more. Threads that hang in a tier are left to the end of the process."""
        self._closed = True
        for waiting in self._queues.values():
            _end(waiting)

    # --- control thread -----------------------------------------------------------------------------------------

    def _said_no(self, level: Level, key: bytes) -> bool:
        until = self._noes[level.name].get(key)
        return until is not None and self._clock.now() < until

    def _take_in(self, question: Question) -> None:
        level, name = question.level, question.level.name
        if question.void:
            return
        if question.error:
            self._recorder.add("kvtier_discoveries", 1, name, question.error)
            if not question.late:
                level.health.asked(question.error)
            return
        if not question.late:
            level.health.asked()
        if question.reach < question.stop:
            noes = self._noes[name]
            noes[question.row_of(question.reach, 0).key] = self._clock.now() + _NO_FOR_S
            while len(noes) > _NOES_KEPT:
                noes.popitem(last=False)
        rows = sum(self._adopt(question, group, blocks) for group, blocks in question.found.items())
        self._recorder.add("kvtier_discovered_rows", rows, name)
        outcome = "all" if question.reach == question.stop else "part" if rows else "none"
        self._recorder.add("kvtier_discoveries", 1, name, outcome)
        self._recorder.observe("kvtier_discovery_seconds", question.seconds)

    def _adopt(self, question: Question, group: int, blocks: list[int]) -> int:
        """Handles for as many leading blocks as there is room for; returns how many."""
        tier = question.level.tier
        assert is_shared(tier)
        while blocks:
            slots = question.level.make_room(len(blocks))
            if slots is not None:
                tier.adopt(slots, [question.row_of(block, group) for block in blocks])
                question.publish(question.level, group, np.array(blocks, np.intp), slots)
                return len(blocks)
            blocks = blocks[: len(blocks) // 2]
        return 0

    # --- threads that ask ---------------------------------------------------------------------------------------

    def _answer(self, waiting: queue.Queue[Question | None]) -> None:
        while (question := waiting.get()) is not None:
            began = time.perf_counter()
            try:
                if not question.void and not self._closed:
                    _search(question)
            except TierError as error:
                question.error = error.reason
            except Exception:  # noqa: BLE001 - thread boundary: a tier that breaks its contract costs misses only
                question.error = "tier_error"
            question.seconds = time.perf_counter() - began
            self._done.append(question)
            question.ended.set()


def _search(question: Question) -> None:
    """Ask in growing parts, so that a long prompt of which nothing is there costs one short question."""
    tier = question.level.tier
    assert is_shared(tier)
    reach, part = question.first, _FIRST_BLOCKS
    while question.closed and reach < question.stop:
        stop = min(question.stop, reach + part)
        there = _ask(tier, question, reach, stop, question.closed).all(axis=1)
        holes = np.flatnonzero(~there)
        reach = reach + int(holes[0]) if holes.size else stop
        if holes.size:
            break
        part *= _GROWTH
    if question.closed:
        question.found = {group: list(range(question.first, reach)) for group in question.closed}
    else:
        reach = question.stop
    if question.others and reach > question.first:
        there = _ask(tier, question, question.first, reach, question.others)
        for column, group in enumerate(question.others):
            question.found[group] = (question.first + np.flatnonzero(there[:, column])).tolist()
        if not question.closed and not there.any():
            reach = question.first
    question.reach = reach


def _ask(tier: SharedTier, question: Question, first: int, stop: int, groups: Sequence[int]) -> npt.NDArray[np.bool_]:
    rows = [question.row_of(block, group) for block in range(first, stop) for group in groups]
    return np.array(tier.exists(rows), np.bool_).reshape(stop - first, len(groups))


def _end(waiting: queue.Queue[Question | None]) -> list[Question]:
    """Let the threads of a queue end; returns what they have not begun. Those that hang in a tier are left to the end
    of the process."""
    left: list[Question] = []
    while True:
        try:
            question = waiting.get_nowait()
        except queue.Empty:
            break
        if question is not None:
            left.append(question)
    for _ in range(_THREADS):
        waiting.put_nowait(None)
    return left
