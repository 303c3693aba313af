"""The candidates for eviction by worth: all held leaves while they are few, a sample of them beyond.

A sample is drawn anew each round and joined by the cheapest of the rounds before and by the newest leaves, so that what
is cheap is found soon and the tail just inserted always competes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.place.draw import Key
from kvtier.place.residency import Residency
from kvtier.predict.forecast import Forecast

EXACT_LEAVES = 2048  # up to here every leaf is scored (about 0.1 ms for so many)
SAMPLED_LEAVES = 384
_REMEMBERED = 64  # cheapest of the last round
_NEWEST = 8
_SORTED_AT_ONCE = 32

Ids = npt.NDArray[np.int32]


class LeafSample:
    """Orders the leaves of a residency by worth. Deterministic for a seed."""

    def __init__(self, forecast: Forecast, residency: Residency, seed: int) -> None:
        self._forecast = forecast
        self._residency = residency
        self._random = np.random.default_rng(seed)
        self._remembered: list[int] = []

    def key_of(self, segment_id: int, now: float) -> Key:
        """Its place in the order of eviction."""
        return (self._forecast.worth_of(segment_id, now),)

    def draw(self, now: float) -> tuple[Iterator[tuple[Key, int]], Callable[[int], Key]]:
        """The leaves, least worth first, and the key function for parents that join them. Beyond EXACT_LEAVES the
        sample comes first, and everything else only if the sample was not enough."""
        return self._ordered(now), lambda i: self.key_of(i, now)

    def _ordered(self, now: float) -> Iterator[tuple[Key, int]]:
        leaves = self._residency.leaves.copy()
        if len(leaves) <= EXACT_LEAVES:
            yield from self._cheapest_first(leaves, now)
            return
        sample = self._sample(leaves)
        yield from self._cheapest_first(sample, now, remember=True)
        yield from self._cheapest_first(np.setdiff1d(leaves, sample, assume_unique=True), now)

    def _cheapest_first(self, ids: Ids, now: float, remember: bool = False) -> Iterator[tuple[Key, int]]:
        """Sorts a few at first: seldom more are asked for."""
        worth = self._forecast.worth(ids, now)
        few = min(len(ids), _SORTED_AT_ONCE)
        part = np.argpartition(worth, few) if few < len(ids) else np.arange(len(ids))
        if remember:
            self._remembered = ids[np.argsort(worth)[:_REMEMBERED]].tolist()
        for some in (part[:few], part[few:]):
            for n in some[np.argsort(worth[some], kind="stable")].tolist():
                yield (float(worth[n]),), int(ids[n])

    def _sample(self, leaves: Ids) -> Ids:
        drawn = leaves[self._random.integers(0, len(leaves), SAMPLED_LEAVES)]
        still = [i for i in self._remembered if self._residency.is_leaf(i)]
        sample: Ids = np.unique(np.concatenate([drawn, np.array(still, np.int32), leaves[-_NEWEST:]]))
        return sample
