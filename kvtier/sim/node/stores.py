"""Moving blocks down: every computed block is offered to DRAM and NVMe, at the lowest priority.

What has been given room below can be read from there at once: until it has landed, from the buffer it is copied from.
NVMe takes nothing while its write queue is too long; then it is the rest of the path that is left out, never a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.index.tree import Segment
from kvtier.sim.node.links import Link, Priority
from kvtier.sim.node.tier import NodeTier

LONGEST_WRITE_QUEUE_S = 10.0


class Storer:
    """Write-through. `dropped_blocks` counts what NVMe was too busy for."""

    def __init__(self, dram: NodeTier, nvme: NodeTier, d2h: Link, nvme_write: Link, block_bytes: int) -> None:
        self._dram = dram
        self._nvme = nvme
        self._d2h = d2h
        self._nvme_write = nvme_write
        self._block_bytes = block_bytes
        self._on_the_way = 0.0  # bytes being copied from the device that will be written
        self.dropped_blocks = 0
        self.written_blocks = 0

    def store(self, path: Sequence[Segment], admitted: int, now: float) -> None:
        """Copy down what DRAM and NVMe lack of a path resident in HBM; NVMe takes its first `admitted` blocks."""
        blocks = path[-1].stop if path else 0
        in_dram, in_nvme = self._dram.leading(path), self._nvme.leading(path)
        self._take(self._dram, path, in_dram, blocks, now)
        to_nvme = self._accepted(in_nvme, admitted)
        to_nvme = self._take(self._nvme, path, in_nvme, in_nvme + to_nvme, now)
        kept = self._dram.leading(path)
        copied = max(kept, in_nvme + to_nvme if to_nvme else 0) - in_dram
        n_bytes = float(to_nvme * self._block_bytes)
        self.written_blocks += to_nvme
        if copied > 0:
            self._on_the_way += n_bytes
            self._d2h.submit(float(copied * self._block_bytes), Priority.STORE, lambda: self._copied(n_bytes))
        elif n_bytes:
            self._nvme_write.submit(n_bytes, Priority.STORE, _nothing)

    def _copied(self, n_bytes: float) -> None:
        if n_bytes:
            self._on_the_way -= n_bytes
            self._nvme_write.submit(n_bytes, Priority.STORE, _nothing)

    def _accepted(self, start: int, stop: int) -> int:
        """How many blocks the write queue has room for."""
        if stop <= start or not self._nvme.capacity_rows:
            return 0
        queued_s = self._nvme_write.backlog_s(Priority.STORE) + self._on_the_way / self._nvme_write.bytes_per_s
        room = int((LONGEST_WRITE_QUEUE_S - queued_s) * self._nvme_write.bytes_per_s / self._block_bytes)
        accepted = max(0, min(stop - start, room))
        self.dropped_blocks += stop - start - accepted
        return accepted

    def _take(self, tier: NodeTier, path: Sequence[Segment], start: int, stop: int, now: float) -> int:
        """Give room to blocks [start, stop), as many as fit. The path is pinned."""
        if stop <= start:
            return 0
        stop = start + tier.make_room(stop - start, now)
        for segment in path:
            if start < segment.stop and segment.depth < stop:
                tier.grow(segment, min(stop, segment.stop) - segment.depth, now)
        return stop - start


def _nothing() -> None:
    return
