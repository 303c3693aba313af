"""Queue look-ahead: what waiting requests need moves up, and stays, while they wait for the GPU.

An engine that is full asks about its waiting requests only when it has room for them; by then the load is late. So
every request the engine has not asked about is planned ahead, at the urgency of look-ahead: its rows in memory are
leased, the first object of what lies below is read at once, and the rest in order of arrival, as far as the prefetch
window reaches. When the engine asks, the request is planned anew, and what is under way goes on as a demand.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.mover import Urgency
from kvtier.cache.request import CachedRequest
from kvtier.place.window import PrefetchWindow

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Mask = npt.NDArray[np.bool_]

_PLANS_AT_ONCE = 2
"""A plan is a walk of the whole prompt: no step of the engine pays for more than this."""
_PROTECTED_S = 10.0
"""So long the device is asked to keep what a waiting request needs, from when it is looked ahead for."""
_PROMISED_SHARE = 0.5
"""Of memory, at most, leased when another request is looked ahead for: those that run come first."""


class LookAhead:
    """Waiting requests of one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        self.window = PrefetchWindow()
        self._unseen: OrderedDict[CachedRequest, None] = OrderedDict()  # nothing done yet
        self._begun: OrderedDict[CachedRequest, None] = OrderedDict()  # its first object is on its way
        self._ahead: dict[CachedRequest, Mask] = {}  # rows read ahead, by request

    def __len__(self) -> int:
        """Requests the engine has not asked about."""
        return len(self._unseen) + len(self._begun)

    def arrived(self, request: CachedRequest) -> None:
        """A request waits. One that runs or loads needs nothing any more, and a canary is to compute."""
        idle = not (request.started or request.canary or request.load is not None)
        if idle and self._cache.config.look_ahead and self._cache.lower:
            self._unseen[request] = None

    def asked(self, request: CachedRequest) -> bool:
        """The engine asks about it. True if it was looked ahead for, and must be planned anew."""
        self._unseen.pop(request, None)
        self._begun.pop(request, None)
        if request not in self._ahead or request.asked:
            return False
        request.asked = True
        request.limit_blocks = None
        return True

    def started(self, request: CachedRequest) -> None:
        """It runs, or is gone: the window learns from how it went."""
        self.asked(request)
        rows = self._ahead.pop(request, None)
        if rows is None or not rows.any():
            return
        on_device = (request.sources or {}).get("hbm", 0) // self._cache.block_tokens
        used = int(np.count_nonzero(rows[on_device : max(on_device, request.miss_from_block)]))
        self.window.settled(request.waited, used, int(np.count_nonzero(rows)))
        self._cache.recorder.add("kvtier_prefetched_rows_used", used, "look_ahead")

    def pump(self) -> None:
        """After the engine has asked about those it has room for. Called every step; cheap while nobody waits."""
        cache = self._cache
        if not (self._unseen or self._begun):
            return
        for _ in range(_PLANS_AT_ONCE):
            residency = cache.memory.residency
            if residency.pinned_rows > _PROMISED_SHARE * residency.capacity_rows:
                return
            if self._unseen:
                request, _ = self._unseen.popitem(last=False)
                if self._plan(request, self._first_object()):
                    self._begun[request] = None
            elif self._begun and self._in_flight() < self.window.blocks:
                request, _ = self._begun.popitem(last=False)
                self._plan(request, None)
            else:
                return

    def clear(self) -> None:
        """Everything is forgotten."""
        for held in (self._unseen, self._begun, self._ahead):
            held.clear()

    def _plan(self, request: CachedRequest, most_blocks: int | None) -> bool:
        """Plan ahead, as far as `most_blocks` after what the device has. Whether rows came on their way."""
        cache, start = self._cache, self._on_device(request)
        request.limit_blocks = None if most_blocks is None else start + most_blocks
        before = request.coming.copy()
        cache.loader.plan(request, start, Urgency.LOOK_AHEAD)
        request.limit_blocks = None
        new = request.coming.copy()
        if len(before):
            new[: len(before)] &= ~before
        rows = int(np.count_nonzero(new))
        ahead = self._ahead.get(request)
        if ahead is not None:
            new[: len(ahead)] |= ahead
        self._ahead[request] = new
        cache.recorder.add("kvtier_prefetched_rows", rows, "look_ahead")
        return rows > 0

    def _on_device(self, request: CachedRequest) -> int:
        """Leading blocks the device has: they need not move, and are asked to stay."""
        cache, blocks = self._cache, 0
        if cache.device is None:
            return 0
        path = cache.tree.walk(request.chain).path
        for n, segment in enumerate(path):
            extent = cache.device.residency.extent(segment)
            blocks += extent
            if extent < segment.length:
                path = path[: n + 1]
                break
        cache.protect(path, cache.clock.now() + _PROTECTED_S)
        return min(blocks, request.blocks)

    def _first_object(self) -> int:
        """Blocks in one call into a tier."""
        cache = self._cache
        return max(1, cache.config.chunk_bytes // (cache.memory.row_bytes * cache.groups))

    def _in_flight(self) -> int:
        return sum(int(np.count_nonzero(request.coming)) for request in self._ahead if not request.asked)
