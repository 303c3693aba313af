"""A trace in hindsight: the final tree of all its prompts, and who uses each segment when.

In the final tree every prompt is a path of whole segments and all blocks of a segment are always used together, so
what is true of a segment (its next use, its last) is true of each of its blocks. The clairvoyant policy and the log
analyser stand on this; no online policy may see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.index.tree import PrefixTree
from kvtier.sim.traces.records import TRACE_KEY_BYTES, TraceRequest

IntArray = NDArray[np.int64]

NEVER = 2**31 - 1


class CompiledTrace:
    """Flat arrays with one entry for each (request, segment of its path), in order of request, then of depth.

    `segment` and `request` name the two; `length` and `depth` are by segment id. `starts[i]:starts[i + 1]` are the
    entries of request i. The tree never changes again and may serve any number of replays.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self.tree = PrefixTree(key_bytes=TRACE_KEY_BYTES)
        self.tree.may_grow = lambda leaf: False
        for request in requests:
            self.tree.insert(request.chain)
        counts: list[int] = []
        ids: list[int] = []
        for request in requests:
            path = self.tree.walk(request.chain).path
            counts.append(len(path))
            ids.extend([segment.id for segment in path])
        self.requests = len(requests)
        self.segment: IntArray = np.array(ids, dtype=np.int64)
        self.request: IntArray = np.repeat(np.arange(len(requests), dtype=np.int64), counts)
        self.starts: IntArray = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.length: IntArray = np.zeros(self.tree.id_limit, dtype=np.int64)
        self.depth: IntArray = np.zeros(self.tree.id_limit, dtype=np.int64)
        for segment in self.tree.segments():
            self.length[segment.id] = segment.length
            self.depth[segment.id] = segment.depth
        self._order = np.argsort(self.segment, kind="stable")

    @property
    def blocks(self) -> int:
        """Block accesses in all."""
        return int(self.length[self.segment].sum())

    @property
    def unique_blocks(self) -> int:
        """The footprint."""
        return self.tree.blocks

    def next_use(self) -> IntArray:
        """For each entry the index of the next request that uses the segment, or NEVER."""
        return self._neighbour(self._order[:-1], self._order[1:], NEVER)

    def previous_use(self) -> IntArray:
        """For each entry the index of the latest earlier request that used the segment, or -1."""
        return self._neighbour(self._order[1:], self._order[:-1], -1)

    def _neighbour(self, here: IntArray, there: IntArray, missing: int) -> IntArray:
        found = np.full(self.segment.size, missing, dtype=np.int64)
        same = self.segment[here] == self.segment[there]
        found[here[same]] = self.request[there[same]]
        return found
