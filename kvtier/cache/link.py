"""One tier's part of the mover: its own threads and queues, so that a tier that stalls holds up nobody else.

Reads go first, by urgency; writes leave one thread free, so that a demand read waits for one call at most. Small chunks
of equal urgency travel together, up to 1 MiB: a medium gives its bandwidth to large calls only. What moves at once is
bounded by threads times the largest call.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from kvtier.cache.budget import TokenBucket
from kvtier.cache.transfer import Call, Chunk, Scratch, Transfer, Urgency
from kvtier.tiers.protocol import RowStatus

_TOGETHER_BYTES = 1 << 20


class Link:
    """Queues and threads of one tier. All state is guarded by the mover's `lock`; `ended(transfer)` is called, under
    it, when the last row of a transfer has ended. `now` tells when a call began."""

    def __init__(
        self,
        name: str,
        threads: int,
        chunk_bytes: int,
        budgets: tuple[float, float],
        lock: threading.Lock,
        ended: Callable[[Transfer], None],
        now: Callable[[], float],
    ) -> None:
        self.name = name
        self.running: list[Call] = []
        self.most_bytes_in_flight = 0
        self.rows_waiting = {True: 0, False: 0}
        self.bytes_waiting = {True: 0, False: 0}
        self._n_threads = threads
        self._chunk_bytes = chunk_bytes
        self._buckets = {True: TokenBucket(budgets[0]), False: TokenBucket(budgets[1])}
        self._queues: dict[bool, list[Chunk]] = {True: [], False: []}
        self._wake = threading.Condition(lock)
        self._lock = lock
        self._ended = ended
        self._now = now
        # Until a budget lets the next call through; None where nothing waits for one. Set by `_next`.
        self._pause_s: float | None = None
        self._closing = False
        self.threads = [
            threading.Thread(target=self._run, name=f"kvtier-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    # --- under the lock -----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is queued or moving."""
        return bool(self._queues[True] or self._queues[False] or self.running)

    @property
    def reading(self) -> bool:
        """Whether any read is queued or moving."""
        return bool(self._queues[True] or any(call.read for call in self.running))

    def budget(self, read: bool) -> float:
        """Bytes per second let through, 0 for no limit."""
        return self._buckets[read].bytes_per_s

    def bounds(self, transfer: Transfer) -> list[int]:
        """Where a transfer is cut: no call above `chunk_bytes`; a read is spread over the threads, in parts that are
        worth a call of their own."""
        n, row_bytes = len(transfer.slots), transfer.tier.row_bytes
        step = max(1, self._chunk_bytes // row_bytes)
        if transfer.read:
            step = min(step, max(1, -(-n // self._n_threads), _TOGETHER_BYTES // row_bytes))
        return [*range(0, n, step), n]

    def push(self, chunk: Chunk) -> None:
        """Queue a chunk."""
        self._count(chunk, 1)
        heapq.heappush(self._queues[chunk.transfer.read], chunk)
        self._wake.notify()

    def drop(self, transfer: Transfer | None = None) -> None:
        """End the chunks of `transfer` (of all if None) that have not begun."""
        for read, queue in self._queues.items():
            gone = [chunk for chunk in queue if transfer is None or chunk.transfer is transfer]
            if gone:
                self._queues[read] = [
                    chunk for chunk in queue if transfer is not None and chunk.transfer is not transfer
                ]
                heapq.heapify(self._queues[read])
            for chunk in gone:
                chunk.transfer.dropped[chunk.start : chunk.stop] = True
                self._finish(chunk, [RowStatus.CLOSED] * (chunk.stop - chunk.start))

    def hasten(self, transfer: Transfer, urgency: Urgency) -> None:
        """Serve what has not begun of `transfer` as `urgency`."""
        queue = self._queues[transfer.read]
        for chunk in queue:
            if chunk.transfer is transfer:
                chunk.urgency = int(urgency)
        heapq.heapify(queue)

    def close(self) -> None:
        """Drop what has not begun and let the threads end."""
        self._closing = True
        self.drop()
        self._wake.notify_all()

    # --- its threads --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        scratch = Scratch()
        while True:
            with self._lock:
                while (call := self._next()) is None:
                    if self._closing:
                        return
                    self._wake.wait(self._pause_s)
            began = time.perf_counter()
            statuses = call.run(scratch)
            seconds = time.perf_counter() - began
            with self._lock:
                self._done(call, statuses, seconds)

    def _next(self) -> Call | None:
        """What this thread may carry now."""
        self._pause_s = None
        for read in (True, False):
            writing = sum(not call.read for call in self.running)
            if self._queues[read] and (read or writing < self._n_threads - 1):
                if wait_s := self._wait_s(read):
                    # Said by the same look at the clock: what is free a moment later must not wait for a wake-up.
                    self._pause_s = min(wait_s, self._pause_s or wait_s)
                    continue
                call = self._together(self._queues[read])
                self._buckets[read].take(call.n_bytes, time.monotonic())
                self.running.append(call)
                self.most_bytes_in_flight = max(self.most_bytes_in_flight, sum(c.n_bytes for c in self.running))
                return call
        return None

    def _together(self, queue: list[Chunk]) -> Call:
        chunks = [heapq.heappop(queue)]
        total = chunks[0].n_bytes
        while queue and total < min(_TOGETHER_BYTES, self._chunk_bytes):
            following = queue[0]
            fits = total + following.n_bytes <= self._chunk_bytes and following.urgency == chunks[0].urgency
            alike = (following.transfer.pages is None) == (chunks[0].transfer.pages is None)
            if not (fits and alike and following.transfer.tier is chunks[0].transfer.tier):
                break
            total += following.n_bytes
            chunks.append(heapq.heappop(queue))
        return Call(chunks, self._now())

    def _done(self, call: Call, statuses: list[RowStatus], seconds: float) -> None:
        n_bytes, at = call.n_bytes, 0
        self.running.remove(call)
        for chunk in call.chunks:
            stop = at + chunk.stop - chunk.start
            chunk.transfer.seconds += seconds * chunk.n_bytes / max(1, n_bytes)
            chunk.transfer.calls.append((n_bytes, seconds))
            self._finish(chunk, statuses[at:stop])
            at = stop
        self._wake.notify_all()

    def _finish(self, chunk: Chunk, statuses: list[RowStatus]) -> None:
        transfer = chunk.transfer
        transfer.statuses[chunk.start : chunk.stop] = statuses
        transfer.left -= 1
        self._count(chunk, -1)
        if transfer.left == 0:
            self._ended(transfer)

    def _count(self, chunk: Chunk, sign: int) -> None:
        self.rows_waiting[chunk.transfer.read] += sign * (chunk.stop - chunk.start)
        self.bytes_waiting[chunk.transfer.read] += sign * chunk.n_bytes

    def _wait_s(self, read: bool) -> float:
        return self._buckets[read].wait_s(time.monotonic())
