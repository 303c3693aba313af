"""Where prompt tokens came from: sums that agree, and one reason for every miss.

A request is counted once, when it ended, by what its first successful scheduling did: tokens the device had, tokens
loaded by the tier they came from, and the rest by the one reason why they had to be computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.request import CachedRequest
from kvtier.model.request import MissReason, Outcome

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache


class Accounting:
    """Counts tokens of one TierCache. One control thread."""

    def __init__(self, cache: TierCache) -> None:
        self._cache = cache

    def looked_up(self, request: CachedRequest, start: int) -> None:
        """A lookup was answered: the device had the first `start` blocks. A later load refines this."""
        if (
            not request.started
            and request.load is None
            and (request.sources is None or set(request.sources) <= {"hbm"})
        ):
            request.sources = {"hbm": start * self._cache.block_tokens}
            request.miss_from_block = start

    def loaded(self, request: CachedRequest, blocks: npt.NDArray[np.intp]) -> None:
        """The engine loads these blocks (ascending, each once) now."""
        if not len(blocks) or request.started or request.sources is None or set(request.sources) - {"hbm"}:
            return
        start, memory, stop = request.miss_from_block, self._cache.memory.name, int(blocks[-1]) + 1
        new = blocks[blocks >= start]
        promoted = request.promoted(new)
        here = len(new) - sum(promoted.values())
        counts = {memory: here} | promoted if here or not promoted else promoted
        # Blocks before a sliding window need no bytes; they come with the window, from the farthest it came from.
        farthest = next((source for source in counts if source != memory), memory)
        skipped = stop - start - sum(counts.values())
        if skipped > 0:
            counts[farthest] = counts.get(farthest, 0) + skipped
        for source, n in counts.items():
            request.sources[source] = request.sources.get(source, 0) + n * self._cache.block_tokens
        request.miss_from_block = stop

    def ended(self, request: CachedRequest, outcome: Outcome) -> None:
        """Add the request to the totals."""
        recorder, tokens = self._cache.recorder, request.context.prompt_tokens
        recorder.add("kvtier_requests", 1, outcome.stop_reason.name.lower())
        if request.sources is None:
            return
        left = tokens
        for source, n in request.sources.items():
            n = min(n, left)
            recorder.add("kvtier_tokens", n, source)
            left -= n
        recorder.add("kvtier_tokens", left, "recompute")
        self._misses(request, tokens - left, tokens)

    def _misses(self, request: CachedRequest, start_token: int, prompt_tokens: int) -> None:
        """Give every recomputed token its reason, a run of blocks at a time."""
        size, full = self._cache.block_tokens, prompt_tokens // self._cache.block_tokens
        counts: dict[MissReason, int] = {}

        def count(reason: MissReason, n: int) -> None:
            if n > 0:
                counts[reason] = counts.get(reason, 0) + n

        block = start_token // size
        offered = block + request.declined
        if request.declined:
            stop = min(full, offered)
            count(MissReason.DECLINED_RECOMPUTE_CHEAPER, stop * size - start_token)
            start_token = max(start_token, stop * size)
            block = start_token // size
        first_failure = min((b for b in request.failed if b >= block), default=None)
        reason = MissReason.EVICTED
        if first_failure is not None:
            reason = request.failed[first_failure]
        elif request.refuses_to_wait:
            reason = MissReason.DEADLINE
        elif request.cut_reason is not None:
            reason = request.cut_reason
        known = max(block, min(full, request.known_blocks))
        count(reason, known * size - start_token)
        start_token = max(start_token, known * size)
        count(MissReason.NEVER_SEEN, full * size - start_token)
        start_token = max(start_token, full * size)
        count(MissReason.PARTIAL_TAIL, prompt_tokens - start_token)
        for why, n in counts.items():
            self._cache.recorder.add("kvtier_miss_tokens", n, why.value)
