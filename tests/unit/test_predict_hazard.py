"""The regression and the index: what they must recover, and what nothing known must mean."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.predict.features import FEATURES, OFFSETS, PAD, ROW_WIDTH, FeatureSet, VisitFacts, bucket, visit_row
from kvtier.predict.gittins import index_at_edges, return_probability
from kvtier.predict.hazard import BUCKETS, EDGES, WIDTHS, HazardModel, bucket_of, empty_rows


def row(*ids: int) -> np.ndarray:
    rows = empty_rows(1)
    rows[0, : len(ids)] = ids
    return rows


def test_buckets_double() -> None:
    assert [bucket(x, 2.0, 6) for x in (-1, float("nan"), 0, 1.9, 2, 3.9, 4, 8, 1e9)] == [0, 0, 1, 1, 2, 2, 3, 4, 5]


def test_every_fact_lands_in_its_own_group() -> None:
    for facts in (VisitFacts(), VisitFacts(5, 2, 99, 1e9, 30.0, 1e9, 10**9, 10**9, 10**9, True, 4, 4, 1e9)):
        ids = visit_row(facts, FeatureSet())
        assert len(ids) == ROW_WIDTH
        bounds = sorted(OFFSETS.values())
        groups = [np.searchsorted(bounds, i, side="right") for i in ids if i != PAD]
        assert len(set(groups)) == len(groups)
        assert max(ids) < FEATURES


def test_age_buckets_tile_time() -> None:
    ages = np.array([0.0, 0.2, 0.25, 65535.0, 65536.0, 1e9])
    assert bucket_of(ages).tolist() == [0, 0, 1, BUCKETS - 1, BUCKETS, BUCKETS]
    assert np.isclose(WIDTHS.sum(), EDGES[-1])


def test_nothing_known_ranks_like_lru() -> None:
    hazards = np.repeat(HazardModel().hazards(row(OFFSETS["visit"])), BUCKETS, axis=0)
    start, end = index_at_edges(hazards, np.arange(BUCKETS))
    # The first bucket is not a step of the geometric scale; below a quarter of a second order does not matter.
    assert (np.diff(start[1:]) < 0).all()
    assert (end[1:] < start[1:]).all()


def test_learning_recovers_the_hazards_of_two_classes() -> None:
    rng = np.random.default_rng(0)
    truth = {OFFSETS["input"]: 0.02, OFFSETS["input"] + 1: 0.4}
    model = HazardModel()
    for _ in range(300):
        rows = np.concatenate([row(OFFSETS["visit"], f) for f in rng.choice(list(truth), 64)])
        p = np.array([truth[int(f)] for f in rows[:, 1]])
        model.learn(rows, rng.integers(0, 8, 64), (rng.random(64) < p).astype(float))
    for feature, p in truth.items():
        learned = 1.0 - np.exp(-model.hazards(row(OFFSETS["visit"], feature))[0, :8])
        assert np.abs(learned - p).max() < 0.35 * p + 0.01


def test_a_batch_of_equal_events_is_as_good_as_one_after_the_other() -> None:
    rows = np.repeat(row(OFFSETS["visit"], OFFSETS["input"]), 200, axis=0)
    buckets, returned = np.full(200, 5), (np.arange(200) % 4 == 0).astype(float)
    at_once, one_by_one = HazardModel(), HazardModel()
    at_once.learn(rows, buckets, returned)
    for i in range(200):
        one_by_one.learn(rows[i : i + 1], buckets[i : i + 1], returned[i : i + 1])
    a, b = (1 - np.exp(-m.hazards(rows[:1])[0, 5]) for m in (at_once, one_by_one))
    assert 0.12 < a < 0.3
    assert abs(a - b) < 0.08


def test_learning_never_blows_up() -> None:
    """Also with batches of contradicting events on the same weights, variances stay positive and weights finite."""
    rng, model = np.random.default_rng(1), HazardModel()
    for _ in range(50):
        rows = rng.integers(0, PAD, (256, ROW_WIDTH)).astype(np.int16)
        rows[:, 0] = 0
        predicted = model.learn(rows, np.full(256, 3), (rng.random(256) < 0.5).astype(float))
        assert ((predicted > 0) & (predicted < 1)).all()
    weights = model._weights
    assert np.isfinite(weights).all()
    assert (weights[:, weights.shape[1] // 2 :] >= 0).all()


def brute_force_index(hazards: np.ndarray, start: int) -> float:
    best, survival, held = 0.0, 1.0, 0.0
    for j in range(start, BUCKETS):
        if survival < 0.02:
            break
        after = survival * np.exp(-hazards[j])
        held += 0.5 * (survival + after) * WIDTHS[j]
        best, survival = max(best, (1 - after) / held), after
    return best


@pytest.mark.parametrize("seed", range(5))
def test_index_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hazards = rng.exponential(rng.choice([0.02, 0.2, 1.5]), (40, BUCKETS))
    at = rng.integers(0, BUCKETS - 1, 40)
    start, end = index_at_edges(hazards, at)
    for i in range(40):
        assert start[i] == pytest.approx(brute_force_index(hazards[i], at[i]))
        assert end[i] == pytest.approx(brute_force_index(hazards[i], at[i] + 1))


def test_index_sees_a_return_that_is_due() -> None:
    """A subject about to return is worth more than a younger one that is not: what recency cannot say."""
    due, young = np.full(BUCKETS, 0.01), np.full(BUCKETS, 0.01)
    due[12] = 3.0
    worth = index_at_edges(np.stack([due, young]), np.array([12, 8]))[0]
    assert worth[0] > 3 * worth[1]


def test_return_probability_adds_up() -> None:
    hazards = np.full((1, BUCKETS), 0.1)
    assert return_probability(hazards, np.array([0.0]), float(EDGES[10]))[0] == pytest.approx(1 - np.exp(-1.0))
    whole = return_probability(hazards, np.array([0.0]), 100.0)[0]
    first = return_probability(hazards, np.array([0.0]), 30.0)[0]
    second = return_probability(hazards, np.array([30.0]), 70.0)[0]
    assert 1 - whole == pytest.approx((1 - first) * (1 - second))
    beyond = return_probability(hazards, np.array([1e6]), 1e6)[0]
    assert 0 < beyond < 1
