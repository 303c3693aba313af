"""What becomes of rows that memory has damaged: nobody is offered them, they leave with all that builds on them, and
are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.request import CachedRequest
from kvtier.index.residency import ABSENT
from kvtier.index.tree import Match
from kvtier.model.request import MissReason
from kvtier.tiers.protocol import RowStatus

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Mask = npt.NDArray[np.bool_]


class Damage:
    """Drops what no longer has the bytes it was sealed with. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache
        # While somebody loads a damaged row it cannot leave. None has lingered yet: lookups need not look for any.
        self._lingers = False

    def found(self, chain: bytes, block: int) -> None:
        """A row of this block is damaged: the block and what builds on it leave memory."""
        self._cache.recorder.add("kvtier_faults", 1, self._cache.memory.name, RowStatus.CORRUPT.value)
        self._drop(chain, block)

    def loaded(self, request: CachedRequest, load: Lease) -> None:
        """The engine has ended this load (and let go of it): what its worker found damaged is dropped. The engine
        starts the request over, and what it is told then is what counts."""
        cache = self._cache
        damaged = load.slots[cache.seals.damaged(load.slots)]
        if not len(damaged):
            return
        slots = cache.memory.residency.slots_of(cache.tree.walk(request.chain))
        blocks = np.flatnonzero(np.isin(slots, damaged).any(axis=1)).tolist()
        for block in reversed(blocks):
            self.found(request.chain, block)
        match = cache.tree.walk(request.chain)
        below = [level for level in cache.lower if request.context.lossy or not level.lossy]
        for block in blocks:
            held = (level.residency.slots_of(match) for level in below)
            if not any(block < len(slots) and (slots[block] != ABSENT).any() for slots in held):
                request.failed.setdefault(block, MissReason.CORRUPT)
        if not request.started:
            request.sources = None

    def lingering(self, match: Match, chain: bytes) -> Mask | None:
        """Which rows of this chain are damaged and still in memory, after another try to drop them. None: none."""
        if not self._lingers:
            return None
        marked = self._marked(match)
        if not marked.any():
            return None
        self._drop(chain, int(np.flatnonzero(marked.any(axis=1))[0]))
        return self._marked(match)

    def _marked(self, match: Match) -> Mask:
        slots = self._cache.memory.residency.slots_of(match)
        marked: Mask = (slots != ABSENT) & self._cache.seals.damaged(slots.ravel()).reshape(slots.shape)
        return marked

    def _drop(self, chain: bytes, block: int) -> None:
        cache = self._cache
        match = cache.tree.walk(chain)
        for segment in match.path:
            if segment.depth <= block < segment.stop:
                cache.memory.evict_below(segment, block - segment.depth, RowStatus.CORRUPT.value)
        if block < match.blocks:
            self._lingers |= bool((cache.memory.residency.slots_of(match)[block] != ABSENT).any())
        cache.epoch += 1
