"""Which tool an agent calls next, how long tools take and how much they add to the prompt.

A first-order chain: P(next | previous) from counts, backing off to the global frequencies with the weight of a few
calls, so that a tool never seen before is predicted by what tools do on the whole. Counts decay, so a change of
workload is followed. Per tool: time until the session is back, and tokens its result adds (mean, variance, p99).

Source: the main paper's tool-transition predictor (first-order P(tool_j | tool_i) with per-tool KV statistics).
"""

from __future__ import annotations

import math

import numpy as np

BACKOFF_CALLS = 4.0
HALF_LIFE_CALLS = 2000.0
MAX_TOOLS = 512
_OTHER = "(other)"


class Spread:
    """Running mean, variance and 99th percentile of a non-negative quantity, in constant space.

    Mean and variance are Welford's. The percentile comes from a histogram of logarithms (relative error ≤ 5 %).
    """

    __slots__ = ("_m2", "_tops", "count", "mean")
    _PER_OCTAVE = 8

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._m2 = 0.0
        self._tops: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Take in one value (≥ 0)."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._m2 += delta * (value - self.mean)
        cell = math.floor(math.log2(max(value, 1e-6)) * self._PER_OCTAVE)
        self._tops[cell] = self._tops.get(cell, 0) + 1

    @property
    def variance(self) -> float:
        """Sample variance, 0 below two values."""
        return self._m2 / (self.count - 1) if self.count > 1 else 0.0

    def quantile(self, share: float) -> float:
        """The value below which `share` of all values lie, 0 if there are none."""
        left = share * self.count
        for cell in sorted(self._tops):
            left -= self._tops[cell]
            if left <= 0:
                return float(2.0 ** ((cell + 0.5) / self._PER_OCTAVE))
        return 0.0


class ToolChain:
    """Counts of calls and returns. Not thread-safe. At most MAX_TOOLS names; later ones share one entry."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self._follow = np.zeros((8, 8))  # [previous, next], decayed counts
        self._total = np.zeros(8)
        self._scale = 1.0  # counts are kept multiplied by this; it grows instead of decaying them all
        self.return_s: list[Spread] = []
        self.added_tokens: list[Spread] = []
        self._all_return_s = Spread()
        self._all_added_tokens = Spread()

    @property
    def names(self) -> list[str]:
        """Tools by id."""
        return list(self._names)

    def id_of(self, name: str) -> int:
        """The dense id of a tool; a new one if the name is new."""
        known = self._ids.get(name)
        if known is not None:
            return known
        if len(self._names) >= MAX_TOOLS - 1 and name != _OTHER:
            return self.id_of(_OTHER)
        self._ids[name] = len(self._names)
        self._names.append(name)
        self.return_s.append(Spread())
        self.added_tokens.append(Spread())
        n = len(self._total)
        if len(self._names) > n:
            self._follow = np.pad(self._follow, ((0, n), (0, n)))
            self._total = np.pad(self._total, (0, n))
        return self._ids[name]

    def observe_call(self, previous: int, tool: int) -> None:
        """`tool` was called after `previous` (-1: the first call, or not known)."""
        self._scale *= 2.0 ** (1.0 / HALF_LIFE_CALLS)
        if self._scale > 1e9:
            self._follow /= self._scale
            self._total /= self._scale
            self._scale = 1.0
        self._total[tool] += self._scale
        if previous >= 0:
            self._follow[previous, tool] += self._scale

    def observe_return(self, tool: int, after_s: float, added_tokens: int) -> None:
        """The session that had called `tool` came back with a prompt longer by `added_tokens`."""
        self.return_s[tool].add(after_s)
        self.added_tokens[tool].add(added_tokens)
        self._all_return_s.add(after_s)
        self._all_added_tokens.add(added_tokens)

    def next_tools(self, previous: int) -> list[tuple[str, float]]:
        """P(next tool | previous), likeliest first. Empty before the first call."""
        n = len(self._names)
        total = self._total[:n]
        if not n or not total.sum():
            return []
        overall = total / total.sum()
        counts = self._follow[previous, :n] / self._scale if previous >= 0 else np.zeros(n)
        share = (counts + BACKOFF_CALLS * overall) / (counts.sum() + BACKOFF_CALLS)
        order = np.argsort(-share, kind="stable")
        return [(self._names[i], float(share[i])) for i in order]

    def expected_return_s(self, tool: int) -> float:
        """Geometric-ish expectation of the return time: the tool's median, drawn to all tools' while rarely seen.

        Negative while nothing is known.
        """
        overall = self._all_return_s
        if not overall.count:
            return -1.0
        own = self.return_s[tool]
        general = math.log2(max(overall.quantile(0.5), 0.25))
        if not own.count:
            return float(2.0**general)
        special = math.log2(max(own.quantile(0.5), 0.25))
        weight = own.count / (own.count + BACKOFF_CALLS)
        return float(2.0 ** (general + weight * (special - general)))

    def expected_added_tokens(self, tool: int) -> tuple[float, float, float]:
        """(mean, variance, p99) of the tokens a result of `tool` adds, of all tools while it is new."""
        own = self.added_tokens[tool] if 0 <= tool < len(self._names) else self._all_added_tokens
        spread = own if own.count else self._all_added_tokens
        return spread.mean, spread.variance, spread.quantile(0.99)
