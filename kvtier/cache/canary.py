"""Canaries: some requests compute what they could have loaded, and the two are compared.

Checksums say that bytes are those once written; only computing them again says that they were the right ones
(vllm#49127, sglang#27504). A request drawn as a canary is offered nothing. What it then computes of blocks that memory
holds is written to rows of its own, compared with what is cached, and thrown away. Floating point differs a little with
the shape of a batch, so rows count as the same if equal, as close within a relative error, and as wrong beyond it; what
was wrong leaves every tier, with all that builds on it. Of rows whose elements are not known to be of one type it is
only said whether they differ.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.request import CachedRequest
from kvtier.index.residency import ABSENT
from kvtier.model.request import MissReason

if TYPE_CHECKING:
    from kvtier.cache.tier_cache import TierCache

Indices = npt.NDArray[np.intp]

ROWS_A_REQUEST = 8
"""More would be work on the engine's thread for little more certainty."""
WRONG_BEYOND = 0.05
"""Relative error: two computations of the same block in bfloat16 differ by less than a hundredth."""


def relative_error(cached: memoryview, computed: memoryview, dtype: str) -> float:
    """|cached - computed| / |computed| over all elements, as vectors; 0 if bytes are equal. Where the type of the
    elements is not known ("") bytes that differ are infinitely wrong, and so are elements that are not finite."""
    a, b = np.frombuffer(cached, np.uint8), np.frombuffer(computed, np.uint8)
    if np.array_equal(a, b):
        return 0.0
    if dtype == "":
        return float("inf")
    x, y = _elements(a, dtype), _elements(b, dtype)
    with np.errstate(all="ignore"):
        norm = float(np.linalg.norm(y))
        error = float(np.linalg.norm(x - y)) / norm if norm > 0 else float("inf")
    return error if np.isfinite(error) else float("inf")


def _elements(row: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return row.view(np.dtype(dtype)).astype(np.float32)


class Canary:
    """Draws requests and compares their rows, for one TierCache. One control thread."""

    def __init__(self, cache: TierCache, share: float, dtype: str) -> None:
        self._cache = cache
        self._share = share
        self._dtype = dtype if dtype in ("bfloat16", "float16", "float32") else ""
        self._draw = random.Random(0)

    def drawn(self, request: CachedRequest) -> bool:
        """Decide whether a new request is one."""
        return self._share > 0 and request.known_blocks > 0 and self._draw.random() < self._share

    def declines(self, request: CachedRequest) -> bool:
        """Whether a lookup finds nothing because of this."""
        if request.canary and not request.started:
            request.cut_reason = MissReason.CANARY
            return True
        return False

    def choose(self, request: CachedRequest, blocks: Indices, groups: Indices) -> Indices:
        """Which of these resident rows the engine shall write once more, to be compared: positions, ascending."""
        left = ROWS_A_REQUEST - len(request.compared)
        if not request.canary or left <= 0:
            return np.empty(0, np.intp)
        step = max(1, -(-len(blocks) // left))
        at = np.arange(0, len(blocks), step)
        written = np.array([request.is_granted(int(blocks[i]), int(groups[i])) for i in at], np.bool_)
        chosen = at[~written][:left]
        request.compared.update(zip(blocks[chosen].tolist(), groups[chosen].tolist(), strict=True))
        return chosen

    def compare(self, request: CachedRequest, row: tuple[int, int], computed_slot: int) -> None:
        """The engine has written a row that is resident already."""
        cache, (block, group) = self._cache, row
        slots = cache.memory.residency.slots_of(cache.tree.walk(request.chain))
        held = int(slots[block, group]) if block < len(slots) else ABSENT
        if held == ABSENT:
            outcome = "gone"
        else:
            error = relative_error(cache.memory_row(held), cache.memory_row(computed_slot), self._dtype)
            cache.recorder.observe("kvtier_canary_error", min(error, 1e3))
            known = self._dtype != ""
            outcome = "same" if error == 0 else "close" if error <= WRONG_BEYOND else "wrong" if known else "different"
            if outcome == "wrong":
                self._drop(request.chain, block)
        cache.recorder.add("kvtier_canaries", 1, outcome)

    def _drop(self, chain: bytes, block: int) -> None:
        for segment in self._cache.tree.walk(chain).path:
            if segment.depth <= block < segment.stop:
                for level in (self._cache.memory, *self._cache.lower):
                    level.evict_below(segment, block - segment.depth, "canary")
        self._cache.epoch += 1
