"""Eviction by worth: the segment with the least expected hits per block second goes first, leaf-first.

The tail just finished competes with everything else, so a policy that expects nothing of it lets it go at once
(implicit bypass). While the guard finds that leaf-first LRU does better, the tier is ordered by that instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import Outcome, RequestContext
from kvtier.place.draw import Key, draw_victims
from kvtier.place.guard import Guard
from kvtier.place.leaves import LeafSample
from kvtier.place.lru import LeafQueue, Recency, mirror_of
from kvtier.place.policy import TierView, Victim, register_policy
from kvtier.place.residency import Residency
from kvtier.predict.forecast import Forecast

_UNORDERED = 4  # so few segments that the shadow let go are all about to go: their order does not matter


class WorthPolicy:
    """Policy "kvtier". Not thread-safe: one control thread."""

    name = "kvtier"

    def __init__(
        self, view: TierView, forecast: Forecast | None = None, *, guarded: bool = True, seed: int = 0
    ) -> None:
        """With a `forecast` of the cache the caller feeds it; without, the policy makes and feeds its own."""
        self._view = view
        self._feeds = forecast is None
        self.forecast = forecast or Forecast(view.tree)
        self._recency = Recency(view.tree)
        self._residency = mirror_of(view)
        self._sample = LeafSample(self.forecast, self._residency, seed)
        self._queue = LeafQueue(self._recency, self._residency)
        self.guard = Guard(view, self.forecast, self._recency, seed) if guarded else None

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        if self._feeds:
            self.forecast.on_arrival(path, context, now)
        self._recency.touch(path)
        if self.guard is not None:
            self.guard.on_arrival(path)

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        if self._feeds:
            self.forecast.on_finish(path, context, outcome, now)
        self._recency.touch(path)
        if self.guard is not None:
            self.guard.on_finish(path, self._capacity_blocks(), now)

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        self._residency.set_extent(segment, self._view.extent(segment))

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        self._residency.set_extent(segment, self._view.extent(segment))

    def victims(self, rows: int, now: float) -> list[Victim]:
        if self.guard is None:
            return draw_victims(self._view, self._residency, *self._sample.draw(now), rows)
        if self.guard.trusts_forecast:
            return self._like_shadow(
                self.guard.by_worth.residency, rows, lambda i: self._sample.key_of(i, now), self._by_worth(now)
            )
        with self._queue.drawing() as oldest:
            return self._like_shadow(self.guard.by_recency.residency, rows, self._queue.key_of, oldest)

    def threshold(self, now: float) -> float:
        """Worth of the marginal resident: what a segment must be worth to stay in this tier. 0 while it is empty."""
        leaves = self._residency.leaves
        return float(self.forecast.worth(leaves, now).min()) if len(leaves) else 0.0

    def _by_worth(self, now: float) -> Iterator[tuple[Key, int]]:
        order, _ = self._sample.draw(now)
        yield from order

    def _like_shadow(
        self, shadow: Residency, rows: int, order_of: Callable[[int], Key], order: Iterator[tuple[Key, int]]
    ) -> list[Victim]:
        """First what the trusted shadow no longer holds, then in its order. Where both always agree, as they do a while
        after a change of sides, nothing needs to be scored."""

        def key_of(i: int) -> Key:
            return (float(shadow.extent(i) >= self._residency.extent(i)), *order_of(i))

        def at_first(segment: Segment) -> tuple[int, Key]:
            i = segment.id
            kept = shadow.extent(i)
            return (kept, (1.0, *order_of(i))) if 0 < kept < self._residency.extent(i) else (0, ())

        def candidates() -> Iterator[tuple[Key, int]]:
            leaves = self._residency.leaves
            outside = leaves[shadow.extents(leaves) < self._residency.extents(leaves)].tolist()
            # A few are all about to go, and their order does not matter.
            yield from (
                sorted((key_of(i), i) for i in outside) if len(outside) > _UNORDERED else (((0.0,), i) for i in outside)
            )
            for key, i in order:
                yield (1.0, *key), i

        return draw_victims(self._view, self._residency, candidates(), key_of, rows, at_first)

    def _capacity_blocks(self) -> int:
        """The tier's capacity in blocks, by the rows its blocks take on average."""
        view = self._view
        rows, blocks = view.resident_rows, self._residency.blocks
        if not rows or rows == blocks:
            return view.capacity_rows
        return max(1, view.capacity_rows * blocks // rows)


def _make(view: TierView, forecast: Forecast | None) -> WorthPolicy:
    return WorthPolicy(view, forecast)


register_policy("kvtier", _make)
