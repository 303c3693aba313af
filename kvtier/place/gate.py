"""Load or recompute: the gate that keeps a slow tier from being worse than no cache.

For every prefix cut k of what was found, the time to the first token is T(k) = load(k) + recompute(rest); the gate
takes the cut with the least T(k) + e·R(k), where R is the recompute left to the GPU and e the price of a busy GPU
(facts of placement under contention; docs/architecture.md §6). Both sides are measured: recompute by least squares on
the engine's own prefill steps, linear plus quadratic in position (Mooncake, FAST'25, eq. 1); load by each tier's cost
curve and backlog. Ties go to the longer load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_FORGET = 0.995
_MIN_OBSERVATIONS = 3


class PrefillModel:
    """Seconds to prefill tokens [start, stop): a + b·tokens + c·Σposition, learned online.

    Recursive least squares with forgetting; coefficients are clamped at zero. Not thread-safe.
    """

    def __init__(self) -> None:
        self._gram = np.eye(3) * 1e-9
        self._moment = np.zeros(3)
        self._coefficients = np.zeros(3)
        self.observations = 0

    @property
    def ready(self) -> bool:
        """Whether enough prefill steps were seen to estimate at all."""
        return self.observations >= _MIN_OBSERVATIONS

    def observe(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One engine step computed tokens [start, stop) of one or several prompts in `seconds`."""
        spans = [(start, stop) for start, stop in spans if stop > start]
        if not spans or seconds <= 0:
            return
        x = self._features(spans)
        # Relative error matters: a 2,048-token step must not drown the 64-token ones.
        weight = 1.0 / seconds**2
        self._gram = self._gram * _FORGET + weight * np.outer(x, x)
        self._moment = self._moment * _FORGET + weight * seconds * x
        self.observations += 1
        self._solve()

    def seconds_from(self, starts: npt.NDArray[np.int64], stop: int) -> Floats:
        """Estimates for tokens [start, stop) for every start; 0 where nothing is left or nothing was observed yet."""
        n = (stop - starts).astype(np.float64)
        a, b, c = self._coefficients
        seconds: Floats = np.where(n > 0, a + b * n / 1e3 + c * n * (starts + stop) / 2e6, 0.0)
        return seconds

    def _solve(self) -> None:
        """Non-negative least squares over three coefficients: drop the most negative one until none is."""
        active = [0, 1, 2]
        while active:
            sub = np.ix_(active, active)
            ridge = 1e-9 * np.trace(self._gram[sub]) * np.eye(len(active))
            solution = np.linalg.solve(self._gram[sub] + ridge, self._moment[active])
            if (solution >= 0).all():
                self._coefficients = np.zeros(3)
                self._coefficients[active] = solution
                return
            active.remove(active[int(np.argmin(solution))])

    @staticmethod
    def _features(spans: Sequence[tuple[int, int]]) -> Floats:
        # In thousands, so that the three columns are of like size.
        tokens = sum(stop - start for start, stop in spans)
        positions = sum((stop - start) * (start + stop) / 2 for start, stop in spans)
        return np.array([1.0, tokens / 1e3, positions / 1e6])


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """What loading from one tier costs: latency_s + backlog_s once, then bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float
    backlog_s: float = 0.0

    def seconds(self, n_bytes: Floats) -> Floats:
        """Cost of loading `n_bytes` (0 bytes cost nothing)."""
        cost: Floats = np.where(n_bytes > 0, self.latency_s + self.backlog_s + n_bytes / self.bytes_per_s, 0.0)
        return cost


@dataclass(frozen=True, slots=True)
class Cut:
    """The gate's answer: load the first `blocks` blocks; `load_s` and `recompute_s` are what that was estimated at."""

    blocks: int
    load_s: float
    recompute_s: float


def choose_cut(
    bytes_by_tier: list[tuple[LoadCurve, Floats]],
    prefill: PrefillModel,
    start_token: int,
    block_tokens: int,
    prompt_tokens: int,
    gpu_price: float = 0.0,
) -> Cut:
    """How many of the blocks found after `start_token` to load.

    `bytes_by_tier` gives, for each tier, its curve and the cumulative bytes to load from it for 0, 1, … n blocks
    (arrays of n + 1). Tiers are read one after the other at worst, so their times add up. With no prefill timing yet,
    everything is loaded: the first load is how the comparison starts.
    """
    n = len(bytes_by_tier[0][1]) - 1 if bytes_by_tier else 0
    load: Floats = np.zeros(n + 1)
    for curve, cumulative in bytes_by_tier:
        load += curve.seconds(cumulative)
    if not prefill.ready or n == 0:
        return Cut(n, float(load[n]), 0.0)
    starts = np.minimum(start_token + block_tokens * np.arange(n + 1), prompt_tokens)
    recompute = prefill.seconds_from(starts, prompt_tokens)
    total = load + (1.0 + gpu_price) * recompute
    best = n - int(np.argmin(total[::-1]))
    return Cut(best, float(load[best]), float(recompute[best]))
