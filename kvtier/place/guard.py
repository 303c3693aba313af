"""The guard: never worse than leaf-first LRU, whatever the forecast believes.

Two shadow caches of the tier's capacity see the same requests: one evicts by recency, one by worth. They hold one
number per segment and no bytes. The running lead of one over the other, in hit blocks, decides which order the tier
follows. A change of mind needs the lead to have turned by more than its own noise since its last extreme, so that both
a forecast that was never good and one that has gone bad are left behind, and neither is flattered by old merits.

A tier of memory starts with the forecast: its prior is LRU (predict/hazard.py), so a cold start costs nothing. A large
tier starts with LRU: where a good part of all that returns fits, a forecast has little to win and must earn it first.
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
DEVIATIONS = 1.5  # of the lead's noise, by which it must turn
LARGE_TIERS = frozenset({"nvme", "pool", "shared_fs"})  # usually more than a fifth of the footprint


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

    def evict(self, victims: Sequence[Victim]) -> None:
        """Drop what was drawn, children first."""
        for victim in victims:
            self.residency.set_extent(victim.segment, victim.keep)


class Guard:
    """Says which order to trust. Not thread-safe."""

    def __init__(self, view: TierView, forecast: Forecast, recency: Recency, seed: int) -> None:
        self.by_recency = Shadow(view.tree)
        self.by_worth = Shadow(view.tree)
        self._queue = LeafQueue(recency, self.by_recency.residency)
        self._sample = LeafSample(forecast, self.by_worth.residency, seed)
        self._keep = 0.5 ** (1.0 / HALF_LIFE_REQUESTS)
        self._lead = 0.0
        self._squares = 0.0
        self._extreme = 0.0  # of the lead since the last change of mind: highest while trusting, else lowest
        self.trusts_forecast = view.name not in LARGE_TIERS
        self.switches = 0

    @property
    def nbytes(self) -> int:
        """Bytes held by the shadows."""
        return self.by_recency.residency.nbytes + self.by_worth.residency.nbytes

    @property
    def lead_blocks(self) -> float:
        """Decayed sum of hit blocks by which eviction by worth is ahead of LRU."""
        return self._lead

    def on_arrival(self, path: Sequence[Segment]) -> None:
        """Score both orders on a request's prompt, before it becomes resident."""
        self.settle(self.by_worth.residency.leading(path) - self.by_recency.residency.leading(path))

    def settle(self, ahead: int) -> None:
        """On one request the order by worth hit so many blocks more than LRU."""
        self._lead = self._lead * self._keep + ahead
        self._squares = self._squares * self._keep + ahead * ahead
        self._extreme *= self._keep
        margin = DEVIATIONS * math.sqrt(self._squares)
        if self.trusts_forecast:
            self._extreme = max(self._extreme, self._lead)
            turned = self._extreme - self._lead > margin
        else:
            self._extreme = min(self._extreme, self._lead)
            turned = self._lead - self._extreme > margin
        if turned:
            self.trusts_forecast = not self.trusts_forecast
            self._extreme = self._lead
            self.switches += 1

    def on_finish(self, path: Sequence[Segment], capacity_blocks: int, now: float) -> None:
        """The path becomes resident in both shadows; what exceeds the capacity leaves."""
        lru, worth = self.by_recency, self.by_worth
        lru.residency.hold(path)
        excess = lru.residency.blocks - capacity_blocks
        if excess > 0:
            with self._queue.drawing() as oldest:
                victims = draw_victims(lru, lru.residency, oldest, self._queue.key_of, excess)
            lru.evict(victims)
        worth.residency.hold(path)
        excess = worth.residency.blocks - capacity_blocks
        if excess > 0:
            worth.evict(draw_victims(worth, worth.residency, *self._sample.draw(now), excess))
