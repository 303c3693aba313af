"""Write admission: which part of a finished request's path is worth writing to a tier that wears or is short of room.

The decision is made once per chain and kept: deciding block by block orphans tails (what was written below a block
that was not can never be hit). So the answer is always a leading part of the path. Segments that several sessions
share are always written.

Prices are configuration with documented defaults (place/prices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.prices import Prices, TierPrice
from kvtier.predict.forecast import Forecast

_HOUR_S = 3600.0


class WriteAdmission(Protocol):
    """Decides what a tier takes in."""

    def admit(self, path: Sequence[Segment], now: float) -> int:
        """How many leading segments of `path` may be written. Called when a request has ended."""
        ...


class AlwaysAdmit:
    """Write-through: right wherever writing costs neither wear nor room that something better needs."""

    def admit(self, path: Sequence[Segment], now: float) -> int:
        """All of them."""
        return len(path)


class AdmitByValue:
    """Admit where expected saving exceeds wear and rent: P(reuse here) · recompute / (1 - busy) · price of the GPU >
    bytes · (price of wear + price of room · time held). A TreeListener; one writer."""

    def __init__(
        self,
        tree: PrefixTree,
        forecast: Forecast,
        *,
        block_bytes: int,
        recompute_s: Callable[[int, int], float],
        prices: Prices | None = None,
        tier: TierPrice | None = None,
        shielded_s: float = 60.0,
        horizon_s: float = 4 * _HOUR_S,
        hold_s: float = _HOUR_S,
    ) -> None:
        """`tier` is what this medium costs (default: NVMe's price). `recompute_s(start, stop)`: seconds to compute
        those tokens of a prompt. A return within `shielded_s` is served by a faster tier and earns nothing here; none
        is expected after `horizon_s`. `hold_s`: how long what is written stays on average; `shielded_s` and `hold_s`
        are the tiers' eviction ages, for the owner to keep up."""
        self._forecast = forecast
        self._block_bytes = block_bytes
        self._recompute_s = recompute_s
        self.prices = prices or Prices()
        self.tier = tier or self.prices.of("nvme")
        self.shielded_s = shielded_s
        self._horizon_s = horizon_s
        self.hold_s = hold_s
        self.busy = 0.0  # share of GPU time in use, kept up to date by the owner
        self._decided: dict[int, bool] = {}
        tree.listen(self)

    def admit(self, path: Sequence[Segment], now: float) -> int:
        """The longest leading part of `path` that was admitted before or is worth it now."""
        for n, segment in enumerate(path):
            if self._forecast.sessions.is_shared(segment):
                continue
            decided = self._decided.get(segment.id)
            if decided is None:
                above = path[n - 1] if n else None
                inherited = None if above is None else self._decided.get(above.id)
                decided = self._is_worth_it(segment, path[-1], now) if inherited is None else inherited
                self._decided[segment.id] = decided
            if not decided:
                return n
        return len(path)

    def threshold(self, tokens: int, start_token: int = 0) -> float:
        """The reuse probability above which a chain of so many tokens is admitted: the tier's implied threshold."""
        blocks = tokens / self._forecast.block_tokens
        saved = self.prices.compute(self._recompute_s(start_token, start_token + tokens)) / (1.0 - min(self.busy, 0.9))
        cost = self.tier.write(blocks * self._block_bytes, self.hold_s)
        return cost / saved if saved > 0 else float("inf")

    def _is_worth_it(self, first: Segment, last: Segment, now: float) -> bool:
        ids = np.array([last.id], np.int32)
        later = float(self._forecast.return_probability(ids, now, self._horizon_s, at_age=0.0)[0])
        soon = float(self._forecast.return_probability(ids, now, self.shielded_s, at_age=0.0)[0])
        per_block = self._forecast.block_tokens
        tokens = (last.stop - first.depth) * per_block
        return later - soon > self.threshold(tokens, first.depth * per_block)

    def on_create(self, segment: Segment) -> None:
        self._decided.pop(segment.id, None)

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        decided = self._decided.get(tail.id)
        if decided is not None:
            self._decided[head.id] = decided

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        self._decided.pop(segment.id, None)
