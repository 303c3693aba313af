"""The victim audit: what a policy names is what a brute-force scan of the least key would name, on random workloads."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import InputType, Outcome, RequestContext, StopReason
from kvtier.place.draw import draw_victims
from kvtier.place.lru import LeafFirstLRU, mirror_of
from kvtier.place.policy import EvictionPolicy, make_policy, policy_names
from kvtier.place.worth import WorthPolicy
from kvtier.sim.tier import SimTier

KeyOf = Callable[[Segment, float], float]


class LeasedTier(SimTier):
    """A tier with some segments partly leased."""

    def __init__(self, tree: PrefixTree, capacity_blocks: int) -> None:
        super().__init__(tree, capacity_blocks)
        self.leased: dict[int, int] = {}

    def evictable_from(self, segment: Segment) -> int:
        return min(self.leased.get(segment.id, 0), self.extent(segment))


class Life:
    """A tier, a policy and random requests whose prompts grow, fork and return."""

    def __init__(self, make: Callable[[SimTier], EvictionPolicy], capacity: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tree = PrefixTree(key_bytes=1)
        self.tier = LeasedTier(self.tree, capacity)
        self.policy = make(self.tier)
        self.now = 0.0
        self.prompts = [bytes([1, 2, 3])]

    def step(self, check: Callable[[Life], None]) -> None:
        rng, tier, policy = self.rng, self.tier, self.policy
        self.now += rng.expovariate(0.2)
        stem = rng.choice(self.prompts[-12:])
        stem = stem[: rng.randint(1, len(stem))] if rng.random() < 0.4 else stem
        prompt = stem + bytes(rng.choices(range(6), k=rng.randint(0, 5)))
        self.prompts.append(prompt)
        context = RequestContext(
            request_id=str(self.now),
            arrival_s=self.now,
            input_type=InputType(rng.randrange(3)),
            prompt_tokens=len(prompt),
        )
        outcome = Outcome(
            finished_s=self.now, stop_reason=StopReason(rng.randrange(6)), output_tokens=rng.randrange(99)
        )
        path = self.tree.insert(prompt)
        policy.on_arrival(path, context, self.now)
        for segment, old in tier.admit(path):
            policy.on_resident(segment, old, self.now)
        policy.on_finish(path, context, outcome, self.now)
        if rng.random() < 0.3:
            leaves = list(tier.leaves())
            chosen = rng.choice(leaves)
            tier.leased = {chosen.id: rng.randint(0, chosen.length)}
        while tier.resident_rows > tier.capacity_rows:
            check(self)
            victims = policy.victims(tier.resident_rows - tier.capacity_rows, self.now)
            if not victims:
                break
            for victim in victims:
                old = tier.evict(victim.segment, victim.keep)
                policy.on_evicted(victim.segment, old, self.now)
        tier.check_integrity()


def brute_force(life: Life, key_of: KeyOf) -> list[tuple[int, int]]:
    """(segment, keep) one block at a time: always the last block of the leaf with the least key that may go."""
    tier, rows = life.tier, life.tier.resident_rows - life.tier.capacity_rows
    extent = {segment.id: tier.extent(segment) for segment in life.tree.segments()}
    keys = {segment.id: key_of(segment, life.now) for segment in life.tree.segments()}
    gone: dict[int, int] = {}
    for _ in range(rows):
        able = [
            segment
            for segment in life.tree.segments()
            if extent[segment.id] > tier.evictable_from(segment)
            and not any(extent[child.id] for child in segment.children.values())
        ]
        if not able:
            break
        victim = min(able, key=lambda segment: keys[segment.id])
        extent[victim.id] -= 1
        gone[victim.id] = extent[victim.id]
    return sorted(gone.items())


@pytest.mark.parametrize("seed", range(5))
def test_worth_names_the_argmin(seed: int) -> None:
    def check(life: Life) -> None:
        policy = life.policy
        assert isinstance(policy, WorthPolicy)
        named = policy.victims(life.tier.resident_rows - life.tier.capacity_rows, life.now)

        def worth(segment: Segment, now: float) -> float:
            return float(policy.forecast.worth(np.array([segment.id], np.int32), now)[0])

        expected = brute_force(life, worth)
        # Equal worths (segments of one subject, or nothing known of either) may be taken in any order.
        by_id = {segment.id: worth(segment, life.now) for segment in life.tree.segments()}
        got = sorted((victim.segment.id, victim.keep) for victim in named)
        if got != expected:
            assert sorted(by_id[i] for i, _ in got) == pytest.approx(sorted(by_id[i] for i, _ in expected))
            assert len({by_id[i] for i, _ in {*got} ^ {*expected}}) == 1

    life = Life(lambda view: WorthPolicy(view, guarded=False), capacity=12 + seed, seed=seed)
    for _ in range(150):
        life.step(check)


@pytest.mark.parametrize("seed", range(5))
def test_lru_names_the_least_recent(seed: int) -> None:
    used: dict[bytes, int] = {}
    clock = iter(range(10**9))

    def last_use(segment: Segment, now: float) -> float:
        """Of the segment's own last block, as an independent record by block."""
        return float(used[life.tree.chain_of(segment)])

    def check(life: Life) -> None:
        expected = brute_force(life, last_use)
        named = life.policy.victims(life.tier.resident_rows - life.tier.capacity_rows, life.now)
        assert sorted((victim.segment.id, victim.keep) for victim in named) == expected

    class Recorded(LeafFirstLRU):
        def on_finish(self, path, context, outcome, now):  # type: ignore[no-untyped-def]
            chain = life.tree.chain_of(path[-1])
            for depth in range(len(chain), 0, -1):
                used[chain[:depth]] = next(clock)
            super().on_finish(path, context, outcome, now)

    life = Life(Recorded, capacity=10 + seed, seed=seed)
    for _ in range(150):
        life.step(check)


@pytest.mark.parametrize("name", ["beta16", "kvtier", "lru"])
def test_every_registered_policy_keeps_its_contract(name: str) -> None:
    assert name in policy_names()

    def check(life: Life) -> None:
        rows = life.tier.resident_rows - life.tier.capacity_rows
        before = [(s.id, life.tier.extent(s)) for s in life.tree.segments()]
        victims = life.policy.victims(rows, life.now)
        assert before == [(s.id, life.tier.extent(s)) for s in life.tree.segments()]
        freed = sum(life.tier.rows(v.segment, v.keep) for v in victims)
        able = sum(life.tier.extent(s) - life.tier.evictable_from(s) for s in life.tier.leaves())
        assert freed >= min(rows, able)
        assert all(life.tier.evictable_from(v.segment) <= v.keep < life.tier.extent(v.segment) for v in victims)
        assert len({v.segment.id for v in victims}) == len(victims)

    for seed in range(2):
        life = Life(lambda view: make_policy(name, view), capacity=14, seed=seed)
        for _ in range(200):
            life.step(check)


@given(st.integers(0, 2**32), st.integers(1, 30))
@settings(max_examples=15, deadline=None)
def test_guarded_policy_holds_what_its_shadow_holds_once_trusted(seed: int, capacity: int) -> None:
    life = Life(WorthPolicy, capacity, seed)
    policy = life.policy
    assert isinstance(policy, WorthPolicy)
    assert policy.guard is not None
    policy.guard.trusts_forecast = True
    policy.guard.settle = lambda ahead: None  # type: ignore[method-assign]
    life.tier.evictable_from = lambda segment: 0  # type: ignore[method-assign]
    for _ in range(60):
        life.step(lambda life: None)
        shadow = policy.guard.by_worth.residency
        shadow.check_integrity()
        policy.guard.by_recency.residency.check_integrity()
        for segment in life.tree.segments():
            assert life.tier.extent(segment) == shadow.extent(segment.id)


@pytest.mark.parametrize("seed", range(6))
def test_the_mirror_follows_any_change_of_the_tree(seed: int) -> None:
    life = Life(lambda view: WorthPolicy(view, guarded=True), capacity=15, seed=seed)
    policy = life.policy
    assert isinstance(policy, WorthPolicy)
    for n in range(200):
        life.step(lambda life: None)
        if n % 7 == 0:
            leaves = [segment for segment in life.tree.segments() if not segment.children]
            leaf = life.rng.choice(leaves)
            life.tree.truncate(leaf, life.rng.randrange(leaf.length))
        mirror = mirror_of(life.tier)
        for segment in life.tree.segments():
            assert policy._residency.extent(segment.id) == mirror.extent(segment.id)
        policy._residency.check_integrity()
        policy.forecast.sessions.check_integrity()


def test_nothing_to_draw_from_is_no_error() -> None:
    tree = PrefixTree(key_bytes=1)
    tier = SimTier(tree, 4)
    assert draw_victims(tier, mirror_of(tier), iter(()), lambda i: (0.0,), 3) == []
    for name in policy_names():
        assert make_policy(name, tier).victims(3, 0.0) == []
