"""The return hazard: a Bayesian logistic regression over log-age buckets, learned one event at a time.

A subject that has waited through age buckets 0..k-1 returns within bucket k with probability p_k, the sigmoid of the
sum over its features f of fine[f, k] + coarse[f, k // 4] + overall[f]. The prior says that p is the same in every
log-age bucket: with no data at all the order of worth is that of LRU, and knowledge moves it from there.

Learning is assumed-density filtering (each weight keeps a Gaussian mean and variance). Events of one batch see the
weights as they were before it; the step of an event is damped by the number of its batch's events in the same bucket,
which is exact when those events have the same features and cautious otherwise, so a batch can never overshoot.

Source: docs/forecast.md; the update is the probit-matched logistic filter of Spiegelhalter & Lauritzen (1990).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.predict.features import BIASES, FEATURES, PAD, ROW_WIDTH

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int16]

BUCKETS = 28
COARSE = 4  # fine buckets in a coarse one
_OVERALL = BUCKETS + BUCKETS // COARSE  # the column that holds for all buckets
COLUMNS = _OVERALL + 1
EDGES: Float = np.concatenate([[0.0], 0.25 * 2.0 ** (np.arange(BUCKETS) / 1.5)])
WIDTHS: Float = np.diff(EDGES)
LAST_EDGE_S = float(EDGES[-1])

_BIAS_MEAN, _BIAS_VARIANCE = -3.0, 2.0
_FINE_VARIANCE, _COARSE_VARIANCE, _OVERALL_VARIANCE = 0.03, 0.1, 0.05
_PROBIT = np.pi / 8
_MIN_CURVATURE = 0.002


def bucket_of(age_s: Float) -> Int:
    """The bucket an age lies in; BUCKETS for ages beyond the last edge."""
    return np.searchsorted(EDGES, age_s, side="right").astype(np.int64) - 1


class HazardModel:
    """Means and variances of all weights. Not thread-safe."""

    def __init__(self) -> None:
        # One row per feature: its means, then its variances.
        self._weights: Float = np.zeros((FEATURES, 2 * COLUMNS))
        mean, variance = self._weights[:, :COLUMNS], self._weights[:, COLUMNS:]
        variance[:, :BUCKETS] = _FINE_VARIANCE
        variance[:, BUCKETS:_OVERALL] = _COARSE_VARIANCE
        variance[:, _OVERALL] = _OVERALL_VARIANCE
        for bias in BIASES:
            mean[bias, :BUCKETS] = _BIAS_MEAN
            variance[bias, :BUCKETS] = _BIAS_VARIANCE
        variance[PAD] = 0.0
        self._flat = self._weights.reshape(-1)
        self.events = 0

    @property
    def nbytes(self) -> int:
        """Bytes held by the weights."""
        return self._weights.nbytes

    def learn(self, rows: Rows, buckets: Int, returned: Float) -> Float:
        """Learn that subjects with these feature rows returned (1) or did not (0) in these buckets.

        Returns what the model predicted for them beforehand. A batch should be at least 64 events and not more than a
        few hundred.
        """
        base = rows.astype(np.int64) * (2 * COLUMNS)
        coarse = (BUCKETS + buckets // COARSE)[:, None]
        index = np.concatenate([base + buckets[:, None], base + coarse, base + _OVERALL], axis=1)
        variance = self._flat[index + COLUMNS]
        total = variance.sum(axis=1)
        z = self._flat[index].sum(axis=1) / np.sqrt(1.0 + _PROBIT * total)
        predicted = _sigmoid(z)
        curvature = np.maximum(predicted * (1.0 - predicted), _MIN_CURVATURE)
        same = np.bincount(buckets, minlength=BUCKETS)[buckets]
        damping = 1.0 / (1.0 + same * total * curvature)
        step = (returned - predicted) * damping
        width = index.shape[1]
        flat = index.reshape(-1)
        np.add.at(self._flat, flat, (variance * step[:, None]).reshape(-1))
        shrink = np.repeat(curvature * damping, width) * variance.reshape(-1) ** 2
        np.subtract.at(self._flat, flat + COLUMNS, shrink)
        self.events += len(buckets)
        return predicted

    def hazards(self, rows: Rows) -> Float:
        """-log(1 - p_k) for every bucket: the integrated hazard of each. Shape (n, BUCKETS).

        p_k is the predictive probability: uncertain weights draw it towards the middle, as in `learn`.
        """
        total = self._weights[rows].sum(axis=1)
        mean, variance = _by_bucket(total[:, :COLUMNS]), _by_bucket(total[:, COLUMNS:])
        integrated: Float = np.logaddexp(0.0, mean / np.sqrt(1.0 + _PROBIT * variance))
        return integrated


def _by_bucket(total: Float) -> Float:
    """Fine, coarse and overall columns added up for every bucket."""
    summed: Float = total[:, :BUCKETS] + np.repeat(total[:, BUCKETS:_OVERALL], COARSE, axis=1) + total[:, _OVERALL:]
    return summed


def _sigmoid(z: Float) -> Float:
    return 1.0 / (1.0 + np.exp(-z))


def empty_rows(n: int) -> Rows:
    """`n` rows that say nothing."""
    return np.full((n, ROW_WIDTH), PAD, np.int16)
