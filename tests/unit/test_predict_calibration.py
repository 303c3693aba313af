"""Calibration measures against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.predict.beta16 import CELLS, BetaCells
from kvtier.predict.calibration import Calibration


def test_scores_equal_their_definitions() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(5000)
    y = (rng.random(5000) < p).astype(float)
    log = Calibration()
    for part in np.array_split(np.arange(5000), 7):
        log.add(p[part], y[part])
    assert log.brier().value == pytest.approx(((p - y) ** 2).mean())
    assert log.log_loss().value == pytest.approx(-np.log(np.where(y > 0.5, p, 1 - p)).mean())
    assert log.brier().low < log.brier().value < log.brier().high
    assert log.expected_calibration_error().value < 0.03


def test_wrong_probabilities_show() -> None:
    log = Calibration()
    log.add(np.full(1000, 0.9), (np.arange(1000) % 2).astype(float))
    error = log.expected_calibration_error()
    assert error.value == pytest.approx(0.4)
    assert error.low > 0.3
    ((predicted, observed, low, high, count),) = log.reliability()
    assert (predicted, observed, count) == (pytest.approx(0.9), 0.5, 1000)
    assert low < 0.5 < high < 0.9


def test_intervals_cover_the_truth() -> None:
    """95 % intervals of the Brier score contain its expectation about 95 times in 100."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(200):
        log = Calibration()
        y = (rng.random(400) < 0.3).astype(float)
        log.add(np.full(400, 0.2), y)
        inside += log.brier().low <= 0.3 * 0.64 + 0.7 * 0.04 <= log.brier().high
    assert inside >= 180


def test_nothing_logged() -> None:
    assert Calibration().brier().value == Calibration().expected_calibration_error().value == 0.0


def test_beta_cells() -> None:
    cells = BetaCells()
    assert CELLS == 25
    assert cells.mean(3) == 0.5
    for _ in range(8):
        cells.hit(3)
    cells.evicted(3)
    assert cells.mean(3) == pytest.approx(9 / 11)
    assert cells.mean(4) == 0.5
