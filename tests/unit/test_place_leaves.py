"""Candidates: exact while few, a sample beyond, complete if asked for all."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.index.tree import PrefixTree
from kvtier.model.request import Outcome, RequestContext
from kvtier.place import leaves as module
from kvtier.place.leaves import LeafSample
from kvtier.place.residency import Residency
from kvtier.predict.forecast import Forecast


def held(n: int) -> tuple[Forecast, Residency]:
    """`n` one-block leaves, each asked for a minute after the one before."""
    tree = PrefixTree(key_bytes=4)
    forecast, residency = Forecast(tree), Residency(tree)
    for i in range(n):
        now, context = 60.0 * i, RequestContext(request_id=str(i), arrival_s=60.0 * i)
        path = tree.insert(i.to_bytes(4, "little"))
        forecast.on_arrival(path, context, now)
        forecast.on_finish(path, context, Outcome(finished_s=now), now)
        residency.hold(path)
    return forecast, residency


@pytest.mark.parametrize("n", [3, 40, 70, 300])
def test_few_leaves_come_in_exact_order(n: int) -> None:
    forecast, residency = held(n)
    order, key_of = LeafSample(forecast, residency, 0).draw(60.0 * n)
    drawn = list(order)
    worth = forecast.worth(residency.leaves, 60.0 * n)
    assert [key for key, _ in drawn] == sorted(key for key, _ in drawn)
    assert sorted(key[0] for key, _ in drawn) == sorted(worth.tolist())
    assert all(key_of(i) == pytest.approx(key) for key, i in drawn)


def test_beyond_the_limit_a_sample_finds_what_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_LEAVES", 50)
    monkeypatch.setattr(module, "SAMPLED_LEAVES", 20)
    forecast, residency = held(400)
    sample, now = LeafSample(forecast, residency, 1), 60.0 * 400
    rank = {int(residency.leaves[n]): r for r, n in enumerate(np.argsort(forecast.worth(residency.leaves, now)))}
    firsts = []
    for _ in range(20):
        order, _ = sample.draw(now)
        firsts.append(rank[next(order)[1]])
    # The first of 20 of 400 is about the 20th; remembering the cheapest makes it better with every round.
    assert firsts == sorted(firsts, reverse=True)
    assert firsts[-1] <= 3


def test_whoever_needs_more_than_the_sample_gets_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_LEAVES", 50)
    forecast, residency = held(300)
    order, _ = LeafSample(forecast, residency, 2).draw(1e5)
    drawn = [i for _, i in order]
    assert sorted(drawn) == sorted(residency.leaves.tolist())


def test_a_seed_makes_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_LEAVES", 50)
    forecast, residency = held(200)
    draws = [[i for _, i in LeafSample(forecast, residency, seed).draw(1e5)[0]] for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
