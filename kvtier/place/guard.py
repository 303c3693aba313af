"""The guard: never worse than leaf-first LRU, whatever the forecast believes.

Two shadow caches of the tier's capacity see the same requests: one evicts by recency, one by worth. They hold one
number per segment and no bytes. The tier follows the forecast only while the evidence is that it earns more hits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.draw import draw_victims
from kvtier.place.leaves import LeafSample
from kvtier.place.lru import LeafQueue, Recency
from kvtier.place.policy import TierView, Victim
from kvtier.place.residency import Residency
from kvtier.predict.forecast import Forecast

HALF_LIFE_REQUESTS = 3000.0


class Shadow:
    """A cache without bytes: a Holder from which everything may go."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.residency = Residency(tree)

    def extent(self, segment: Segment) -> int:
        return self.residency.extent(segment.id)

    def evictable_from(self, segment: Segment) -> int:
        return 0

    def rows(self, segment: Segment, start: int) -> int:
        return max(0, self.residency.extent(segment.id) - start)


class Guard:
    """Says which order to trust. Not thread-safe."""

    def __init__(self, view: TierView, forecast: Forecast, recency: Recency, seed: int) -> None:
        self.by_recency = Shadow(view.tree)
        self.by_worth = Shadow(view.tree)
        self._queue = LeafQueue(recency, self.by_recency.residency)
        self._sample = LeafSample(forecast, self.by_worth.residency, seed)
        self._keep = 0.5 ** (1.0 / HALF_LIFE_REQUESTS)
        self._lead = 0.0
        self._noise = 0.0
        self.trusts_forecast = False
        self.switches = 0

    def on_arrival(self, path: Sequence[Segment]) -> None:
        """Score both orders on a request's prompt, before it becomes resident."""
        ahead = self.by_worth.residency.leading(path) - self.by_recency.residency.leading(path)
        self._lead = self._lead * self._keep + ahead
        self._noise = self._noise * self._keep + ahead * ahead
        trust = self._lead >= 0 if self.trusts_forecast else self._lead > math.sqrt(self._noise)
        if trust != self.trusts_forecast:
            self.trusts_forecast = trust
            self.switches += 1

    def on_finish(self, path: Sequence[Segment], capacity_blocks: int, now: float) -> None:
        """The path becomes resident in both shadows; what exceeds the capacity leaves."""
        for shadow in (self.by_recency, self.by_worth):
            shadow.residency.hold(path)
        excess = self.by_recency.residency.blocks - capacity_blocks
        if excess > 0:
            with self._queue.drawing() as oldest:
                self._evict(
                    self.by_recency,
                    draw_victims(self.by_recency, self.by_recency.residency, oldest, self._queue.key_of, excess),
                )
        excess = self.by_worth.residency.blocks - capacity_blocks
        if excess > 0:
            shadow = self.by_worth
            victims = draw_victims(shadow, shadow.residency, *self._sample.draw(now), excess)
            self._evict(shadow, victims)

    def _evict(self, shadow: Shadow, victims: Sequence[Victim]) -> None:
        for victim in victims:
            shadow.residency.set_extent(victim.segment, victim.keep)
