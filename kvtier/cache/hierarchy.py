"""The levels of one cache, fastest first, as they come and go. Decides nothing about blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.cache.attach import Arrival, Cleared, Leaving, arrivals, build, by_cost, pick, refuse_twice
from kvtier.cache.device import DeviceView
from kvtier.cache.geometry import Geometry
from kvtier.cache.level import Level
from kvtier.cache.recovery import Rebuild
from kvtier.clock import Clock
from kvtier.codec.registry import LOSSLESS
from kvtier.config import CacheConfig
from kvtier.index.residency import ABSENT, Residency
from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import Outcome, RequestContext
from kvtier.observe.metrics import Recorder
from kvtier.place.policy import EvictionPolicy, TierView, make_policy
from kvtier.predict.forecast import Forecast
from kvtier.tiers.protocol import Tier, TierProbe, is_shared


class Hierarchy:
    """Memory, the tiers below it and, where the engine lets us see it, the device. One control thread.

    The tiers are recovered at once; what they brought becomes visible by `recover`, when the rest of the cache is there
    to hear of it.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: Geometry,
        tree: PrefixTree,
        clock: Clock,
        recorder: Recorder,
        memory: Tier,
        lower: Sequence[Tier],
    ) -> None:
        self._config, self._geometry, self._clock, self._recorder = config, geometry, clock, recorder
        self._tree = tree
        arrived = arrivals(lower, recorder, geometry.groups)
        self.forecast = Forecast(tree, now=clock.now(), block_tokens=geometry.block_tokens)
        self.memory = self._level(memory, memory.stats().capacity_rows, memory.probe(), below=False)
        self.memory.lossy = self._is_lossy("dram")
        self._found = [self._rebuild(arrival) for arrival in arrived]
        self.lower = by_cost(rebuild.level for rebuild in self._found)
        self.device: DeviceView | None = None
        self._leaving = Leaving(tree)
        self._cleared = Cleared()

    @property
    def all(self) -> list[Level]:
        """Memory and the attached tiers below it."""
        return [self.memory, *self.lower]

    @property
    def leaving(self) -> list[Level]:
        """Detached levels that still end what they had begun."""
        return self._leaving.levels

    @property
    def lossy(self) -> bool:
        """Whether a tier keeps rows that do not come back bit for bit."""
        return any(level.lossy for level in self.all)

    def policies(self) -> list[EvictionPolicy]:
        """The policy of every level, the device's too."""
        below = [level.policy for level in self.all]
        return below if self.device is None else [*below, self.device.policy]

    def residencies(self) -> list[Residency]:
        """Where a block may still be, tiers that are leaving included."""
        below = [level.residency for level in (*self.all, *self._leaving.levels)]
        return below if self.device is None else [*below, self.device.residency]

    def recover(self) -> None:
        """Publish what the tiers brought from the last process."""
        for rebuild in self._found:
            rebuild.level.on_evict = self._evict_orphans
            rebuild.all()
            self.recovered(rebuild)
        self._found = []

    def attach(self, arrival: Arrival) -> Rebuild:
        """Take in a tier; returns its level with what is still to be published there. Raises ConfigError if one of its
        name is here."""
        self.refuse_twice(arrival.tier.name)
        rebuild = self._rebuild(arrival)
        rebuild.level.on_evict = self._evict_orphans
        self.lower = by_cost([*self.lower, rebuild.level])
        if self._cleared.missed(arrival.tier.name):
            rebuild.level.clear()
        return rebuild

    def recovered(self, rebuild: Rebuild) -> int:
        """Count the rows that came with a level, now that they are published; returns how many."""
        self._recorder.add("kvtier_recovered_rows", rebuild.kept, rebuild.level.name)
        return rebuild.kept

    def refuse_twice(self, name: str) -> None:
        """Raise ConfigError if a tier of this name is attached, or still on its way out."""
        refuse_twice([*self.all, *self._leaving.levels], name)

    def detach(self, name: str) -> Level:
        """A level is asked for nothing more; `step` closes it once nothing moves. Raises ConfigError for an unknown
        name. What memory holds is dropped where only this level had its head."""
        level = pick(self.lower, name)
        self.lower.remove(level)
        self._leaving.add(level)
        for segment in list(self._tree.segments()):
            if level.residency.extent(segment):
                self._evict_orphans(segment, 0)
        return level

    def attach_device(self, blocks: int, columns: int, row_bytes: int, in_use: Callable[[int], bool]) -> DeviceView:
        """From now on the engine's own pool is a level, too: see `DeviceView` for the arguments."""
        args = (self._tree, blocks, columns, row_bytes, in_use, self.policy, self._clock, self._recorder)
        self.device = DeviceView(*args)
        return self.device

    def adopt(self, chain: bytes) -> None:
        """Publish rows of the last process that waited for this prompt to name their place."""
        for level in self.lower:
            level.adopt(chain)

    def arrived(self, path: Sequence[Segment], context: RequestContext) -> None:
        """A request came for this path: the forecast and every policy hear of it."""
        now = self._clock.now()
        self.forecast.on_arrival(path, context, now)
        for policy in self.policies():
            policy.on_arrival(path, context, now)

    def finished(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome) -> None:
        """It will generate nothing more: its wait to be continued begins."""
        now = self._clock.now()
        self.forecast.on_finish(path, context, outcome, now)
        for policy in self.policies():
            policy.on_finish(path, context, outcome, now)

    def publish_in_memory(
        self, chain: bytes, group: int, blocks: npt.NDArray[np.intp], slots: npt.NDArray[np.int32], device_blocks: int
    ) -> None:
        """Publish memory rows whose heads may be in memory, in a lower level, or on the device."""
        match = self._tree.walk(chain)
        elsewhere = np.zeros(match.blocks, np.bool_)
        elsewhere[:device_blocks] = True
        for level in self.lower:
            elsewhere |= level.residency.slots_of(match)[:, group] != ABSENT
        self.memory.publish(chain, group, blocks, slots, elsewhere)

    def stalled(self, names: Collection[str]) -> None:
        """A transfer of these tiers has not come back in time."""
        for level in self.lower:
            if level.name in names:
                level.health.stalled()

    def clear(self) -> None:
        """Forget every row in every tier: those leaving, too, and those that come back later."""
        levels = [*self.all, *self._leaving.levels]
        for level in levels:
            level.clear()
        self._cleared.reset(levels)

    def step(self, idle: Callable[[Level], bool]) -> None:
        """Close detached levels that are idle. Costs nothing where none is leaving."""
        if self._leaving.levels:
            self._leaving.step(idle)

    def wait_for(self, name: str, step: Callable[[], None], wait_s: float) -> bool:
        """Repeat `step` until a detached level has gone. False after `wait_s`."""
        return self._leaving.wait(name, step, wait_s)

    def is_leaving(self, name: str) -> bool:
        """Whether a tier of this name was detached and still ends what it had begun."""
        return any(level.name == name for level in self._leaving.levels)

    def close(self) -> None:
        """Close every tier."""
        for level in (*self.all, *self._leaving.levels):
            level.tier.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError if the tree or a residency is broken. Costs a full traversal."""
        self._tree.check_integrity()
        for level in self.all:
            level.residency.check_integrity()

    def gauges(self) -> None:
        """Write the gauges of every level and of the tree to the recorder."""
        self._recorder.set("kvtier_segments", len(self._tree))
        self._recorder.set("kvtier_index_blocks", self._tree.blocks)
        for level in self.all:
            level.gauges()
        if self.device is not None:
            self.device.gauges()

    def policy(self, view: TierView) -> EvictionPolicy:
        """A new policy of the configured kind over this view."""
        return make_policy(self._config.policy, view, self.forecast)

    def _evict_orphans(self, segment: Segment, keep: int) -> None:
        """A lower level dropped blocks: what memory holds below them is out of reach unless memory or another level has
        them too."""
        have = max(keep, *(level.residency.extent(segment) for level in self.all))
        if have < segment.length:
            self.memory.evict_below(segment, have, "orphaned")

    def _rebuild(self, arrival: Arrival) -> Rebuild:
        level = self._level(arrival.tier, arrival.capacity_rows, arrival.cost, below=True)
        # What memory keeps encoded is encoded below it, too.
        level.lossy = self.memory.lossy or self._is_lossy(level.name)
        return Rebuild(self._tree, level, arrival)

    def _is_lossy(self, name: str) -> bool:
        return self._config.codecs.get(name, "raw") not in LOSSLESS

    def _level(self, tier: Tier, capacity_rows: int, probe: TierProbe, *, below: bool) -> Level:
        make = partial(
            Level,
            tier,
            self._tree,
            capacity_rows,
            self._geometry.groups,
            self._geometry.closed_groups,
            self.policy,
            self._clock,
            self._recorder,
            probe,
            # What lies in a shared tier is not this engine's alone to keep in order.
            strict=below and not is_shared(tier),
            below=below,
        )
        return build(self._tree, make)
