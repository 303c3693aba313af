"""The return hazard: a Bayesian logistic regression over log-age buckets, learned one event at a time.

A subject that has waited through age buckets 0..k-1 returns within bucket k with probability
p_k = sigmoid(sum over its features f of fine[f, k] + coarse[f, k // 4]). The prior says that p is the same in every
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
COLUMNS = BUCKETS + BUCKETS // COARSE
EDGES: Float = np.concatenate([[0.0], 0.25 * 2.0 ** (np.arange(BUCKETS) / 1.5)])
WIDTHS: Float = np.diff(EDGES)
LAST_EDGE_S = float(EDGES[-1])

_BIAS_MEAN, _BIAS_VARIANCE, _FINE_VARIANCE, _COARSE_VARIANCE = -3.0, 2.0, 0.02, 0.1
_PROBIT = np.pi / 8
_MIN_CURVATURE = 0.002


def bucket_of(age_s: Float) -> Int:
    """The bucket an age lies in; BUCKETS for ages beyond the last edge."""
    return np.searchsorted(EDGES, age_s, side="right").astype(np.int64) - 1


class HazardModel:
    """Means and variances of all weights. Not thread-safe."""

    def __init__(self) -> None:
        self._mean: Float = np.zeros((FEATURES, COLUMNS))
        self._variance: Float = np.full((FEATURES, COLUMNS), _FINE_VARIANCE)
        self._variance[:, BUCKETS:] = _COARSE_VARIANCE
        for bias in BIASES:
            self._mean[bias, :BUCKETS] = _BIAS_MEAN
            self._variance[bias, :BUCKETS] = _BIAS_VARIANCE
        self._variance[PAD] = 0.0
        self._flat_mean = self._mean.reshape(-1)
        self._flat_variance = self._variance.reshape(-1)
        self.events = 0

    @property
    def nbytes(self) -> int:
        """Bytes held by the weights."""
        return self._mean.nbytes + self._variance.nbytes

    def learn(self, rows: Rows, buckets: Int, returned: Float) -> Float:
        """Learn that subjects with these feature rows returned (1) or did not (0) in these buckets.

        Returns what the model predicted for them beforehand. A batch should be at least 64 events and not more than a
        few hundred.
        """
        base = rows.astype(np.int64) * COLUMNS
        index = np.concatenate([base + buckets[:, None], base + (BUCKETS + buckets // COARSE)[:, None]], axis=1)
        variance = self._flat_variance[index]
        total = variance.sum(axis=1)
        z = self._flat_mean[index].sum(axis=1) / np.sqrt(1.0 + _PROBIT * total)
        predicted = _sigmoid(z)
        curvature = np.maximum(predicted * (1.0 - predicted), _MIN_CURVATURE)
        same = np.bincount(buckets, minlength=BUCKETS)[buckets]
        damping = 1.0 / (1.0 + same * total * curvature)
        step = (returned - predicted) * damping
        width = index.shape[1]
        flat = index.reshape(-1)
        np.add.at(self._flat_mean, flat, (variance * step[:, None]).reshape(-1))
        shrink = np.repeat(curvature * damping, width) * variance.reshape(-1) ** 2
        np.subtract.at(self._flat_variance, flat, shrink)
        self.events += len(buckets)
        return predicted

    def hazards(self, rows: Rows) -> Float:
        """-log(1 - p_k) for every bucket: the integrated hazard of each. Shape (n, BUCKETS)."""
        total = self._mean[rows].sum(axis=1)
        z = total[:, :BUCKETS] + np.repeat(total[:, BUCKETS:], COARSE, axis=1)
        integrated: Float = np.logaddexp(0.0, z)
        return integrated


def _sigmoid(z: Float) -> Float:
    return 1.0 / (1.0 + np.exp(-z))


def empty_rows(n: int) -> Rows:
    """`n` rows that say nothing."""
    return np.full((n, ROW_WIDTH), PAD, np.int16)
