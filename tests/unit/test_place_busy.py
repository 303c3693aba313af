"""The busy meter: how busy a server is, and what a second of it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.place.busy import HIGHEST_SHARE, BusyMeter


def test_it_settles_at_the_true_share() -> None:
    meter = BusyMeter(0.0)
    for step in range(1, 3001):
        meter.note(0.04, step * 0.1)
    assert meter.share(300.0) == pytest.approx(0.4, abs=0.01)
    assert meter.price(300.0) == pytest.approx(0.4 / 0.6, abs=0.03)


def test_it_forgets_with_its_time_constant_and_starts_idle() -> None:
    meter = BusyMeter(100.0)
    assert meter.share(1e6) == 0.0
    meter.note(30.0, 130.0)
    before = meter.share(130.0)
    assert before == pytest.approx(1 - 2.718281828 ** (-0.5), rel=1e-6)
    assert meter.share(190.0) == pytest.approx(before / 2.718281828, rel=1e-6)


def test_the_price_is_held_where_the_formula_runs_away() -> None:
    meter = BusyMeter(0.0)
    for step in range(1, 1001):
        meter.note(1.0, float(step))
    assert meter.share(1000.0) == HIGHEST_SHARE
    assert meter.price(1000.0) == pytest.approx(9.0)
    assert meter.price(1000.0, 2) == 2.0
    assert meter.price(1000.0, 0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=30))
def test_the_share_is_between_idle_and_its_cap(steps: list[tuple[float, float]]) -> None:
    meter, now = BusyMeter(0.0), 0.0
    for busy, pause in steps:
        now += busy + pause
        meter.note(busy, now)
        assert 0.0 <= meter.share(now) <= HIGHEST_SHARE
        assert meter.share(now + 1.0) <= meter.share(now)
