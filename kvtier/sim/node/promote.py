"""Speculative promotion in the simulator: what the forecast expects back within seconds comes up from DRAM.

`place.promotion.Promoter` chooses; here are the candidates and the budget. Off by default (docs/simulator.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.promotion import ByteBudget, Candidate, Promoter, PromotionOptions, returns_in_window
from kvtier.place.worth import WorthPolicy
from kvtier.predict.forecast import Forecast
from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.flight import Load
from kvtier.sim.node.links import Link, Priority
from kvtier.sim.node.loads import Loader
from kvtier.sim.node.speculation import Speculation
from kvtier.sim.node.tier import NodeTier

_TICK_S = 2.0
_LOOKED_AT = 128  # of DRAM's leaves, those with the highest worth


class Promotion:
    """One planner, asked every other second while there is traffic. `idle` says that nobody waits for anything."""

    def __init__(
        self,
        loop: EventLoop,
        tree: PrefixTree,
        hbm: NodeTier,
        dram: NodeTier,
        h2d: Link,
        loader: Loader,
        speculation: Speculation,
        forecast: Forecast,
        block_bytes: int,
    ) -> None:
        self.promoter = Promoter(PromotionOptions())
        self.idle: Callable[[], bool] = lambda: True
        self.hold: Callable[[Sequence[Segment], Sequence[Load], bytes], None]
        self._loop = loop
        self._tree = tree
        self._hbm = hbm
        self._dram = dram
        self._h2d = h2d
        self._loader = loader
        self._speculation = speculation
        self._forecast = forecast
        self._block_bytes = block_bytes
        self._budget = ByteBudget(self.promoter.options.share * h2d.bytes_per_s, 0.0, burst_s=_TICK_S)
        self._next_s = 0.0

    def used(self, path: Sequence[Segment]) -> None:
        """A request came for this path."""
        for segment in path:
            self.promoter.switch.used(segment.id)

    def tick(self) -> None:
        """Called whenever something happens."""
        now = self._loop.now
        if now < self._next_s:
            return
        self._next_s = now + _TICK_S
        if not self.idle():
            return
        policy = self._hbm.policy
        marginal = policy.threshold(now) if isinstance(policy, WorthPolicy) else 0.0
        saved_s = self._block_bytes / self._h2d.bytes_per_s
        for chosen in self.promoter.plan(self._candidates(saved_s), marginal * saved_s, self._budget, now, True):
            segment = self._tree.segment(chosen.segment_id)
            chain = self._tree.chain_of(segment)
            path = self._tree.insert(chain)
            in_hbm, in_dram = self._hbm.leading(path), self._dram.leading(path)
            self._hbm.protect(path)  # room for its tail is not made of its head
            room = self._hbm.make_room(in_dram - in_hbm, now) if in_dram > in_hbm else 0
            self._hbm.unprotect(path)
            if room:
                loads = self._loader.to_hbm(path, in_hbm, in_hbm + room, Priority.SPECULATIVE)
                self._speculation.moved(loads)
                self.hold(path, loads, chain)

    def _candidates(self, saved_s: float) -> list[Candidate]:
        now, hbm = self._loop.now, self._hbm
        missing = [s for s in self._dram.leaves() if hbm.extent(s) < self._dram.extent(s) and not hbm.pins(s)]
        if not missing:
            return []
        ids = np.array([segment.id for segment in missing], np.int32)
        best = np.argsort(-self._forecast.worth(ids, now), kind="stable")[:_LOOKED_AT]
        probabilities = returns_in_window(self._forecast, ids[best], self.promoter.options, now)
        candidates = []
        for n, probability in zip(best.tolist(), probabilities.tolist(), strict=True):
            node: Segment | None = missing[n]
            blocks = 0
            while node is not None and node.parent is not None and hbm.extent(node) < node.length:
                blocks += self._dram.extent(node) - hbm.extent(node)
                node = node.parent
            candidates.append(Candidate(missing[n].id, blocks, blocks * self._block_bytes, probability, saved_s))
        return candidates
