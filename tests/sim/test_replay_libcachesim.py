"""The simulator against libcachesim, an independent implementation of the textbook policies.

libcachesim knows single objects. A prompt is put to it as ours is: first every block is looked up, then all are used,
tail first, which is the order of recency that leaf-first LRU has. Policies with state beyond recency are compared where
both define the same thing: on prompts of one block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.experiment import online_policy
from kvtier.sim.replay import replay
from kvtier.sim.rivals import Belady
from kvtier.sim.traces.records import TraceRequest
from kvtier.sim.workloads import AgentWorkload, ChatWorkload, Workload
from kvtier.sim.workloads.writer import Zipf
from tests.sim.streams import blocks_of, stream

libcachesim = pytest.importorskip("libcachesim")

POINTS_0_3 = 0.003


def textbook_hit_rate(policy: str, requests: Sequence[TraceRequest], capacity: int) -> float:
    """The hit rate of libcachesim's `policy` on the blocks of these requests, objects of size one."""
    prompts = [list(reversed(chain)) for chain in blocks_of(requests)]
    stream_of_blocks = [block for prompt in prompts for block in prompt]
    following, seen = [2**62] * len(stream_of_blocks), dict[int, int]()
    for at in range(len(stream_of_blocks) - 1, -1, -1):
        following[at] = seen.get(stream_of_blocks[at], 2**62)
        seen[stream_of_blocks[at]] = at
    cache: Any = getattr(libcachesim, policy)(capacity, hashpower=14)
    hits, at = 0, 0
    for prompt in prompts:
        uses = []
        for block in prompt:
            uses.append(libcachesim.Request(obj_id=block, clock_time=at, next_access_vtime=following[at]))
            at += 1
        hits += sum(cache.find(use, False) is not None for use in uses)
        for use in uses:
            cache.get(use)
    return hits / at


def our_hit_rate(policy: str, requests: Sequence[TraceRequest], capacity: int) -> float:
    if policy == "Belady":
        future = CompiledTrace(requests)
        return replay(requests, partial(Belady, future=future), capacity, tree=future.tree).hit_rate
    return replay(requests, online_policy(policy.lower()), capacity).hit_rate


@pytest.mark.parametrize("policy", ["LRU", "Belady"])
@pytest.mark.parametrize(
    ("workload", "capacities"),
    [
        (AgentWorkload(sessions=30), (150, 400, 1000)),
        (ChatWorkload(sessions=250), (100, 300, 800)),
    ],
    ids=["agent", "chat"],
)
def test_prompts_agree(policy: str, workload: Workload, capacities: tuple[int, ...]) -> None:
    requests = workload.requests(seed=3)
    for capacity in capacities:
        theirs, ours = textbook_hit_rate(policy, requests, capacity), our_hit_rate(policy, requests, capacity)
        assert 0.05 < theirs < 0.99, "a comparison where everything or nothing hits shows nothing"
        # libcachesim's Belady must insert what it misses; ours may decline, which can only help.
        assert ours == pytest.approx(theirs, abs=1e-9 if policy == "LRU" else POINTS_0_3)
        assert policy == "LRU" or ours >= theirs


def drifting(seed: int, accesses: int, objects: int) -> list[int]:
    """Zipf popularity whose ranks move slowly, with scans in between: hard on recency and on frequency alike."""
    source, zipf, out = random.Random(seed), Zipf(objects, 0.9), list[int]()
    while len(out) < accesses:
        shift = len(out) // 500
        if source.random() < 0.01:
            start = source.randrange(10**6)
            out.extend(10**7 + start + i for i in range(60))
        out.append((zipf.pick(source) * 7919 + shift) % (objects * 2))
    return out


@pytest.mark.parametrize("capacity", [40, 200, 600])
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [("LRU", 1e-9), ("ARC", 1e-9), ("S3FIFO", POINTS_0_3), ("Belady", POINTS_0_3)],
)
def test_single_blocks_agree(policy: str, tolerance: float, capacity: int) -> None:
    ids = drifting(seed=5, accesses=15_000, objects=2_000)
    requests = stream([[block] for block in ids])
    theirs = textbook_hit_rate(policy, requests, capacity)
    assert 0.05 < theirs < 0.9
    assert our_hit_rate(policy, requests, capacity) == pytest.approx(theirs, abs=tolerance)
