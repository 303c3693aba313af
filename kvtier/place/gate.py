"""Load or recompute: the gate that keeps a slow tier from being worse than no cache.

Of every prefix cut k of what was found the gate takes the one with the least T(k) + e·R(k): T the time until the first
token, R the recompute left to the GPU, e the price of a busy GPU (place/busy.py). The seconds a load takes from a busy
link are priced in the same way. A gate that looks at latency alone does harm under load: it sends work to the GPU, or
to the link, that others wait for. Both sides are measured: recompute by least squares on the engine's own prefill
steps, linear plus quadratic in position (Mooncake, FAST'25, eq. 1); load by each link's cost curve and backlog.

    T(k) = max(load(k), queue + R(k))        where layers load while others are computed (overlap)
    T(k) = max(load(k), queue) + R(k)        where the load must end first

A load passes stages one after the other, and in each of them its links side by side: NVMe and the way to the device are
two links of one stage where chunks are pipelined, two stages where everything lands in memory first. Ties go to the
longer load.
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
_LEAST_PATIENCE_S = 0.1
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
    """What loading over one link costs: latency_s + backlog_s once, then bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float
    backlog_s: float = 0.0

    def seconds(self, n_bytes: Floats) -> Floats:
        """Cost of loading `n_bytes` (0 bytes cost nothing)."""
        cost: Floats = np.where(n_bytes > 0, self.latency_s + self.backlog_s + n_bytes / self.bytes_per_s, 0.0)
        return cost


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What the cuts move over one link: `cumulative[k]` bytes for the first k blocks (n + 1 values, ascending).

    `price` is what others lose for each second of the link, in seconds (`BusyMeter.price`).
    """

    curve: LoadCurve
    cumulative: Floats
    price: float = 0.0

    def seconds(self) -> Floats:
        """Until the last byte of every cut is over the link."""
        return self.curve.seconds(self.cumulative)

    def cost(self) -> Floats:
        """What every cut's own bytes cost others."""
        cost: Floats = self.price * self.cumulative / self.curve.bytes_per_s
        return cost


Stages = Sequence[Sequence[LinkLoad]]


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """What a request meets at the GPU: `queue_s` of prefill before it, the price of a second, and whether the engine
    computes while layers are still being loaded."""

    queue_s: float = 0.0
    price: float = 0.0
    overlap: bool = False


IDLE = GpuLoad()


@dataclass(frozen=True, slots=True)
class Cut:
    """The gate's answer: load the first `blocks` of `found` blocks, and what that was estimated at.

    `ttft_s` includes the queue at the GPU; `recompute_all_s` is what loading nothing would leave to it. Both sides are
    0 where it is not known yet what recompute costs.
    """

    blocks: int
    load_s: float
    recompute_s: float
    found: int = 0
    ttft_s: float = 0.0
    queue_s: float = 0.0
    recompute_all_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of the load that nothing hides: neither the queue nor, with overlap, the compute."""
        return max(0.0, self.ttft_s - self.queue_s - self.recompute_s)

    @property
    def effective_hit(self) -> float:
        """1 - T(cut) / T(nothing loaded): the hit rate that counts. It is below the share of tokens hit, because
        attention over what was loaded is still computed, and loading takes time."""
        nothing_s = self.queue_s + self.recompute_all_s
        return 1.0 - self.ttft_s / nothing_s if nothing_s > 0 else 0.0


def work_left(hit: float) -> tuple[float, float]:
    """Shares of linear and of attention work left when the first `hit` of a prompt is in the cache: 1 - h and 1 - h²
    (a token attends to all before it, so the last half of a prompt is three quarters of its attention)."""
    return 1.0 - hit, 1.0 - hit * hit


def load_seconds(stages: Stages, n: int) -> Floats:
    """Until every cut of 0…n blocks is loaded: the slowest link of each stage, stages added up."""
    total: Floats = np.zeros(n + 1)
    for stage in stages:
        slowest: Floats = np.zeros(n + 1)
        for link in stage:
            np.maximum(slowest, link.seconds(), out=slowest)
        total += slowest
    return total


def recompute_by_cut(
    prefill: PrefillModel, start_token: int, block_tokens: int, prompt_tokens: int, n: int
) -> Floats | None:
    """R(k) for cuts of 0…n blocks found after `start_token`; None where too little was seen to say."""
    if not prefill.knows(prompt_tokens - start_token):
        return None
    starts = np.minimum(start_token + block_tokens * np.arange(n + 1), prompt_tokens)
    return prefill.seconds_from(starts, prompt_tokens)


def choose_cut(stages: Stages, recompute: Floats | None, n: int, gpu: GpuLoad = IDLE, whole: bool = False) -> Cut:
    """How many of `n` blocks found to load; with `whole`, all of them or none.

    `recompute` is R(k) for 0…n blocks. Where it is not known (None) everything is loaded: a cache that waits to be
    taught what it saves would save nothing until then.
    """
    load = load_seconds(stages, n)
    if recompute is None:
        return Cut(n, float(load[n]), 0.0, n)
    computed = gpu.queue_s + recompute
    ttft = np.maximum(load, computed) if gpu.overlap else np.maximum(load, gpu.queue_s) + recompute
    cost = ttft + gpu.price * recompute
    for stage in stages:
        for link in stage:
            if link.price:
                cost = cost + link.cost()
    if whole:
        cost[1:n] = np.inf
    best = n - int(np.argmin(cost[::-1]))
    return Cut(best, float(load[best]), float(recompute[best]), n, float(ttft[best]), gpu.queue_s, float(recompute[0]))


def patience_s(prefill: PrefillModel, start_token: int, stop_token: int, limit_s: float, conservative: bool) -> float:
    """How long a load of these tokens is waited for: twice what computing them takes, once in conservative mode, and
    `limit_s` at most. An estimate that the gate does not trust yet ends no load either."""
    recompute_s = float(prefill.seconds_from(np.array([start_token]), stop_token)[0])
    if recompute_s <= 0 or not prefill.knows(stop_token - start_token):
        return limit_s
    return min(limit_s, max(_LEAST_PATIENCE_S, (1.0 if conservative else 2.0) * recompute_s))


def may_start(remaining_load_s: float, compute_s: float) -> bool:
    """Whether a request whose layers load while it computes may be given to the GPU: only when what is left to load,
    the backlog of its links included, takes no longer than its compute. Started sooner, the GPU would stand still."""
    return remaining_load_s <= compute_s
