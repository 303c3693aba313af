"""A request trace, whatever file it came from: what was asked, when, and how it ended.

A request names its prompt as a chain of packed 8-byte block ids. Equal ids under equal prefixes are equal blocks, so a
chain goes into `PrefixTree(key_bytes=TRACE_KEY_BYTES)` as it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from kvtier.model.request import Outcome, RequestContext

TRACE_KEY_BYTES = 8
DAY_S = 86_400.0


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request with at least one whole prompt block.

    `context.arrival_s` is when it came; `service_s` how long the recorded server took (0 if not recorded). The replay
    treats a request as instantaneous: `outcome.finished_s` equals the arrival.
    """

    chain: bytes
    context: RequestContext
    outcome: Outcome
    service_s: float = 0.0

    @property
    def blocks(self) -> int:
        """Whole prompt blocks."""
        return len(self.chain) // TRACE_KEY_BYTES

    @property
    def arrival_s(self) -> float:
        return self.context.arrival_s

    def shifted(self, seconds: float) -> TraceRequest:
        """The same request, `seconds` later."""
        at_s = self.context.arrival_s + seconds
        replace = msgspec.structs.replace
        return replace(
            self, context=replace(self.context, arrival_s=at_s), outcome=replace(self.outcome, finished_s=at_s)
        )


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Requests recorded together, times relative to the session's start unless `start_s` is known."""

    requests: tuple[TraceRequest, ...]
    start_s: float | None = None


class Trace:
    """What a reader returns. Immutable; `requests` may be called for any number of seeds."""

    def __init__(self, name: str, format_name: str, block_tokens: int, sessions: Sequence[Session]) -> None:
        self.name = name
        self.format_name = format_name
        self.block_tokens = block_tokens
        self._sessions = tuple(sessions)

    @property
    def seeded(self) -> bool:
        """Whether arrival times depend on the seed: some session has no recorded start."""
        return any(session.start_s is None for session in self._sessions)

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        """Every request in order of arrival; equal times keep the order of the file.

        Sessions without a recorded start begin at moments drawn uniformly from 24 hours by `seed`, and the log ends
        with those 24 hours: what a session would have asked after that is not part of the trace.
        """
        drawn = random.Random(seed)
        merged: list[TraceRequest] = []
        for session in self._sessions:
            if session.start_s is None:
                start_s = drawn.uniform(0.0, DAY_S)
                merged.extend(
                    request.shifted(start_s) for request in session.requests if start_s + request.arrival_s < DAY_S
                )
            elif session.start_s == 0.0:
                merged.extend(session.requests)
            else:
                merged.extend(request.shifted(session.start_s) for request in session.requests)
        merged.sort(key=lambda request: request.context.arrival_s)
        return merged


def total_blocks(requests: Sequence[TraceRequest]) -> int:
    """Block accesses in all."""
    return sum(request.blocks for request in requests)


def unique_blocks(requests: Sequence[TraceRequest]) -> int:
    """The footprint: distinct blocks. Ids must be unique over the trace, as every reader makes them."""
    if not requests:
        return 0
    seen = np.zeros(0, dtype=np.uint64)
    pending: list[bytes] = []
    pending_bytes = 0
    for request in requests:
        pending.append(request.chain)
        pending_bytes += len(request.chain)
        if pending_bytes > 1 << 23:
            seen = np.union1d(seen, np.frombuffer(b"".join(pending), dtype=np.uint64))
            pending, pending_bytes = [], 0
    return int(np.union1d(seen, np.frombuffer(b"".join(pending), dtype=np.uint64)).size)
