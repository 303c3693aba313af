"""What TierCache asks shared tiers about a prompt, and how long a request waits for the answer.

A question is put when a request arrives, so that it is answered while the request queues. A lookup waits for it no
longer than `discover_deadline_s`, nor (with the gate on) longer than computing the prompt would take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.discovery import Discovery
from kvtier.cache.manifest import row_id
from kvtier.cache.request import CachedRequest
from kvtier.index.residency import ABSENT
from kvtier.tiers.protocol import RowId, Slots

if TYPE_CHECKING:
    from kvtier.cache.level import Level
    from kvtier.cache.tier_cache import TierCache


class Seeker:
    """Discovery for one TierCache. One control thread; never blocks."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self._discovery = Discovery(cache.lower, cache.clock, cache.recorder)
        self._others = tuple(group for group, _ in cache.window_groups)

    def attach(self, level: Level) -> None:
        """A tier came."""
        self._discovery.attach(level)

    def detach(self, level: Level) -> None:
        """A tier goes."""
        self._discovery.detach(level)

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return self._discovery.busy

    def ask(self, request: CachedRequest) -> None:
        """Ask about the blocks of a new request beyond those that can be reached already."""
        if not self._discovery.levels or self._cache.config.discover_deadline_s == 0:
            return
        chain, first = request.chain, self._reachable(request)

        def row_of(block: int, group: int) -> RowId:
            return row_id(chain, block, group)

        def publish_in(level: Level, group: int, blocks: npt.NDArray[np.intp], slots: Slots) -> None:
            # What comes before the first block asked for is in some tier, or on the device.
            level.publish(chain, group, blocks, slots, np.ones(first, np.bool_))

        request.asking = self._discovery.ask(
            first, request.blocks, self._cache.closed_groups, self._others, row_of, publish_in, request
        )
        request.asked_s = self._cache.clock.now()

    def awaits(self, request: CachedRequest, start: int) -> bool:
        """Whether a lookup after the first `start` blocks shall be repeated later. Gives up when the time has come."""
        self.take_in()
        if not request.asking or start >= request.blocks:
            return False
        cache = self._cache
        waited_s = cache.clock.now() - request.asked_s
        begin = np.array([start * cache.block_tokens])
        recompute_s = float(cache.prefill.seconds_from(begin, request.context.prompt_tokens)[0])
        limit_s = cache.config.discover_deadline_s
        worth_s = min(limit_s, recompute_s) if cache.config.gate and recompute_s > 0 else limit_s
        if waited_s < worth_s:
            return True
        for question in request.asking:
            self._discovery.gave_up(question, blamed=waited_s >= limit_s)
        request.asking.clear()
        return False

    def take_in(self) -> None:
        """Adopt what was found since the last call."""
        for question in self._discovery.collect():
            request = question.tag
            assert isinstance(request, CachedRequest)
            if question in request.asking:
                request.asking.remove(question)
            # Someone has seen these blocks: if they are missed after all, it is not for being new.
            request.known_blocks = max(request.known_blocks, question.reach)
            if question.found and not request.ended and request.plan is None:
                self._cache.look_ahead.arrived(request)  # it was looked ahead for before there was anything to see
            self._cache.epoch += 1

    def reset(self) -> None:
        """Nothing that was stored before is found again."""
        self._discovery.forget()

    def close(self) -> None:
        """Ask no more."""
        self._discovery.close()

    def _reachable(self, request: CachedRequest) -> int:
        """Leading blocks that are whole in memory or a lower tier."""
        cache = self._cache
        match = cache.tree.walk(request.chain)
        groups = list(cache.closed_groups or range(cache.groups))
        here = np.zeros((match.blocks, cache.groups), np.bool_)
        for level in (cache.memory, *cache.lower):
            here |= level.residency.slots_of(match) != ABSENT
        holes = np.flatnonzero(~here[:, groups].all(axis=1))
        return int(holes[0]) if holes.size else match.blocks
