"""What StorageCache asks shared tiers about a call's blocks; the calling thread waits, within a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.discovery import Discovery, Question
from kvtier.cache.level import Level
from kvtier.cache.paths import Run
from kvtier.clock import Clock
from kvtier.config import CacheConfig
from kvtier.observe.metrics import Recorder
from kvtier.tiers.protocol import RowId, Slots

if TYPE_CHECKING:
    from kvtier.cache.geometry import Geometry


class Inquiry:
    """Discovery for one StorageCache. All but `wait` under the cache's lock."""

    def __init__(
        self,
        levels: Sequence[Level],
        clock: Clock,
        recorder: Recorder,
        geometry: Geometry,
        config: CacheConfig,
    ) -> None:
        self._groups = geometry.closed_groups
        self._deadline_s = config.discover_deadline_s
        self._discovery = Discovery(levels, clock, recorder)
        self.attach, self.detach = self._discovery.attach, self._discovery.detach

    def ask(self, runs: list[Run], first: int, stop: int) -> list[Question]:
        """Ask shared tiers about blocks [first, stop) of a call that is made of `runs`."""
        if not self._discovery.levels or self._deadline_s == 0:
            return []
        run_of = [run for run in runs for _ in range(run.count)]

        def row_of(block: int, group: int) -> RowId:
            return run_of[block].row_id(block - run_of[block].start, group)

        def publish(level: Level, group: int, blocks: npt.NDArray[np.intp], slots: Slots) -> None:
            for run in runs:
                mine = (blocks >= run.start) & (blocks < run.start + run.count)
                if mine.any():
                    depths = blocks[mine] - run.start + run.depth
                    # What comes before is in some tier, or in the engine's memory.
                    level.publish(run.chain, group, depths, slots[mine], np.ones(int(depths[0]), np.bool_))

        return self._discovery.ask(first, stop, self._groups, (), row_of, publish)

    def wait(self, asked: list[Question]) -> list[Question]:
        """Wait for the answers, `discover_deadline_s` in all; returns the questions that were not answered."""
        deadline = time.monotonic() + self._deadline_s
        return [question for question in asked if not question.ended.wait(max(0.0, deadline - time.monotonic()))]

    def take_in(self, late: list[Question]) -> None:
        """Adopt what was found, by this call or another; the tiers that owe an answer hear of it."""
        self._discovery.collect()
        for question in late:
            self._discovery.gave_up(question, blamed=True)

    def forget(self) -> None:
        """Nothing that was stored before is found again."""
        self._discovery.forget()

    def close(self) -> None:
        """Ask no more."""
        self._discovery.close()
