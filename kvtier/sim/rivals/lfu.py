"""LFU with dynamic ageing (Arlitt et al., 2000): key = uses while resident + the key of the latest victim.

Without the second term a once popular prompt would never leave.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import RequestContext
from kvtier.place.policy import TierView, Victim
from kvtier.sim.rivals.leafwise import LeafwisePolicy, lowest_first


class AgedLFU(LeafwisePolicy):
    """Evicts the lowest key first, the less recent of equal keys before the other."""

    name = "lfu"

    def __init__(self, view: TierView) -> None:
        super().__init__(view)
        self._age = 0
        self._clock = 0
        self._uses: dict[int, int] = {}
        self._key: dict[int, tuple[int, int]] = {}

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        for segment in reversed(path):
            self._clock += 1
            self._uses[segment.id] = self._uses.get(segment.id, 0) + 1
            self._key[segment.id] = (self._uses[segment.id] + self._age, self._clock)

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        self._age = max(self._age, self._key[segment.id][0])
        if not self.view.extent(segment):
            self._uses.pop(segment.id, None)

    def on_split(self, head: Segment, tail: Segment) -> None:
        if tail.id in self._key:
            self._key[head.id] = self._key[tail.id]
        if tail.id in self._uses:
            self._uses[head.id] = self._uses[tail.id]

    def on_remove(self, segment: Segment) -> None:
        self._key.pop(segment.id, None)
        self._uses.pop(segment.id, None)

    def victims(self, rows: int, now: float) -> list[Victim]:
        return lowest_first(self.view, self._key.__getitem__, rows)
