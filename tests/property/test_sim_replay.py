"""What must hold for every policy on every stream of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.experiment import known_policies, online_policy
from kvtier.sim.lru_curve import LRUCurve
from kvtier.sim.replay import Replay, replay
from kvtier.sim.rivals import AgedLFU, Belady, ExactEMA
from kvtier.sim.traces.records import TraceRequest
from tests.sim.streams import blocks_of, stream

ONLINE = [name for name in known_policies() if name != "belady"]

# Three contents a position: prompts share prefixes, diverge, return, and are prefixes of each other.
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=40)
capacities = st.integers(1, 25)


def best(requests: Sequence[TraceRequest], capacity: int) -> int:
    future = CompiledTrace(requests)
    return replay(requests, lambda view: Belady(view, future), capacity, tree=future.tree).hit_blocks


@pytest.mark.parametrize("policy", ONLINE)
@settings(max_examples=30)
@given(prompts=prompts, capacity=capacities)
def test_within_capacity_leaf_first_and_never_above_the_bound(
    policy: str, prompts: list[list[int]], capacity: int
) -> None:
    requests = stream(prompts)
    run = Replay(online_policy(policy), capacity)
    for each in requests:
        hits = run.step(each)
        assert 0 <= hits <= each.blocks
        assert run.tier.resident_rows <= capacity
        run.tier.check_integrity()
        run.tree.check_integrity()
    result = run.result()
    assert result.hit_blocks <= best(requests, capacity)
    admitted = result.blocks - result.hit_blocks  # every miss is admitted, and leaves again or is still there
    assert admitted == result.evicted_blocks + run.tier.resident_rows


@pytest.mark.parametrize("policy", ONLINE)
@settings(max_examples=20)
@given(prompts=prompts, capacity=capacities, data=st.data())
def test_one_call_names_as_many_victims_as_asked_for(
    policy: str, prompts: list[list[int]], capacity: int, data: st.DataObject
) -> None:
    run = Replay(online_policy(policy), capacity)
    for each in stream(prompts):
        run.step(each)
    held = run.tier.resident_rows
    rows = data.draw(st.integers(1, held))
    for victim in run.policy.victims(rows, run.clock.now()):
        run.tier.evict(victim.segment, victim.keep)  # raises unless leaf-first
    assert held - run.tier.resident_rows >= rows
    run.tier.check_integrity()


@pytest.mark.parametrize("policy", ONLINE)
@settings(max_examples=10)
@given(prompts=prompts)
def test_a_tier_with_room_for_all_hits_all_that_was_seen(policy: str, prompts: list[list[int]]) -> None:
    requests = stream(prompts)
    future = CompiledTrace(requests)
    result = replay(requests, online_policy(policy), future.unique_blocks)
    assert (result.hit_blocks, result.evicted_blocks) == (future.blocks - future.unique_blocks, 0)


@given(prompts=prompts, capacity=capacities)
def test_the_bound_is_prefix_closed_and_grows_with_capacity(prompts: list[list[int]], capacity: int) -> None:
    requests = stream(prompts)
    future = CompiledTrace(requests)
    run = Replay(lambda view: Belady(view, future), capacity, future.tree)
    for each in requests:
        run.step(each)
        assert run.tier.resident_rows <= capacity
        run.tier.check_integrity()
    assert run.result().hit_blocks <= best(requests, capacity + 1)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7),
    capacity=st.integers(1, 4),
)
def test_belady_is_optimal(prompts: list[list[int]], capacity: int) -> None:
    requests = stream(prompts)
    assert best(requests, capacity) == exhaustive(blocks_of(requests), capacity)


def exhaustive(chains: Sequence[Sequence[int]], capacity: int) -> int:
    """The most hits any prefix-closed cache can have, by trying every one."""
    parent = {block: before for chain in chains for before, block in zip([None, *chain], chain, strict=False)}
    reachable = {frozenset[int](): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for held, score in reachable.items():
            hits = next((i for i, block in enumerate(chain) if block not in held), len(chain))
            offered = held | set(chain)
            for size in range(min(capacity, len(offered)) + 1):
                for kept in map(frozenset, combinations(sorted(offered), size)):
                    if all(parent[block] is None or parent[block] in kept for block in kept):
                        after[kept] = max(after.get(kept, -1), score + hits)
        reachable = after
    return max(reachable.values())


@given(prompts=prompts)
def test_the_lru_curve_is_the_replay_at_every_capacity(prompts: list[list[int]]) -> None:
    requests = stream(prompts)
    curve = LRUCurve(CompiledTrace(requests))
    for capacity in range(1, 30):
        assert curve.hit_blocks(capacity) == replay(requests, online_policy("lru"), capacity).hit_blocks


@given(prompts=prompts, capacity=capacities)
def test_lru_is_the_textbook_one_on_blocks(prompts: list[list[int]], capacity: int) -> None:
    requests = stream(prompts)
    recent: list[int] = []  # most recent first
    hits = 0
    for chain in blocks_of(requests):
        hits += sum(1 for block in chain if block in recent)
        recent = [*chain, *(block for block in recent if block not in chain)][:capacity]
    assert replay(requests, online_policy("lru"), capacity).hit_blocks == hits


single_blocks = st.lists(st.integers(0, 12), min_size=1, max_size=120)


@given(ids=single_blocks, capacity=st.integers(1, 10))
def test_aged_lfu_is_the_textbook_one_on_single_blocks(ids: list[int], capacity: int) -> None:
    age, hits = 0, 0
    uses: dict[int, int] = {}
    key: dict[int, tuple[int, int]] = {}
    for clock, block in enumerate(ids):
        hits += block in uses
        uses[block] = uses.get(block, 0) + 1
        key[block] = (uses[block] + age, clock)
        if len(uses) > capacity:
            victim = min(uses, key=key.__getitem__)
            age = max(age, key[victim][0])
            del uses[victim]
    assert replay(stream([[block] for block in ids]), AgedLFU, capacity).hit_blocks == hits


@given(ids=single_blocks, capacity=st.integers(1, 10), alpha=st.sampled_from([0.05, 0.2, 0.7]))
def test_ema_evicts_the_argmin_of_the_decayed_scores(ids: list[int], capacity: int, alpha: float) -> None:
    run = Replay(partial(ExactEMA, alpha=alpha), capacity)
    score: dict[int, float] = {}
    for number, each in enumerate(stream([[block] for block in ids])):
        before = {segment.id for segment in run.tier.leaves()}
        run.step(each)
        (used,) = run.tree.walk(each.chain).path
        score = {segment_id: value * (1 - alpha) for segment_id, value in score.items()}
        score[used.id] = score.get(used.id, 0.0) + alpha
        held = {segment.id for segment in run.tier.leaves()}
        for gone in (before | {used.id}) - held:
            lowest = min(score[segment_id] for segment_id in before | {used.id})
            assert math.isclose(score[gone], lowest, rel_tol=1e-9), f"wrong victim at request {number}"


@settings(max_examples=20)
@given(prompts=prompts, capacity=capacities, policy=st.sampled_from(known_policies()))
def test_the_same_replay_gives_the_same_counts(prompts: list[list[int]], capacity: int, policy: str) -> None:
    def counts() -> tuple[int, int]:
        requests = stream(prompts)
        if policy == "belady":
            return best(requests, capacity), 0
        result = replay(requests, online_policy(policy), capacity)
        return result.hit_blocks, result.evicted_blocks

    assert counts() == counts()
