"""The mover: carries rows between tiers on I/O threads, reads before writes, within bounded bytes in flight.

The control thread submits transfers and later collects them; I/O threads only call `Tier.write` and `Tier.read` and
never touch the index. A transfer is cut into chunks so that a demand read waits for at most one chunk a thread.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.tiers.protocol import RowId, RowStatus, Tier

Slots = npt.NDArray[np.int32]


class Urgency(IntEnum):
    """Order of service."""

    DEMAND = 0
    LOOK_AHEAD = 1
    SPECULATIVE = 2
    STORE = 3


@dataclass(slots=True, eq=False)
class Transfer:
    """Rows to carry between `tier` (slots there) and memory (one view a row, in the same order).

    `statuses` is filled when it ended; a cancelled transfer ends with CLOSED for the rows not begun. `seconds` is the
    time in the tier, summed over chunks.
    """

    tier: Tier
    slots: Slots
    rows: Sequence[RowId]
    views: Sequence[memoryview]
    read: bool
    urgency: Urgency
    tag: object = None
    statuses: list[RowStatus] = field(default_factory=list)
    seconds: float = 0.0
    cancelled: bool = False
    _left: int = 0


@dataclass(order=True, slots=True)
class _Chunk:
    urgency: int
    sequence: int
    transfer: Transfer = field(compare=False)
    start: int = field(compare=False)
    stop: int = field(compare=False)


class Mover:
    """A pool of I/O threads over a priority queue. `submit`, `collect`, `cancel` and `close` from one control thread.

    `chunk_bytes` bounds one call into a tier. Writes never take the last thread, so that a read always finds one.
    """

    def __init__(self, threads: int = 4, chunk_bytes: int = 16 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._threads_total = max(2, threads)
        self._queue: list[_Chunk] = []
        self._writes: list[_Chunk] = []
        self._done: deque[Transfer] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._writing = 0
        self._active = 0
        self._sequence = 0
        self._closing = False
        self.rows_waiting = {"read": 0, "write": 0}
        self.bytes_waiting = {"read": 0, "write": 0}
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-io-{i}", daemon=True) for i in range(self._threads_total)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer. It comes back through `collect`, whatever happens."""
        n = len(transfer.slots)
        transfer.statuses = [RowStatus.CLOSED] * n
        step = max(1, self._chunk_bytes // transfer.tier.row_bytes)
        bounds = [*list(range(0, n, step)), n]
        with self._lock:
            self._count(transfer, n)
            transfer._left = len(bounds) - 1
            queue = self._queue if transfer.read else self._writes
            for start, stop in itertools.pairwise(bounds):
                self._sequence += 1
                heapq.heappush(queue, _Chunk(int(transfer.urgency), self._sequence, transfer, start, stop))
            if n == 0:
                self._done.append(transfer)
            self._wake.notify_all()

    def collect(self) -> list[Transfer]:
        """Transfers that ended since the last call, in order of ending. Never blocks."""
        if not self._done:
            return []
        with self._lock:
            done = list(self._done)
            self._done.clear()
        return done

    def cancel(self, transfer: Transfer) -> None:
        """Drop what has not begun. The transfer still comes back through `collect`."""
        transfer.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether anything is queued, moving, or not yet collected."""
        return bool(self._queue or self._writes or self._active or self._done)

    @property
    def reading(self) -> bool:
        """Whether any read is queued, moving, or not yet collected."""
        return bool(self._queue or self._active > self._writing or self._done)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or moving. False if `timeout_s` passed first."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._queue or self._writes or self._active:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self, timeout_s: float = 30.0) -> None:
        """Drop what has not begun, wait for what has, and stop the threads. Idempotent. A call into a tier that does
        not come back within `timeout_s` is left to its thread, which the end of the process ends."""
        with self._lock:
            self._closing = True
            for chunk in (*self._queue, *self._writes):
                chunk.transfer.cancelled = True
            self._wake.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # --- I/O threads --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                chunk = self._next()
                while chunk is None:
                    if self._closing and not self._queue and not self._writes:
                        return
                    self._wake.wait()
                    chunk = self._next()
            self._move(chunk)

    def _next(self) -> _Chunk | None:
        """The most urgent chunk this thread may take. Reads first; writes leave one thread free."""
        if self._queue:
            self._active += 1
            return heapq.heappop(self._queue)
        if self._writes and self._writing < self._threads_total - 1:
            self._active += 1
            self._writing += 1
            return heapq.heappop(self._writes)
        return None

    def _move(self, chunk: _Chunk) -> None:
        transfer, seconds = chunk.transfer, 0.0
        part = slice(chunk.start, chunk.stop)
        statuses = [RowStatus.CLOSED] * (chunk.stop - chunk.start)
        if not transfer.cancelled:
            verb = transfer.tier.read if transfer.read else transfer.tier.write
            began = time.perf_counter()
            try:
                answer = verb(transfer.slots[part], transfer.rows[part], transfer.views[part])
            except Exception:  # noqa: BLE001 - thread boundary: a tier that breaks its contract costs misses, not the engine
                answer = []
            statuses = answer if len(answer) == len(statuses) else [RowStatus.IO_ERROR] * len(statuses)
            seconds = time.perf_counter() - began
        with self._lock:
            transfer.statuses[part] = statuses
            transfer.seconds += seconds
            transfer._left -= 1
            self._count(transfer, chunk.start - chunk.stop)
            if transfer._left == 0:
                self._done.append(transfer)
            # Last: `busy` reads without the lock and must not see neither.
            self._active -= 1
            if not transfer.read:
                self._writing -= 1
            self._wake.notify_all()
            if not (self._queue or self._writes or self._active):
                self._idle.notify_all()

    def _count(self, transfer: Transfer, rows: int) -> None:
        direction = "read" if transfer.read else "write"
        self.rows_waiting[direction] += rows
        self.bytes_waiting[direction] += rows * transfer.tier.row_bytes
