"""Replay a trace against one policy at one capacity, in one pass over virtual time.

What happens at a request, all at its arrival: its longest resident leading run is hit; the policy hears of the arrival;
the whole prompt becomes resident, over capacity if need be; the policy hears of the end; then its victims leave,
leaf-first, until the tier is within capacity again. The tail just inserted competes with everything else, so a policy
may decline to keep it (implicit bypass). No policy code lives here: production drives the same objects.

Work per request is per segment of its path, never per block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree
from kvtier.place.policy import EvictionPolicy, TierView
from kvtier.sim.tier import SimTier
from kvtier.sim.traces.records import TRACE_KEY_BYTES, TraceRequest
from kvtier.testing.clock import VirtualClock

PROGRESS_EVERY = 256  # requests

Factory = Callable[[TierView], EvictionPolicy]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one replay. `policy_s` is the CPU time of the policy's own calls: load by others does not count."""

    capacity_blocks: int
    requests: int
    blocks: int
    hit_blocks: int
    evicted_blocks: int
    policy_s: float

    @property
    def hit_rate(self) -> float:
        """Share of block accesses that hit."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def policy_us_per_request(self) -> float:
        return self.policy_s * 1e6 / self.requests if self.requests else 0.0


class Replay:
    """A tier, a policy and a clock. Not thread-safe. `tree` may be given to replay over a structure built before."""

    def __init__(self, factory: Factory, capacity_blocks: int, tree: PrefixTree | None = None) -> None:
        if capacity_blocks <= 0:
            raise ValueError("a tier has room for at least one block")
        self.clock = VirtualClock()
        self.tree = tree if tree is not None else PrefixTree(key_bytes=TRACE_KEY_BYTES)
        self.tier = SimTier(self.tree, capacity_blocks)
        self.policy = factory(self.tier)
        self._requests = 0
        self._blocks = 0
        self._hit_blocks = 0
        self._evicted_blocks = 0
        self._policy_s = 0.0

    def step(self, request: TraceRequest) -> int:
        """Serve one request and return its hit blocks. Requests come in order of arrival. Raises IntegrityError if
        the policy breaks its contract."""
        self.clock.advance_to(request.context.arrival_s)
        now, policy = self.clock.now(), self.policy
        path = self.tree.insert(request.chain)
        hits = self.tier.leading(path)
        begin = time.thread_time()
        policy.on_arrival(path, request.context, now)
        spent = time.thread_time() - begin
        grown = self.tier.admit(path)
        begin = time.thread_time()
        for segment, old_extent in grown:
            policy.on_resident(segment, old_extent, now)
        policy.on_finish(path, request.context, request.outcome, now)
        self._policy_s += spent + time.thread_time() - begin
        self._make_room(now)
        self._requests += 1
        self._blocks += request.blocks
        self._hit_blocks += hits
        return hits

    def result(self) -> ReplayResult:
        """Counts so far."""
        return ReplayResult(
            capacity_blocks=self.tier.capacity_rows,
            requests=self._requests,
            blocks=self._blocks,
            hit_blocks=self._hit_blocks,
            evicted_blocks=self._evicted_blocks,
            policy_s=self._policy_s,
        )

    def _make_room(self, now: float) -> None:
        tier, policy = self.tier, self.policy
        excess = tier.resident_rows - tier.capacity_rows
        while excess > 0:
            begin = time.thread_time()
            victims = policy.victims(excess, now)
            self._policy_s += time.thread_time() - begin
            if not victims:
                raise IntegrityError(f"policy {policy.name} names no victims while {excess} blocks must go")
            gone = [(victim.segment, tier.evict(victim.segment, victim.keep), victim.keep) for victim in victims]
            begin = time.thread_time()
            for segment, old_extent, _ in gone:
                policy.on_evicted(segment, old_extent, now)
            self._policy_s += time.thread_time() - begin
            self._evicted_blocks += sum(old_extent - keep for _, old_extent, keep in gone)
            excess = tier.resident_rows - tier.capacity_rows


def replay(
    requests: Iterable[TraceRequest],
    factory: Factory,
    capacity_blocks: int,
    *,
    tree: PrefixTree | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay `requests` and return the counts. `on_progress` is told now and then how many more were served."""
    run, served = Replay(factory, capacity_blocks, tree), 0
    for request in requests:
        run.step(request)
        served += 1
        if on_progress is not None and served == PROGRESS_EVERY:
            on_progress(served)
            served = 0
    if on_progress is not None:
        on_progress(served)
    return run.result()
