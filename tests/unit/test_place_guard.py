"""The guard changes its mind for reasons, and only for reasons."""

from __future__ import annotations

import random

import pytest

from kvtier.index.tree import PrefixTree
from kvtier.model.request import Outcome, RequestContext
from kvtier.place.guard import Guard
from kvtier.place.lru import Recency
from kvtier.place.worth import WorthPolicy
from kvtier.predict.forecast import Forecast
from kvtier.sim.tier import SimTier


@pytest.fixture
def guard() -> Guard:
    tier = SimTier(PrefixTree(key_bytes=1), 8)
    return Guard(tier, Forecast(tier.tree), Recency(tier.tree), 0)


def feed(guard: Guard, mean: float, n: int, seed: int = 0) -> float:
    """Hits won over LRU by following the guard on noisy requests with this mean advantage."""
    rng, won = random.Random(seed), 0.0
    for _ in range(n):
        ahead = round(rng.gauss(mean, 10.0))
        won += ahead if guard.trusts_forecast else 0.0
        guard.settle(ahead)
    return won


def test_starts_with_the_forecast_and_stays_while_it_earns(guard: Guard) -> None:
    feed(guard, 2.0, 5000)
    assert guard.trusts_forecast
    assert guard.lead_blocks > 0


@pytest.mark.parametrize("name", ["nvme", "pool", "shared_fs"])
def test_a_large_tier_begins_with_lru_and_follows_a_forecast_that_has_shown_its_worth(name: str) -> None:
    tier = SimTier(PrefixTree(key_bytes=1), 8, name)
    guard = Guard(tier, Forecast(tier.tree), Recency(tier.tree), 0)
    feed(guard, -2.0, 5000)
    assert not guard.trusts_forecast
    assert guard.switches == 0
    feed(guard, 2.0, 5000)
    assert guard.trusts_forecast


def test_leaves_a_bad_forecast_at_a_bounded_loss(guard: Guard) -> None:
    lost = -feed(guard, -2.0, 20_000)
    assert not guard.trusts_forecast
    # Following it all the way would have lost 40,000 blocks.
    assert lost < 3000


def test_returns_when_the_forecast_has_learned(guard: Guard) -> None:
    feed(guard, -2.0, 5000)
    assert not guard.trusts_forecast
    feed(guard, 2.0, 5000)
    assert guard.trusts_forecast


def test_old_merits_do_not_protect_a_forecast_that_went_bad(guard: Guard) -> None:
    feed(guard, 5.0, 20_000)
    lost = -feed(guard, -2.0, 4000, seed=1)
    assert not guard.trusts_forecast
    assert lost < 2500


def test_equal_orders_never_switch(guard: Guard) -> None:
    for _ in range(10_000):
        guard.settle(0)
    assert guard.trusts_forecast
    assert guard.switches == 0


def test_a_distrusted_forecast_leaves_pure_lru() -> None:
    """With the guard on LRU, the tier evicts exactly what LeafFirstLRU would."""
    tree = PrefixTree(key_bytes=1)
    tier = SimTier(tree, 6)
    policy = WorthPolicy(tier)
    assert policy.guard is not None
    policy.guard.trusts_forecast = False
    for n, prompt in enumerate((b"ab", b"cd", b"ef", b"abx")):
        now, context = float(n), RequestContext(request_id=str(n), arrival_s=float(n))
        path = tree.insert(prompt)
        policy.on_arrival(path, context, now)
        policy.guard.trusts_forecast = False
        for segment, old in tier.admit(path):
            policy.on_resident(segment, old, now)
        policy.on_finish(path, context, Outcome(finished_s=now), now)
    (victim,) = policy.victims(1, 4.0)
    assert (tree.chain_of(victim.segment), victim.keep) == (b"cd", 1)


def test_threshold_is_the_worth_of_the_marginal_resident() -> None:
    tree = PrefixTree(key_bytes=1)
    tier = SimTier(tree, 6)
    policy = WorthPolicy(tier, guarded=False)
    assert policy.threshold(0.0) == 0.0
    for n, prompt in enumerate((b"ab", b"cd")):
        context = RequestContext(request_id=str(n), arrival_s=100.0 * n)
        path = tree.insert(prompt)
        policy.on_arrival(path, context, 100.0 * n)
        for segment, old in tier.admit(path):
            policy.on_resident(segment, old, 100.0 * n)
        policy.on_finish(path, context, Outcome(finished_s=100.0 * n), 100.0 * n)
    assert policy.threshold(101.0) == policy.forecast.worth_of(tree.walk(b"ab").path[-1].id, 101.0)


def test_a_forecast_shared_by_two_tiers_is_fed_once() -> None:
    tree = PrefixTree(key_bytes=1)
    forecast = Forecast(tree)
    tiers = [SimTier(tree, 4), SimTier(tree, 8)]
    policies = [WorthPolicy(tier, forecast) for tier in tiers]
    for n in range(30):
        now, context = 10.0 * n, RequestContext(request_id=str(n), arrival_s=10.0 * n)
        path = tree.insert(b"s" + bytes([n % 3]) * (1 + n // 3 % 4))
        forecast.on_arrival(path, context, now)
        for tier, policy in zip(tiers, policies, strict=True):
            policy.on_arrival(path, context, now)
            for segment, old in tier.admit(path):
                policy.on_resident(segment, old, now)
        forecast.on_finish(path, context, Outcome(finished_s=now), now)
        for tier, policy in zip(tiers, policies, strict=True):
            policy.on_finish(path, context, Outcome(finished_s=now), now)
            while tier.resident_rows > tier.capacity_rows:
                for victim in policy.victims(tier.resident_rows - tier.capacity_rows, now):
                    policy.on_evicted(victim.segment, tier.evict(victim.segment, victim.keep), now)
    forecast.sessions.check_integrity()
    assert sum(forecast.sessions.arrivals(child) for child in tree.root.children.values()) == 30
    assert all(tier.resident_rows <= tier.capacity_rows for tier in tiers)
