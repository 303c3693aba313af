"""A stream of requests as coding agents and passers-by send it, small enough for a device pool of 40 blocks.

Agents come back after a tool ran (soon, and nearly always) or after a person answered (late, and not always), each time
with all they sent before, what the model said, and a little more. In between, requests come that never come again. The
gaps are those of the coding-agent sessions in `docs/forecast.md`: a tool takes 16 s in the median, a person 200 s.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

TOOL_GAP_S, PERSON_GAP_S = 16.0, 200.0
_TOOL_TURNS = (2, 7)
_LIMIT_TOKENS = 12 * 32


@dataclass(slots=True)
class Session:
    """One agent: what it has sent and got back so far."""

    tokens: list[int]
    tool_turns: int
    single: bool = False
    answered: list[int] = field(default_factory=list)


class AgentStream:
    """Requests in order of arrival; `answer` tells the stream what the model said to the last one."""

    def __init__(self, seed: int, requests: int, agents: int = 4, singles: float = 0.45) -> None:
        self._draw = random.Random(seed)
        self._requests = requests
        self._singles = singles
        self._system = self._text(64)
        self._queue: list[tuple[float, int, Session]] = []
        self._count = 0
        self._session: Session | None = None
        for _ in range(agents):
            self._push(self._draw.expovariate(1 / 30.0), self._agent())

    def __iter__(self) -> Iterator[tuple[float, list[int]]]:
        """(seconds, prompt) of every request."""
        now = 0.0
        for _ in range(self._requests):
            if self._draw.random() < self._singles:
                now += self._draw.expovariate(1 / 2.0)
                now = min(now, self._queue[0][0])
                self._session = Session(self._text(self._draw.randrange(96, 257)), 0, single=True)
            else:
                at_s, _, self._session = heapq.heappop(self._queue)
                now = max(now, at_s)
            yield now, list(self._session.tokens)
            if not self._session.single:
                self._go_on(now, self._session)

    def answer(self, tokens: list[int]) -> None:
        """What the model generated for the request just yielded."""
        assert self._session is not None
        self._session.answered = tokens

    def _go_on(self, now: float, session: Session) -> None:
        session.tokens += [*session.answered, *self._text(self._draw.randrange(8, 40))]
        session.tool_turns -= 1
        gap_s = self._draw.lognormvariate(0.0, 0.8)
        if len(session.tokens) > _LIMIT_TOKENS:
            self._push(now + PERSON_GAP_S * gap_s, self._agent())
        elif session.tool_turns > 0:
            self._push(now + TOOL_GAP_S * gap_s, session)
        elif self._draw.random() < 0.66:
            session.tool_turns = self._draw.randint(*_TOOL_TURNS)
            self._push(now + PERSON_GAP_S * gap_s, session)
        else:
            self._push(now + PERSON_GAP_S * gap_s, self._agent())

    def _agent(self) -> Session:
        tokens = [*self._system, *self._text(self._draw.randrange(48, 128))]
        return Session(tokens, self._draw.randint(*_TOOL_TURNS))

    def _push(self, at_s: float, session: Session) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, session))

    def _text(self, length: int) -> list[int]:
        return [self._draw.randrange(256) for _ in range(length)]
