"""Copies between an engine's own pages and a tier, carried by the calling thread with the help of the I/O threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.paths import Run
from kvtier.tiers.protocol import RowId, RowStatus

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Buffers = Sequence[Sequence[memoryview]]
"""For every block of a call, one contiguous buffer a group."""

_LEAST_SHARED_BYTES = 1 << 20
"""Smaller parts of a read are not worth a thread of their own."""


@dataclass(slots=True)
class Copy:
    """Rows of one run on their way to or from a level. `at[i]` is the block of the call row i belongs to.

    `lease` keeps the rows where they are until the copy has landed; `generation` is the cache's when it began.
    """

    level: Level
    run: Run
    at: npt.NDArray[np.intp]
    groups: npt.NDArray[np.intp]
    slots: Slots
    rows: list[RowId]
    views: list[memoryview]
    lease: Lease | None
    generation: int
    statuses: list[RowStatus] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(
        cls, level: Level, run: Run, rows: Mask, slots: Slots, buffers: Buffers, lease: bool, generation: int
    ) -> Copy:
        """A copy of the rows marked in `rows` (blocks of the run, groups), which are in `slots`."""
        blocks, groups = np.nonzero(rows)
        pairs = list(zip(blocks.tolist(), groups.tolist(), strict=True))
        return cls(
            level,
            run,
            blocks + run.start,
            groups,
            slots,
            [run.row_id(block, group) for block, group in pairs],
            [buffers[run.start + block][group] for block, group in pairs],
            level.book.take(slots, "a copy") if lease else None,
            generation,
        )

    @property
    def ok(self) -> Mask:
        """Which rows arrived."""
        return np.array([status is RowStatus.OK for status in self.statuses], np.bool_)


class Carrier:
    """I/O threads shared by all calls of one cache. Thread-safe."""

    def __init__(self, threads: int, chunk_bytes: int) -> None:
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-io")

    def carry(self, copy: Copy, *, read: bool) -> None:
        """Move a copy's rows; its statuses are set when this returns. Reads are spread over the threads; writes go one
        chunk after the other in the calling thread, so that reads never queue behind them."""
        tier = copy.level.tier
        step = max(1, self._chunk_bytes // tier.row_bytes)
        if read:
            step = min(step, max(-(-len(copy.rows) // self._threads), _LEAST_SHARED_BYTES // tier.row_bytes, 1))
        parts = [slice(i, i + step) for i in range(0, len(copy.rows), step)]
        verb = tier.read if read else tier.write

        def move(part: slice) -> list[RowStatus]:
            return _guarded(verb, copy.slots[part], copy.rows[part], copy.views[part])

        began = time.perf_counter()
        moved = self._pool.map(move, parts) if read and len(parts) > 1 else map(move, parts)
        copy.statuses = [status for statuses in moved for status in statuses]
        copy.seconds = time.perf_counter() - began

    def close(self) -> None:
        """Wait for what runs and stop the threads."""
        self._pool.shutdown(wait=True)


def _guarded(
    verb: Callable[[Slots, Sequence[RowId], Sequence[memoryview]], list[RowStatus]],
    slots: Slots,
    rows: Sequence[RowId],
    views: Sequence[memoryview],
) -> list[RowStatus]:
    try:
        return verb(slots, rows, views)
    except Exception:  # noqa: BLE001 - tier boundary: one that breaks its contract costs misses, not the engine
        return [RowStatus.IO_ERROR] * len(rows)
