"""Load or recompute: the gate that keeps a slow tier from being worse than no cache.

For every prefix cut k of what was found, the time to the first token is T(k) = load(k) + recompute(rest); the gate
takes the cut with the least T(k) + e·R(k), where R is the recompute left to the GPU and e the price of a busy GPU
(facts of placement under contention; docs/architecture.md §6). Both sides are measured: recompute by least squares on
the engine's own prefill steps, linear plus quadratic in position (Mooncake, FAST'25, eq. 1); load by each tier's cost
curve and backlog. Ties go to the longer load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_BINS, _KEPT_PER_BIN = 24, 8
_MIN_OBSERVATIONS = 3
# A model that has seen prompts of n tokens says nothing of one more than this many times longer.
_REACH = 4


class PrefillModel:
    """Seconds to prefill tokens [start, stop): a + b·tokens + c·Σposition, learned online. Not thread-safe.

    The last few engine steps of every size (by powers of two of tokens) are kept, so that a thousand short steps cannot
    push out what one long one said; coefficients are non-negative least squares of relative errors over those.
    """

    def __init__(self) -> None:
        self._kept: list[deque[Floats]] = [deque(maxlen=_KEPT_PER_BIN) for _ in range(_BINS)]
        self._coefficients = np.zeros(3)
        self._stale = False
        self._longest_tokens = 0
        self.observations = 0

    def knows(self, tokens: int) -> bool:
        """Whether enough was seen to say what computing `tokens` tokens costs."""
        return self.observations >= _MIN_OBSERVATIONS and tokens <= _REACH * self._longest_tokens

    def observe(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One engine step computed tokens [start, stop) of one or several prompts in `seconds`."""
        tokens = sum(max(0, stop - start) for start, stop in spans)
        if not tokens or seconds <= 0:
            return
        positions = sum((stop - start) * (start + stop) / 2 for start, stop in spans)
        # In thousands, so that the columns are of like size.
        row = np.array([1.0, tokens / 1e3, positions / 1e6, seconds])
        self._kept[min(tokens.bit_length(), _BINS - 1)].append(row)
        self._longest_tokens = max(self._longest_tokens, tokens)
        self.observations += 1
        self._stale = True

    def seconds_from(self, starts: npt.NDArray[np.int64], stop: int) -> Floats:
        """Estimates for tokens [start, stop) for every start; 0 where nothing is left or nothing was observed yet."""
        if self._stale:
            self._fit()
        n = (stop - starts).astype(np.float64)
        a, b, c = self._coefficients
        seconds: Floats = np.where(n > 0, a + b * n / 1e3 + c * n * (starts + stop) / 2e6, 0.0)
        return seconds

    def _fit(self) -> None:
        """Drop the most negative coefficient until none is."""
        table = np.array([row for kept in self._kept for row in kept])
        x, y = table[:, :3] / table[:, 3:], np.ones(len(table))
        active = [0, 1, 2]
        self._coefficients = np.zeros(3)
        while active:
            solution = np.linalg.lstsq(x[:, active], y, rcond=1e-9)[0]
            if (solution >= 0).all():
                self._coefficients[active] = solution
                break
            active.remove(active[int(np.argmin(solution))])
        self._stale = False


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
    whole: bool = False,
) -> Cut:
    """How many of the blocks found after `start_token` to load; with `whole`, all of them or none.

    `bytes_by_tier` gives, for each tier, its curve and the cumulative bytes to load from it for 0, 1, … n blocks
    (arrays of n + 1). Tiers are read one after the other at worst, so their times add up. Where the prefill model has
    not seen enough to say what recomputing costs, everything is loaded.
    """
    n = len(bytes_by_tier[0][1]) - 1 if bytes_by_tier else 0
    load: Floats = np.zeros(n + 1)
    for curve, cumulative in bytes_by_tier:
        load += curve.seconds(cumulative)
    if n == 0 or not prefill.knows(prompt_tokens - start_token):
        return Cut(n, float(load[n]), 0.0)
    starts = np.minimum(start_token + block_tokens * np.arange(n + 1), prompt_tokens)
    recompute = prefill.seconds_from(starts, prompt_tokens)
    total = load + (1.0 + gpu_price) * recompute
    if whole:
        total[1:n] = np.inf
    best = n - int(np.argmin(total[::-1]))
    return Cut(best, float(load[best]), float(recompute[best]))
