"""A link serves whole transfers; it must end each when a server of single chunks would."""

from __future__ import annotations

import math
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.links import Link, Priority

CHUNK = 64

transfers = st.lists(
    st.tuples(
        st.floats(0.0, 30.0, allow_nan=False),
        st.integers(1, 1000),
        st.sampled_from(Priority),
    ),
    min_size=1,
    max_size=25,
    unique_by=lambda transfer: transfer[0],
)


def chunk_by_chunk(jobs: list[tuple[float, int, Priority]], bytes_per_s: float) -> list[float]:
    """When each job would end, by a server that decides anew after every chunk."""
    arrivals = deque(sorted((at, n) for n, (at, _, _) in enumerate(jobs)))
    left = [float(size) for _, size, _ in jobs]
    queues: list[deque[int]] = [deque() for _ in Priority]
    ends = [math.nan] * len(jobs)
    now = 0.0
    while arrivals or any(queues):
        if not any(queues):
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            n = arrivals.popleft()[1]
            queues[jobs[n][2]].append(n)
        queue = next(q for q in queues if q)
        n = queue[0]
        sent = min(CHUNK, left[n])
        left[n] -= sent
        now += sent / bytes_per_s
        if not left[n]:
            queue.popleft()
            ends[n] = now
    return ends


@given(transfers)
def test_transfers_end_when_single_chunks_would(jobs: list[tuple[float, int, Priority]]) -> None:
    loop = EventLoop()
    link = Link(loop, "link", 100.0, chunk_bytes=CHUNK)
    ends: dict[int, float] = {}

    def submit(n: int) -> None:
        link.submit(jobs[n][1], jobs[n][2], lambda: ends.update({n: loop.now}))

    for n, (at_s, _, _) in enumerate(jobs):
        loop.at(at_s, lambda n=n: submit(n))
    loop.run()
    expected = chunk_by_chunk(jobs, 100.0)
    assert all(math.isclose(ends[n], end, abs_tol=1e-6) for n, end in enumerate(expected))
    assert math.isclose(sum(link.moved_bytes), sum(size for _, size, _ in jobs), rel_tol=1e-9)
    assert link.longest_wait_s <= CHUNK / 100.0 + 1e-9
    assert link.idle
    assert not link.backlog_s(Priority.STORE)
