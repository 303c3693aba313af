"""Exact exponential moving average of use, the baseline of many predictive caches.

Each request multiplies every segment's score by 1 - α and adds α to those it uses. Ranking decayed scores in a heap
picks wrong victims, because scores stored at different times are not comparable; their logarithm at a common origin,
K = ln S + t·(-ln(1 - α)), is, at any time. With α = 0.2 and room for several prompts this is LRU: one more recent use
outweighs any number of older ones within a few requests. In a cache smaller than a prompt or two it differs, because
often used heads outrank the tail just inserted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import RequestContext
from kvtier.place.policy import TierView, Victim
from kvtier.sim.rivals.leafwise import LeafwisePolicy, lowest_first


class ExactEMA(LeafwisePolicy):
    """Evicts the lowest average first. The average outlives an eviction."""

    name = "ema"

    def __init__(self, view: TierView, alpha: float = 0.2) -> None:
        super().__init__(view)
        self._gain = math.log(alpha)
        self._rate = -math.log1p(-alpha)
        self._requests = 0
        self._key: dict[int, float] = {}

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        self._requests += 1
        fresh = self._gain + self._requests * self._rate
        for segment in path:
            known = self._key.get(segment.id)
            # ln(e^known + e^fresh), without overflow: fresh grows with every request.
            self._key[segment.id] = fresh if known is None else fresh + math.log1p(math.exp(known - fresh))

    def on_split(self, head: Segment, tail: Segment) -> None:
        if tail.id in self._key:
            self._key[head.id] = self._key[tail.id]

    def on_remove(self, segment: Segment) -> None:
        self._key.pop(segment.id, None)

    def victims(self, rows: int, now: float) -> list[Victim]:
        return lowest_first(self.view, self._key.__getitem__, rows)
