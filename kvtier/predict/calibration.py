"""How good are the probabilities: Brier score, expected calibration error, log-loss, with confidence intervals.

Prequential: a prediction is logged before the model learns its outcome (Forecast.log), so nothing is scored on what
it was trained on. Constant space: moments for Brier and log-loss, bins of equal width in log-odds for calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

_BINS = 30
_LOG_ODDS = np.linspace(-9.0, 9.0, _BINS - 1)
_Z95 = 1.959964
_FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Calibration:
    """A PredictionLog that keeps sums."""

    def __init__(self) -> None:
        self.count = 0
        self._moments = np.zeros((2, 2))  # (Brier, log-loss) x (sum, sum of squares)
        self._bins = np.zeros((_BINS, 3))  # count, sum of predictions, sum of outcomes

    def add(self, predicted: Float, outcome: Float) -> None:
        """Take in one batch of probabilities and 0/1 outcomes."""
        p = np.clip(predicted, _FLOOR, 1.0 - _FLOOR)
        self.count += len(p)
        for row, loss in enumerate(((p - outcome) ** 2, -np.log(np.where(outcome > 0.5, p, 1.0 - p)))):
            self._moments[row] += loss.sum(), (loss**2).sum()
        cell = np.searchsorted(_LOG_ODDS, np.log(p / (1.0 - p)))
        for column, weight in enumerate((np.ones_like(p), p, outcome)):
            self._bins[:, column] += np.bincount(cell, weight, _BINS)

    def brier(self) -> Estimate:
        """Mean squared error of the probabilities."""
        return self._mean(0)

    def log_loss(self) -> Estimate:
        """Mean negative log-likelihood, in nats."""
        return self._mean(1)

    def expected_calibration_error(self) -> Estimate:
        """Mean over bins of |observed rate - mean prediction|, weighted by count. The interval is what binomial noise
        of the bins alone explains around the value: an upper end is an honest worst case, the lower is cut at 0."""
        n, p, y = self._bins.T
        used = n > 0
        n, p, y = n[used], p[used] / n[used], y[used] / n[used]
        if not len(n):
            return Estimate(0.0, 0.0, 0.0)
        weight = n / n.sum()
        value = float((weight * np.abs(y - p)).sum())
        spread = float(_Z95 * np.sqrt((weight**2 * p * (1 - p) / n).sum()))
        return Estimate(value, max(0.0, value - spread), value + spread)

    def reliability(self) -> list[tuple[float, float, float, float, int]]:
        """(mean prediction, observed rate, low, high, count) of every bin in use: Wilson 95 % intervals."""
        rows = []
        for n, p, y in self._bins:
            if not n:
                continue
            rate, z2 = y / n, _Z95**2
            centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
            half = _Z95 / (1 + z2 / n) * np.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
            rows.append((float(p / n), float(rate), float(centre - half), float(centre + half), int(n)))
        return rows

    def _mean(self, row: int) -> Estimate:
        if not self.count:
            return Estimate(0.0, 0.0, 0.0)
        mean = self._moments[row, 0] / self.count
        variance = max(0.0, self._moments[row, 1] / self.count - mean**2)
        half = _Z95 * np.sqrt(variance / self.count)
        return Estimate(float(mean), float(mean - half), float(mean + half))
