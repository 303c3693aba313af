"""Links of the replayed node: what goes first, and what is pushed."""

from __future__ import annotations

import pytest

from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.links import Link, Priority


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


@pytest.fixture
def link(loop: EventLoop) -> Link:
    return Link(loop, "h2d", 100.0, chunk_bytes=50)


def test_demand_waits_for_one_chunk_at_most(loop: EventLoop, link: Link) -> None:
    ends: dict[str, float] = {}
    link.submit(1000, Priority.STORE, lambda: ends.update(store=loop.now))
    loop.at(0.6, lambda: link.submit(100, Priority.DEMAND, lambda: ends.update(demand=loop.now)))
    loop.run()
    assert ends == {"demand": pytest.approx(1.0 + 1.0), "store": pytest.approx(11.0)}
    assert link.longest_wait_s == pytest.approx(0.4)


def test_speculation_moves_nothing_while_demand_is_queued(loop: EventLoop, link: Link) -> None:
    for _ in range(3):
        link.submit(100, Priority.DEMAND, lambda: None)
    link.submit(100, Priority.SPECULATIVE, lambda: None)
    while loop.now < 3.0 - 1e-9 and loop.step():
        assert not link.moved_bytes[Priority.SPECULATIVE]
    loop.run()
    assert link.moved_bytes[Priority.SPECULATIVE] == 100


def test_what_somebody_waits_for_is_pushed(loop: EventLoop, link: Link) -> None:
    ends: dict[str, float] = {}
    link.submit(100, Priority.DEMAND, lambda: None)
    first = link.submit(100, Priority.SPECULATIVE, lambda: ends.update(first=loop.now))
    link.submit(100, Priority.LOOK_AHEAD, lambda: ends.update(look_ahead=loop.now))
    link.bump(first, Priority.DEMAND)
    loop.run()
    assert ends == {"first": pytest.approx(2.0), "look_ahead": pytest.approx(3.0)}
    assert link.moved_bytes == [200, 100, 0, 0]


def test_pushing_what_is_under_way_or_there_changes_no_bytes(loop: EventLoop, link: Link) -> None:
    ends: list[float] = []
    job = link.submit(100, Priority.SPECULATIVE, lambda: ends.append(loop.now))
    loop.at(0.2, lambda: link.submit(100, Priority.LOOK_AHEAD, lambda: ends.append(loop.now)))
    loop.at(0.3, lambda: link.bump(job, Priority.DEMAND))
    loop.run()
    link.bump(job, Priority.DEMAND)
    assert ends == [pytest.approx(1.0), pytest.approx(2.0)]
    assert sum(link.moved_bytes) == 200


def test_backlog_is_what_a_newcomer_waits(loop: EventLoop, link: Link) -> None:
    link.submit(200, Priority.STORE, lambda: None)
    assert link.backlog_s(Priority.DEMAND) == pytest.approx(0.5)  # the chunk under way
    assert link.backlog_s(Priority.STORE) == pytest.approx(2.0)
    link.submit(100, Priority.DEMAND, lambda: None)
    assert link.backlog_s(Priority.DEMAND) == pytest.approx(1.5)


def test_latency_comes_on_top(loop: EventLoop) -> None:
    link, ends = Link(loop, "nvme", 100.0, latency_s=0.25), []
    link.submit(100, Priority.DEMAND, lambda: ends.append(loop.now))
    loop.run()
    assert ends == [pytest.approx(1.25)]
