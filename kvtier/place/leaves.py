"""The candidates for eviction by worth: all held leaves while they are few, a sample of them beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.place.draw import Key
from kvtier.place.residency import Residency
from kvtier.predict.forecast import Forecast

EXACT_LEAVES = 512  # up to here every leaf is scored
SAMPLED_LEAVES = 192
_REMEMBERED = 64  # cheap ones of the last round, drawn again
_BATCH = 32


class LeafSample:
    """Orders the leaves of a residency by worth. Deterministic for a seed."""

    def __init__(self, forecast: Forecast, residency: Residency, seed: int) -> None:
        self._forecast = forecast
        self._residency = residency
        self._random = np.random.default_rng(seed)
        self._remembered: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def key_of(self, segment_id: int, now: float) -> Key:
        """Its place in the order of eviction."""
        return (self._forecast.worth_of(segment_id, now),)

    def draw(self, now: float) -> tuple[Iterator[tuple[Key, int]], Callable[[int], Key]]:
        """The candidates, least worth first, and the key function for parents that join them."""
        return self._ordered(now), lambda i: self.key_of(i, now)

    def _ordered(self, now: float) -> Iterator[tuple[Key, int]]:
        candidates = self._candidates()
        worth = self._forecast.worth(candidates, now)
        order = np.argsort(worth, kind="stable") if len(worth) <= 2 * _BATCH else np.argpartition(worth, _BATCH)
        if len(worth) > 2 * _BATCH:
            head, tail = order[:_BATCH], order[_BATCH:]
            order = head[np.argsort(worth[head], kind="stable")]
        else:
            tail = order[:0]
        for n in order.tolist():
            yield (float(worth[n]),), int(candidates[n])
        for n in tail[np.argsort(worth[tail], kind="stable")].tolist():
            yield (float(worth[n]),), int(candidates[n])

    def _candidates(self) -> npt.NDArray[np.int32]:
        return self._residency.leaves.copy()
