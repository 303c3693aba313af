"""The mover: carries rows between tiers and memory on I/O threads, reads before writes, within budgets.

The control thread submits transfers and later collects them; I/O threads only call `Tier.write` and `Tier.read` and
never touch the index. Every tier has a `Link` of its own, so that one that stalls delays no other.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from kvtier.cache.link import Link
from kvtier.cache.transfer import Chunk, Transfer, Urgency
from kvtier.tiers.protocol import RowStatus

__all__ = ["Mover", "Transfer", "Urgency"]


class Mover:
    """Links to tiers, made when first used. All methods but `drain` come from one control thread.

    `threads` carry the bytes of one tier, writes never on the last of them; `chunk_bytes` bounds one call into a tier.
    `budgets` maps "tier.read" and "tier.write" to bytes per second. `now` dates calls, for `stuck`.
    """

    def __init__(
        self,
        threads: int = 4,
        chunk_bytes: int = 16 << 20,
        budgets: Mapping[str, float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._n_threads = max(2, threads)
        self._chunk_bytes = chunk_bytes
        self._budgets = dict(budgets or {})
        self._now = now
        self._links: dict[str, Link] = {}
        self._done: deque[Transfer] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._sequence = 0
        self._closing = False

    def submit(self, *transfers: Transfer) -> None:
        """Queue transfers. They come back through `collect`, whatever happens."""
        for transfer in transfers:
            n = len(transfer.slots)
            transfer.statuses = [RowStatus.CLOSED] * n
            transfer.dropped = np.zeros(n, np.bool_)
            transfer.damaged = np.zeros(n, np.bool_)
        with self._lock:
            for transfer in transfers:
                self._queue(transfer)

    def collect(self, rows: int | None = None) -> list[Transfer]:
        """Transfers that ended since the last call, in order of ending; with `rows`, as many as bring so many rows, one
        at least, and the others next time. Never blocks."""
        if not self._done:
            return []
        found: list[Transfer] = []
        with self._lock:
            while self._done and (rows is None or rows > 0):
                found.append(self._done.popleft())
                rows = None if rows is None else rows - len(found[-1].slots)
        return found

    def cancel(self, transfer: Transfer) -> None:
        """Drop what has not begun. The transfer still comes back through `collect`, at once if nothing of it moves."""
        with self._lock:
            if transfer.tier.name in self._links:
                self._links[transfer.tier.name].drop(transfer)
                self._tell_idle()

    def hasten(self, transfer: Transfer, urgency: Urgency) -> None:
        """Serve what has not begun of a transfer as `urgency`, if that is sooner."""
        if urgency < transfer.urgency:
            with self._lock:
                transfer.urgency = urgency
                if transfer.tier.name in self._links:
                    self._links[transfer.tier.name].hasten(transfer, urgency)

    def stuck(self, limit_s: float) -> list[str]:
        """Names of tiers with a call that began more than `limit_s` ago; every call is reported once."""
        names, now = [], self._now()
        with self._lock:
            for link in self._links.values():
                late = [call for call in link.running if not call.reported and now - call.began_s > limit_s]
                for call in late:
                    call.reported = True
                if late:
                    names.append(link.name)
        return names

    def backlog_bytes(self, name: str, read: bool) -> int:
        """Bytes queued for or moving on one direction of a tier's link."""
        link = self._links.get(name)
        return link.bytes_waiting[read] if link is not None else 0

    def budget(self, name: str, read: bool) -> float:
        """Bytes per second one direction of a tier's link may carry; 0: no limit."""
        return self._budgets.get(f"{name}.{'read' if read else 'write'}", 0.0)

    @property
    def busy(self) -> bool:
        """Whether anything is queued, moving, or not yet collected."""
        with self._lock:
            return bool(self._done) or any(link.busy for link in self._links.values())

    @property
    def reading(self) -> bool:
        """Whether any read is queued, moving, or not yet collected."""
        with self._lock:
            return bool(self._done) or any(link.reading for link in self._links.values())

    @property
    def rows_waiting(self) -> dict[str, int]:
        """Rows queued or moving, by direction."""
        return self._sum(lambda link, read: link.rows_waiting[read])

    @property
    def bytes_waiting(self) -> dict[str, int]:
        """Bytes queued or moving, by direction."""
        return self._sum(lambda link, read: link.bytes_waiting[read])

    @property
    def most_bytes_in_flight(self) -> int:
        """The most bytes that ever moved at once on one link. Never more than threads times the largest call."""
        return max((link.most_bytes_in_flight for link in self._links.values()), default=0)

    @property
    def threads(self) -> list[threading.Thread]:
        """Every I/O thread started so far and not closed."""
        return [thread for link in self._links.values() for thread in link.threads]

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or moving. False if `timeout_s` passed first."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while any(link.busy for link in self._links.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def detach(self, name: str, timeout_s: float = 30.0) -> bool:
        """Close one tier's link: drop what has not begun, wait for what has. False if something still runs; its thread
        is then left to itself."""
        with self._lock:
            link = self._links.pop(name, None)
            if link is None:
                return True
            link.close()
            self._tell_idle()
        return _join(link.threads, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Drop what has not begun, wait for what has, and stop the threads. Idempotent. A call into a tier that does
        not come back within `timeout_s` is left to its thread, which the end of the process ends."""
        with self._lock:
            self._closing = True
            for link in self._links.values():
                link.close()
            self._tell_idle()
        _join(self.threads, timeout_s)

    def _queue(self, transfer: Transfer) -> None:
        n = len(transfer.slots)
        if n == 0 or self._closing:
            transfer.dropped[:] = True
            self._ended(transfer)
            return
        link = self._link(transfer.tier.name)
        pieces = list(itertools.pairwise(link.bounds(transfer)))
        transfer.left = len(pieces)
        for start, stop in pieces:
            self._sequence += 1
            link.push(Chunk(int(transfer.urgency), self._sequence, transfer, start, stop))

    def _link(self, name: str) -> Link:
        if name not in self._links:
            budgets = self.budget(name, True), self.budget(name, False)
            self._links[name] = Link(
                name, self._n_threads, self._chunk_bytes, budgets, self._lock, self._ended, self._now
            )
        return self._links[name]

    def _ended(self, transfer: Transfer) -> None:
        """A link's thread (or `cancel`) finished the last row of a transfer. Under the lock."""
        self._done.append(transfer)
        transfer.done.set()
        self._tell_idle()

    def _tell_idle(self) -> None:
        if not any(link.busy for link in self._links.values()):
            self._idle.notify_all()

    def _sum(self, value: Callable[[Link, bool], int]) -> dict[str, int]:
        links = self._links.values()
        return {name: sum(value(link, read) for link in links) for name, read in (("read", True), ("write", False))}


def _join(threads: list[threading.Thread], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
