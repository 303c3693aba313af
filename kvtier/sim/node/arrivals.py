"""When requests come: sessions that wait for their answer before they ask again, or a log with arrival times.

A session's next request comes its recorded pause after the end of the one before, so a slow node is asked less (closed
loop). Where a trace names no sessions, requests come when they came (open loop). `load` compresses what can be: the
starts of sessions, or the arrival times; pauses stay as recorded.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from kvtier.index.tree import PrefixTree
from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.conversations import conversations
from kvtier.sim.node.hardware import Compute
from kvtier.sim.traces import TRACE_KEY_BYTES, TraceRequest

BUSY_SHARE = 0.6
HELD_SHARE = 0.4
_COARSE_S = 0.5


class Session:
    """Requests of one conversation, in order. `pauses_s[i]` passes before request i (closed loop); `at_s[i]` is when it
    comes (open loop; for a closed one only the first counts)."""

    __slots__ = ("at_s", "closed", "name", "pauses_s", "requests")

    def __init__(self, name: str, closed: bool) -> None:
        self.name = name
        self.closed = closed
        self.requests: list[TraceRequest] = []
        self.pauses_s: list[float] = []
        self.at_s: list[float] = []


def plan(requests: Sequence[TraceRequest], load: float, seed: int) -> list[Session]:
    """The sessions of a trace, requests in order of arrival."""
    if not requests:
        return []
    closed = all(request.context.session_id for request in requests)
    numbers = conversations(requests, CompiledTrace(requests))
    sessions = [Session(str(number), closed) for number in range(max(numbers) + 1)]
    origin = requests[0].arrival_s
    drawn = random.Random(f"arrivals {seed}")
    quantum = 0.0 if closed else coarseness_s([request.arrival_s for request in requests])
    for number, request in zip(numbers, requests, strict=True):
        session = sessions[number]
        pause = 0.0
        if session.requests:
            before = session.requests[-1]
            pause = max(0.0, request.arrival_s - before.arrival_s - before.service_s)
        session.requests.append(request)
        session.pauses_s.append(pause)
        # A clock that ticks every few seconds would make crowds that were never there.
        session.at_s.append(max(0.0, (request.arrival_s - origin) / load + drawn.uniform(-quantum, quantum)))
    return sessions


def coarseness_s(times_s: Sequence[float]) -> float:
    """The tick of a coarse clock: the smallest step between arrivals, if it is long and nearly all steps are multiples
    of it; else 0."""
    steps = [b - a for a, b in itertools.pairwise(times_s) if b - a > 1e-6]
    if len(steps) < 10:
        return 0.0
    tick = min(steps)
    whole = sum(1 for step in steps if abs(step / tick - round(step / tick)) < 0.01)
    return tick if tick >= _COARSE_S and whole >= 0.9 * len(steps) else 0.0


def reference_load(
    requests: Sequence[TraceRequest], compute: Compute, hbm_blocks: int, block_tokens: int, recorded: bool
) -> float:
    """The load at which a node is busy and not yet overloaded: an infinite cache would leave its GPU 60 % of the time
    to prefill, or running requests would hold 40 % of HBM, whichever comes first. Recorded arrival times are never
    compressed for it.

    From about there on, the wait for room decides over times to the first token, and no placement touches it.
    """
    tree = PrefixTree(key_bytes=TRACE_KEY_BYTES)
    gpu_s = held_block_s = 0.0
    for request in requests:
        known = tree.walk(request.chain).blocks
        tree.insert(request.chain)
        tokens = max(request.context.prompt_tokens, request.blocks * block_tokens)
        prefill_s = compute.prefill_s(min(known * block_tokens, tokens - 1), tokens)
        output = request.outcome.output_tokens
        gpu_s += prefill_s
        held_block_s += (request.blocks + output / block_tokens) * (prefill_s + output / compute.decode_tokens_per_s)
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0.0:
        return 1.0
    load = span_s * min(BUSY_SHARE / gpu_s, HELD_SHARE * hbm_blocks / held_block_s)
    return min(load, 1.0) if recorded else load
