"""What a StorageCache decides by: the gate, write admission and conservative mode, as TierCache does.

Look-ahead and hints are not here: a storage level is asked about a request when the engine itself looks ahead, and
hears of no session (docs/sglang.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cache.geometry import Geometry
from kvtier.cache.level import Level
from kvtier.cache.paths import Run
from kvtier.cache.traffic import Traffic
from kvtier.cache.watch import Watch
from kvtier.cache.writing import Admission
from kvtier.clock import Clock
from kvtier.config import CacheConfig
from kvtier.index.tree import PrefixTree
from kvtier.observe.metrics import Recorder
from kvtier.place.gate import LinkLoad, PrefillModel, choose_cut, patience_s, recompute_by_cut
from kvtier.predict.forecast import Forecast

Levels = npt.NDArray[np.int8]
Mask = npt.NDArray[np.bool_]


class StoragePolicy:
    """Of one StorageCache, under its lock; `levels` is the cache's own list."""

    def __init__(
        self,
        config: CacheConfig,
        geometry: Geometry,
        tree: PrefixTree,
        levels: Sequence[Level],
        clock: Clock,
        recorder: Recorder,
        forecast: Forecast,
    ) -> None:
        self._config, self._geometry, self._levels, self._recorder = config, geometry, levels, recorder
        self._tree, self._clock = tree, clock
        self.prefill = PrefillModel()
        self.traffic = Traffic(clock, recorder, config.io_threads, [level.name for level in levels])
        # The engine owns memory, so no room of it is promised by us.
        self.watch = Watch(lambda: 0.0, self.traffic, recorder)
        self.admission = Admission(config, tree, forecast, self.prefill, geometry.groups)

    def worth_loading(self, depth: int, where: Levels) -> int:
        """How many of the blocks found, in `where` of the levels each, are faster to load than to compute."""
        n = len(where)
        if not n or not self._config.gate:
            return n
        size = self._geometry.block_tokens
        links = []  # read one after the other: `load` goes from level to level
        for index, level in enumerate(self._levels):
            here = np.cumsum(np.concatenate([[0], where == index])) * float(level.row_bytes * self._geometry.groups)
            if here[-1]:
                links.append([LinkLoad(level.curve(0), here, self.traffic.link_price(level.name))])
        # The prompt may go on after what was asked for: its last part is computed either way.
        recompute = recompute_by_cut(self.prefill, depth * size, size, (depth + n) * size, n)
        cut = choose_cut(links, recompute, n, self.traffic.gpu_now())
        self.traffic.decided("", depth * size, (depth + n) * size, cut)
        return cut.blocks

    def load_deadline_s(self, runs: Sequence[Run]) -> float:
        """How long a load of these blocks may take: in conservative mode, no longer than computing them."""
        limit_s, size = self._config.load_deadline_s, self._geometry.block_tokens
        if not runs or not self.watch.conservative:
            return limit_s
        start, stop = runs[0].depth * size, (runs[-1].depth + runs[-1].count) * size
        return patience_s(self.prefill, start, stop, limit_s, conservative=True)

    def waited(self, seconds: float) -> None:
        """A load took so long."""
        self.traffic.load_waits.add(seconds, self._clock.now())

    def worth_writing(self, level: Level, runs: Sequence[Run], missing: Mask) -> Mask:
        """Which rows of those missing in a level it takes now: nothing in conservative mode; what is worth its wear and
        room where that is asked for, decided once a chain."""
        if self.watch.conservative:
            self._recorder.add("kvtier_stores_refused", int(missing.sum()), level.name, "conservative")
            return np.zeros_like(missing)
        if not self.admission.by_value(level):
            return missing
        now, busy, taken = self._clock.now(), self.traffic.gpu_share(), missing.copy()
        for run in runs:
            path = self._tree.insert(run.chain)
            if missing[run.part].any():
                stop = self.admission.blocks(level, path, now, busy)
                taken[run.part][max(0, stop - run.depth) :] = False
        self._recorder.add("kvtier_stores_refused", int((missing & ~taken).sum()), level.name, "value")
        return taken

    def gauges(self) -> None:
        """Write the gauges to the recorder."""
        self.traffic.gauges()
        self._recorder.set("kvtier_conservative", float(self.watch.conservative))
