"""Speculative promotion and the prefetch window: worth more than what is displaced, in budget, off when unused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.tree import PrefixTree
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.place.promotion import (
    ByteBudget,
    Candidate,
    Promoter,
    PromotionOptions,
    next_contexts,
    returns_in_window,
)
from kvtier.place.window import PrefetchWindow, WindowLimits, load_order
from kvtier.predict.forecast import Forecast
from kvtier.predict.tool_chain import ToolChain

OPTIONS = PromotionOptions(trial_bytes=1000, retry_s=100.0)


def candidate(i: int, probability: float, n_bytes: int = 10, saved_s: float = 1.0) -> Candidate:
    return Candidate(i, 1, n_bytes, probability, saved_s)


@given(
    probabilities=st.lists(st.floats(0, 1), max_size=20),
    marginal=st.floats(0, 0.2),
    rate=st.floats(0, 200),
)
def test_the_most_valuable_go_first_as_far_as_the_budget_reaches(
    probabilities: list[float], marginal: float, rate: float
) -> None:
    promoter, budget = Promoter(OPTIONS), ByteBudget(rate, 0.0)
    chosen = promoter.plan([candidate(i, p) for i, p in enumerate(probabilities)], marginal, budget, 0.0, idle=True)
    window = OPTIONS.lead_max_s - OPTIONS.lead_min_s
    good = sorted((-p / window, i) for i, p in enumerate(probabilities) if p / window > 1.3 * marginal)
    assert [c.segment_id for c in chosen] == [i for _, i in good[: len(chosen)]]
    if len(chosen) < len(good):
        assert rate - 10 * len(chosen) < min(10, int(rate))


def test_nothing_moves_while_demand_is_queued() -> None:
    promoter = Promoter(OPTIONS)
    assert promoter.plan([candidate(1, 1.0)], 0.0, ByteBudget(1e9, 0.0), 0.0, idle=False) == []


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 400)), max_size=40))
def test_a_budget_is_kept_over_any_span(asked: list[tuple[float, int]]) -> None:
    budget, now, spent = ByteBudget(100.0, 0.0), 0.0, 0
    for pause, n_bytes in asked:
        now += pause
        if budget.take(n_bytes, now):
            spent += n_bytes
        assert spent <= 100.0 * (now + 1.0) + 400


def test_it_goes_off_where_bytes_are_not_used_and_tries_again_ever_more_seldom() -> None:
    promoter, moved = Promoter(OPTIONS), []
    for second in range(2000):
        chosen = promoter.plan(
            [candidate(second, 1.0, 100)], 0.0, ByteBudget(1e9, float(second)), float(second), idle=True
        )
        moved += [second] * len(chosen)
    assert promoter.switch.turned_off == 5, "at 10, and after 100, 200, 400 and 800 s off"
    assert len(moved) == 50
    assert moved[:10] == list(range(10))
    assert moved[10] == 110


def test_it_stays_on_where_a_third_is_used() -> None:
    promoter = Promoter(OPTIONS)
    for second in range(500):
        promoter.plan([candidate(second, 1.0, 100)], 0.0, ByteBudget(1e9, float(second)), float(second), idle=True)
        if second % 3 == 0:
            promoter.switch.used(second)
    assert promoter.switch.turned_off == 0
    assert promoter.switch.use == pytest.approx(1 / 3, abs=0.05)


def test_only_returns_the_transfer_can_serve_count() -> None:
    tree = PrefixTree(key_bytes=1)
    forecast = Forecast(tree)
    path = tree.insert(b"abc")
    context = RequestContext(request_id="r", arrival_s=0.0)
    forecast.on_arrival(path, context, 0.0)
    forecast.on_finish(path, context, Outcome(finished_s=0.0, stop_reason=StopReason.TOOL_USE), 0.0)
    ids = np.array([path[-1].id], np.int32)
    whole = returns_in_window(forecast, ids, PromotionOptions(lead_min_s=0.0, lead_max_s=20.0), 0.0)
    early = returns_in_window(forecast, ids, PromotionOptions(lead_min_s=0.0, lead_max_s=5.0), 0.0)
    late = returns_in_window(forecast, ids, PromotionOptions(lead_min_s=5.0, lead_max_s=20.0), 0.0)
    assert whole[0] == pytest.approx(early[0] + late[0])
    assert 0 < late[0] < whole[0]


def test_contexts_of_likely_tools_are_needed_with_their_probability() -> None:
    tools = ToolChain()
    grep, edit, rare = tools.id_of("grep"), tools.id_of("edit"), tools.id_of("rare")
    for _ in range(50):
        tools.observe_call(grep, edit)
    tools.observe_call(edit, rare)
    needed = next_contexts(tools, grep, {"edit": [7], "rare": [9]})
    share = dict(tools.next_tools(grep))
    assert needed == {7: pytest.approx(share["edit"])}
    assert share["rare"] < 0.1


def test_orders_are_what_each_kind_of_layer_needs() -> None:
    assert load_order(2, 6) == [2, 3, 4, 5]
    assert load_order(0, 10, window=3) == [9, 8, 7]
    assert load_order(0, 10, window=3, sinks=1) == [0, 9, 8, 7]
    assert load_order(8, 10, window=5, sinks=1) == [9, 8]


@given(st.integers(0, 30), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 40)), st.integers(0, 5))
def test_an_order_names_each_block_once_and_only_what_is_read(
    start: int, more: int, window: int | None, sinks: int
) -> None:
    order = load_order(start, start + more, window, sinks)
    read = {b for b in range(start, start + more) if window is None or b >= start + more - window or b < sinks}
    assert len(order) == len(set(order))
    assert set(order) == read


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 50))))
def test_the_window_grows_by_lateness_shrinks_by_waste_and_stays_in_bounds(
    history: list[tuple[bool, int, int]],
) -> None:
    window = PrefetchWindow(WindowLimits(first=20, least=4, most=60, add=5))
    for late, used, fetched in history:
        before = window.blocks
        window.settled(late, min(used, fetched), fetched)
        wasted = fetched and fetched - min(used, fetched) > 0.25 * fetched
        expected = max(4, before // 2) if wasted else min(60, before + 5) if late else before
        assert window.blocks == expected
