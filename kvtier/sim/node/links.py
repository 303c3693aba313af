"""A link: one direction between two memories, a server that is never interrupted within a chunk.

Four priorities: what is more urgent goes first, equals first come first served. A transfer is one job whatever its
size; when something more urgent arrives, it gives way at the end of the chunk under way. That is exactly what a queue
of chunks would do, at the cost of one event a job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial

from kvtier.sim.node.events import EventLoop

CHUNK_BYTES = 64 << 20  # at most; what demand may have to wait for


class Priority(IntEnum):
    """The most urgent first."""

    DEMAND = 0
    LOOK_AHEAD = 1
    SPECULATIVE = 2
    STORE = 3


class Job:
    """A transfer over one link."""

    __slots__ = ("left_bytes", "on_done", "priority")

    def __init__(self, n_bytes: float, priority: Priority, on_done: Callable[[], None]) -> None:
        self.left_bytes = n_bytes
        self.priority = priority
        self.on_done = on_done


class Link:
    """One link. `moved_bytes` counts by priority what was sent, `busy_s` the time spent on it."""

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        bytes_per_s: float,
        latency_s: float = 0.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.moved_bytes = [0.0] * len(Priority)
        self.busy_s = 0.0
        self.longest_wait_s = 0.0  # of demand for what is less urgent
        self.on_demand: Callable[[float], None] = lambda seconds: None  # told of time spent on it
        self._loop = loop
        self._chunk_bytes = chunk_bytes
        self._queues: list[deque[Job]] = [deque() for _ in Priority]
        self._queued_bytes = [0.0] * len(Priority)
        self._active: Job | None = None
        self._since_s = 0.0
        self._turn = 0  # of the active job, so that an event planned for an earlier one is known as such
        self._gives_way = False

    @property
    def idle(self) -> bool:
        """Nothing under way."""
        return self._active is None

    def submit(self, n_bytes: float, priority: Priority, on_done: Callable[[], None]) -> Job:
        """Send `n_bytes`; `on_done` is called when the last one has arrived."""
        job = Job(n_bytes, priority, on_done)
        self._queues[priority].append(job)
        self._queued_bytes[priority] += n_bytes
        self._press(priority)
        return job

    def bump(self, job: Job, priority: Priority) -> None:
        """Make a transfer more urgent, now that somebody waits for it. It joins the end of the more urgent queue."""
        if priority >= job.priority:
            return
        if job is not self._active:
            try:
                self._queues[job.priority].remove(job)
            except ValueError:
                return  # it has arrived
            self._queued_bytes[job.priority] -= job.left_bytes
            self._queues[priority].append(job)
            self._queued_bytes[priority] += job.left_bytes
        job.priority = priority
        self._press(priority)

    def backlog_s(self, priority: Priority = Priority.DEMAND) -> float:
        """Seconds before something submitted now at this priority would begin, as far as is known."""
        ahead = sum(self._queued_bytes[: priority + 1])
        active = self._active
        if active is not None:
            sent = (self._loop.now - self._since_s) * self.bytes_per_s
            if active.priority <= priority:
                ahead += max(0.0, active.left_bytes - sent)
            else:
                ahead += max(0.0, min(self._end_of_chunk(sent), active.left_bytes) - sent)
        return max(0.0, ahead / self.bytes_per_s)

    def _press(self, priority: Priority) -> None:
        """Something of this priority waits."""
        active = self._active
        if active is None:
            self._next()
        elif priority < active.priority and not self._gives_way:
            sent = (self._loop.now - self._since_s) * self.bytes_per_s
            boundary = self._end_of_chunk(sent)
            if priority == Priority.DEMAND:
                wait_s = (min(boundary, active.left_bytes) - sent) / self.bytes_per_s
                self.longest_wait_s = max(self.longest_wait_s, wait_s)
            if boundary < active.left_bytes:
                self._gives_way = True
                when_s = self._since_s + boundary / self.bytes_per_s
                self._loop.at(when_s, partial(self._give_way, self._turn, boundary))

    def _give_way(self, turn: int, sent: float) -> None:
        job = self._active
        if turn != self._turn or job is None:
            return
        self._account(job, sent)
        job.left_bytes -= sent
        self._queues[job.priority].appendleft(job)
        self._queued_bytes[job.priority] += job.left_bytes
        self._active = None
        self._next()

    def _next(self) -> None:
        self._turn += 1
        self._gives_way = False
        for priority, queue in enumerate(self._queues):
            if queue:
                job = queue.popleft()
                self._queued_bytes[priority] -= job.left_bytes
                self._active, self._since_s = job, self._loop.now
                self._loop.after(job.left_bytes / self.bytes_per_s, partial(self._done, self._turn))
                return

    def _done(self, turn: int) -> None:
        job = self._active
        if turn != self._turn or job is None:
            return
        self._account(job, job.left_bytes)
        self._active = None
        self._next()
        if self.latency_s:
            self._loop.after(self.latency_s, job.on_done)
        else:
            job.on_done()

    def _account(self, job: Job, sent: float) -> None:
        self.moved_bytes[job.priority] += sent
        self.busy_s += sent / self.bytes_per_s
        if job.priority == Priority.DEMAND:
            self.on_demand(sent / self.bytes_per_s)

    def _end_of_chunk(self, sent: float) -> float:
        # A little less than a whole number of chunks is that number: times are sums of floats.
        return max(1, math.ceil(sent / self._chunk_bytes - 1e-9)) * self._chunk_bytes
