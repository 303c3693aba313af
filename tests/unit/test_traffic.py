"""Meters of a cache: what the gate prices by, and how it explains itself."""

from __future__ import annotations

import pytest

from kvtier.cache.request import CachedRequest
from kvtier.cache.traffic import Traffic
from kvtier.model.keys import Chain
from kvtier.model.request import RequestContext
from kvtier.observe.metrics import Recorder
from kvtier.place.gate import Cut
from kvtier.testing.clock import VirtualClock


def request(name: str) -> CachedRequest:
    return CachedRequest(RequestContext(request_id=name, arrival_s=0.0), Chain(b""), 0)


def traffic() -> tuple[Traffic, VirtualClock, Recorder]:
    clock, recorder = VirtualClock(), Recorder()
    return Traffic(clock, recorder, 4, ["nvme"]), clock, recorder


def test_a_request_queues_behind_those_before_it_and_no_others() -> None:
    meters, _, _ = traffic()
    first, second, third = request("a"), request("b"), request("c")
    for waiting, seconds in ((first, 1.0), (second, 2.0), (third, 4.0)):
        meters.waits(waiting, seconds)
    assert [meters.gpu_for(r).queue_s for r in (first, second, third)] == [0.0, 1.0, 3.0]
    meters.waits(first, 0.5)
    assert meters.gpu_for(third).queue_s == 2.5, "an estimate renewed keeps its place"
    meters.started(first)
    assert meters.gpu_for(third).queue_s == 2.0
    assert meters.gpu_for(request("new")).queue_s == 6.0


def test_prices_follow_what_was_measured() -> None:
    meters, clock, _ = traffic()
    assert meters.gpu_for(request("a")).price == 0.0
    for _ in range(3):
        meters.arrived()
    for _ in range(600):
        clock.advance(1.0)
        meters.prefilled(0.5)
        meters.moved("nvme", 4 * 0.25)
    assert meters.gpu_share() == pytest.approx(0.5, abs=0.02)
    assert meters.gpu_for(request("a")).price == pytest.approx(1.0, abs=0.1)
    assert meters.link_share("nvme") == pytest.approx(0.25, abs=0.02)
    assert meters.link_price("nvme") == pytest.approx(1 / 3, abs=0.05)
    assert meters.link_price("unknown") == 0.0
    for _ in range(2):
        meters.left()
    assert meters.gpu_for(request("a")).price == meters.link_price("nvme") == 0.0, "alone, it delays nobody"


def test_a_link_that_is_always_busy_shows_within_seconds_and_is_calm_within_seconds() -> None:
    meters, clock, _ = traffic()
    for _ in range(20):
        clock.advance(0.5)
        meters.moved("nvme", 4 * 0.5)
    assert meters.busiest_link() > 0.95
    clock.advance(10.0)
    assert meters.busiest_link() < 0.1


def test_decisions_are_explained_by_their_terms() -> None:
    meters, _, recorder = traffic()
    meters.decided("r", 0, 1000, Cut(5, 0.3, 1.0, 10, 1.2, 0.1, 2.0))
    sums, seen = recorder.drain()
    assert sums["kvtier_gate_decisions", ("part",)] == 1
    by_term = {labels[0]: value for (name, labels), value in sums.items() if name == "kvtier_gate_seconds"}
    assert by_term == pytest.approx(
        {"load": 0.3, "exposed": 0.1, "recompute": 1.0, "recompute_without": 2.0, "queue": 0.1}
    )
    assert seen["kvtier_effective_hit", ()] == [pytest.approx(1 - 1.2 / 2.1)]
    assert meters.decisions[0].request_id == "r"
