"""Which finished requests are worth writing to a tier that wears: `write_admission = "value"`.

A request that runs is sure to be used, so its worth is known only when it has ended: a tier under admission gets its
copies then, in one piece, instead of block by block. The decision is place/admission.py's, once per chain. Off by
default: writing is cheap where the store queue is the lowest class, and a forecast that is wrong costs more than wear
(docs/placement.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.cache.level import Level
from kvtier.cache.request import CachedRequest
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.admission import AdmitByValue
from kvtier.place.gate import PrefillModel
from kvtier.place.prices import Prices
from kvtier.predict.forecast import Forecast

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache


def read_prices(path: str) -> Prices:
    """Prices from a file, the defaults without one. Raises ConfigError that says what is wrong with it."""
    if not path:
        return Prices()
    try:
        return Prices.from_json(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"prices_file {path} cannot be read: {error.strerror}") from error


class Admission:
    """Decides which part of a path a level takes. One writer."""

    def __init__(
        self,
        config: CacheConfig,
        tree: PrefixTree,
        forecast: Forecast,
        prefill: PrefillModel,
        groups: int,
    ) -> None:
        self.prices = read_prices(config.prices_file)
        self._on = config.write_admission == "value"
        self._tree, self._forecast, self._prefill, self._groups = tree, forecast, prefill, groups
        self._by_value: dict[str, AdmitByValue] = {}  # by tier: one that comes back finds what was decided for it

    def by_value(self, level: Level) -> bool:
        """Whether what this level takes is decided on by its value."""
        return self._on and self.prices.of(level.name).wear_per_gb > 0

    def blocks(self, level: Level, path: Sequence[Segment], now: float, gpu_busy: float) -> int:
        """Leading blocks of a path that a level takes."""
        admission = self._by_value.get(level.name) or self._admission(level)
        admission.busy = gpu_busy
        taken = admission.admit(path, now)
        return path[taken - 1].stop if taken else 0

    def _admission(self, level: Level) -> AdmitByValue:
        def recompute_s(start: int, stop: int) -> float:
            # Not known yet: everything is worth writing, as everything found is worth loading.
            known = self._prefill.knows(stop - start)
            return float(self._prefill.seconds_from(np.array([start]), stop)[0]) if known else math.inf

        admission = self._by_value[level.name] = AdmitByValue(
            self._tree,
            self._forecast,
            block_bytes=level.row_bytes * self._groups,
            recompute_s=recompute_s,
            prices=self.prices,
            tier=self.prices.of(level.name),
        )
        return admission


class Writing:
    """Write admission of one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._admission = Admission(cache.config, cache.tree, cache.forecast, cache.prefill, cache.groups)

    def waits_for_end(self, level: Level) -> bool:
        """Whether copies to this level are decided on when the request has ended."""
        return self._admission.by_value(level)

    def ended(self, request: CachedRequest, path: Sequence[Segment]) -> None:
        """The request ended: write down as much of its path as each level under admission takes."""
        cache, now = self._cache, self._cache.clock.now()
        for level in cache.lower:
            if not path or not self.waits_for_end(level):
                continue
            stop = path[-1].stop
            if not cache.hinted.is_shared(request.context.session_id):
                stop = self._admission.blocks(level, path, now, cache.traffic.gpu_share())
            if stop < path[-1].stop:
                refused = (path[-1].stop - stop) * cache.groups
                cache.recorder.add("kvtier_stores_refused", refused, level.name, "value")
            if stop:
                cache.storer.write_down(level, request.chain, stop, request.context.lossy)
