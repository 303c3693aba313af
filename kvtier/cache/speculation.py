"""Speculative promotion, with `look_ahead: "speculation"`: what the forecast, or the tool that runs, says will be back
within seconds comes up to memory while nobody else wants anything.

`place/promotion.py` chooses: what is worth more than what it displaces, within a tenth of the bandwidth of a tier, and
nothing while too little of what was brought is used. Here are the candidates: leaves of the fastest tier below whose
end is not in memory, by their survival curve; and what calls of the tool likely to come next have used, by the tool
chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nlargest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvtier.cache.level import Level
from kvtier.cache.mover import Urgency
from kvtier.cache.request import CachedRequest
from kvtier.index.tree import Segment
from kvtier.model.keys import KEY_BYTES, Chain
from kvtier.model.request import RequestContext
from kvtier.place.promotion import (
    ByteBudget,
    Candidate,
    Promoter,
    PromotionOptions,
    next_contexts,
    returns_in_window,
)
from kvtier.place.worth import WorthPolicy

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

_TICK_S = 2.0
_LOOKED_AT, _FETCHED_AT_ONCE = 128, 4
"""Leaves looked at in a tick, those that came last, and of them those fetched, each by a walk of its whole path: more
would be work on the engine's thread."""
_SEGMENTS_A_TOOL = 64


class Speculation:
    """Of one TierCache. One control thread. A TreeListener where it is on."""

    def __init__(self, cache: TierCache, options: PromotionOptions | None = None) -> None:
        self._cache = cache
        self.on = cache.config.look_ahead == "speculation"
        self.promoter = Promoter(options)
        self._budgets = WeakKeyDictionary[Level, ByteBudget]()
        self._contexts: dict[str, OrderedDict[int, None]] = {}
        self._needed: dict[int, tuple[float, float]] = {}  # segment -> (probability, until)
        self._fetching: list[CachedRequest] = []
        self._brought: dict[int, int] = {}  # rows brought up and not used yet, by segment
        self._next_s = 0.0
        if self.on:
            cache.tree.listen(self)

    def arrived(self, path: Sequence[Segment], context: RequestContext) -> None:
        """A request came for this path, perhaps with what a tool has answered."""
        if not self.on:
            return
        for segment in path:
            self.promoter.switch.used(segment.id)
            rows = self._brought.pop(segment.id, 0)
            self._cache.recorder.add("kvtier_prefetched_rows_used", rows, "speculation")
        if context.tool:
            self._learn(context.tool, path)
            self._expect(context.tool)

    def tick(self, now: float) -> None:
        """Called every step; does something every other second, if there is nothing better to do."""
        if not self.on or now < self._next_s:
            return
        self._next_s = now + _TICK_S
        self._let_go_landed()
        level = next((level for level in self._cache.lower if level.health.usable()), None)
        if level is None or self._fetching or not self._idle():
            return
        budget = self._budgets.get(level)
        if budget is None:
            share = self.promoter.options.share * level.health.read.bytes_per_s
            budget = self._budgets[level] = ByteBudget(share, now, burst_s=_TICK_S)
        block_bytes = level.row_bytes * self._cache.groups
        saved_s = level.curve(0).seconds(np.array([float(block_bytes)]))[0]
        candidates = self._candidates(level, block_bytes, float(saved_s), now)
        for chosen in self.promoter.plan(candidates, self._marginal(now) * float(saved_s), budget, now, idle=True):
            self._fetch(self._cache.tree.segment(chosen.segment_id), level, now)

    def clear(self) -> None:
        """Everything is forgotten."""
        for keeper in self._fetching:
            self._cache.loader.forget(keeper)
            self._cache.loader.release_hold(keeper)
        self._fetching.clear()
        self._brought.clear()

    # --- what is learned of tools -------------------------------------------------------------------------------

    def _learn(self, tool: str, path: Sequence[Segment]) -> None:
        """The answer of a tool came with this path: what several sessions share of it, its next call needs, too."""
        forecast = self._cache.forecast
        used = self._contexts.setdefault(forecast.tools.names[forecast.tools.id_of(tool)], OrderedDict())
        for segment in path:
            if len(segment.children) > 1 or forecast.sessions.is_shared(segment):
                used[segment.id] = None
                used.move_to_end(segment.id)
        while len(used) > _SEGMENTS_A_TOOL:
            used.popitem(last=False)

    def _expect(self, tool: str) -> None:
        """This tool has just answered: the tools that follow it will need what their calls have used."""
        tools, until = self._cache.forecast.tools, self._cache.clock.now() + self.promoter.options.lead_max_s
        contexts = {name: list(used) for name, used in self._contexts.items()}
        for segment_id, probability in next_contexts(tools, tools.id_of(tool), contexts).items():
            self._needed[segment_id] = (probability, until)

    # --- what is brought up -------------------------------------------------------------------------------------

    def _idle(self) -> bool:
        """Nobody waits for anything, and hints, which are worth ten forecasts, keep nothing."""
        cache = self._cache
        return not (cache.conservative or cache.mover.reading or len(cache.look_ahead) or len(cache.hinted))

    def _marginal(self, now: float) -> float:
        """Worth of what would make room."""
        memory = self._cache.memory
        room = memory.residency.resident_rows < memory.residency.capacity_rows * 0.9
        return 0.0 if room or not isinstance(memory.policy, WorthPolicy) else memory.policy.threshold(now)

    def _candidates(self, level: Level, block_bytes: int, saved_s: float, now: float) -> list[Candidate]:
        missing = [s for s in level.residency.recent_leaves(_LOOKED_AT) if self._lacks(s, level)]
        ids = np.array([segment.id for segment in missing], np.int32)
        likely: dict[int, float] = {}
        if len(missing):
            by_time = returns_in_window(self._cache.forecast, ids, self.promoter.options, now)
            likely = dict(zip(ids.tolist(), by_time.tolist(), strict=True))
        self._needed = {i: held for i, held in self._needed.items() if held[1] > now}
        for segment_id, (probability, _) in self._needed.items():
            if self._lacks(self._cache.tree.segment(segment_id), level):
                likely[segment_id] = max(likely.get(segment_id, 0.0), probability)
        found = []
        for segment_id in nlargest(_FETCHED_AT_ONCE, likely, key=lambda i: likely[i]):
            blocks = self._missing_blocks(self._cache.tree.segment(segment_id), level)
            if blocks:
                found.append(Candidate(segment_id, blocks, blocks * block_bytes, likely[segment_id], saved_s))
        return found

    def _lacks(self, segment: Segment, level: Level) -> bool:
        """Whether memory lacks blocks of this segment that a level has, and the device does, too."""
        cache, there = self._cache, level.residency.extent(segment)
        on_device = cache.device is not None and cache.device.residency.extent(segment) >= there
        return cache.memory.residency.extent(segment) < there and not on_device

    def _missing_blocks(self, segment: Segment, level: Level) -> int:
        """Blocks of the path to the end of what a level has of a segment that memory lacks."""
        blocks, node = 0, segment
        while node.parent is not None:
            blocks += max(0, level.residency.extent(node) - self._cache.memory.residency.extent(node))
            node = node.parent
        return blocks

    def _fetch(self, segment: Segment, level: Level, now: float) -> None:
        cache = self._cache
        stop = segment.depth + level.residency.extent(segment)
        chain = Chain(cache.tree.chain_of(segment)[: stop * KEY_BYTES])
        # Keys of exact requests are in no lossy tier: what is found there is for those who accept it.
        context = RequestContext(request_id="speculation", arrival_s=now, lossy=True)
        keeper = CachedRequest(context, chain, stop)
        cache.loader.plan(keeper, 0, Urgency.SPECULATIVE)
        rows = int(np.count_nonzero(keeper.coming))
        cache.recorder.add("kvtier_prefetched_rows", rows, "speculation")
        self._brought[segment.id] = self._brought.get(segment.id, 0) + rows
        self._fetching.append(keeper)

    def _let_go_landed(self) -> None:
        """What has arrived competes with everything else in memory."""
        for keeper in [keeper for keeper in self._fetching if not keeper.awaited]:
            self._cache.loader.release_hold(keeper)
            self._fetching.remove(keeper)

    # --- TreeListener -------------------------------------------------------------------------------------------

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        for used in self._contexts.values():
            if tail.id in used:
                used[head.id] = None

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        self._needed.pop(segment.id, None)
        self._brought.pop(segment.id, None)
        for used in self._contexts.values():
            used.pop(segment.id, None)
