"""What the forecast must earn on real traces. Skipped where the traces are absent; the long ones are marked slow.

Bounds are the targets with room for other seeds; docs/forecast.md has the measured figures.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.place.lru import LeafFirstLRU
from kvtier.place.worth import WorthPolicy
from kvtier.predict.calibration import Calibration
from kvtier.sim.replay import Replay, replay
from kvtier.sim.traces import Trace, TraceRequest, load_trace
from kvtier.sim.workloads import parse_workload

SHARED = Path(os.environ.get("KVTIER_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared"))


def trace(name: str) -> Trace:
    path = SHARED / "traces" / name
    if not path.exists():
        pytest.skip(f"the trace {name} is not beside this checkout (set KVTIER_SHARED)")
    return load_trace(path)


def hit_rates(requests: list[TraceRequest], capacity: int) -> tuple[float, float]:
    """Percent of blocks hit by LRU and by kvtier."""
    lru = replay(requests, LeafFirstLRU, capacity)
    mine = replay(requests, WorthPolicy, capacity)
    return 100.0 * lru.hit_rate, 100.0 * mine.hit_rate


@pytest.mark.parametrize(("capacity", "belady"), [(1024, 19.5), (2048, 25.9), (4096, 32.1)])
def test_chat_gap_share(capacity: int, belady: float) -> None:
    lru, mine = hit_rates(trace("mooncake_conv_0-30min.jsonl.gz").requests(), capacity)
    assert (mine - lru) / (belady - lru) >= 0.18


@pytest.mark.parametrize("name", ["mooncake_conv_0-30min.jsonl.gz", "mooncake_synthetic.jsonl.gz"])
def test_never_worse_than_lru(name: str) -> None:
    requests = trace(name).requests()
    footprint = {"mooncake_conv_0-30min.jsonl.gz": 88_000, "mooncake_synthetic.jsonl.gz": 40_148}[name]
    for share, allowed in ((0.02, 0.3), (0.1, 0.1), (0.3, 0.1), (0.6, 0.1)):
        lru, mine = hit_rates(requests, int(share * footprint))
        assert mine >= lru - allowed


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "belady", "share"), [(256, 35.8, 0.58), (512, 56.3, 0.52), (1024, 77.4, 0.38)])
def test_agent_sessions_gap_share(capacity: int, belady: float, share: float) -> None:
    lru, mine = hit_rates(trace("cc_v6_global_454sessions.jsonl.gz").requests(seed=1), capacity)
    assert (mine - lru) / (belady - lru) >= share


def test_generated_agents_beat_lru_and_the_same_seed_gives_the_same_hits() -> None:
    requests = parse_workload("workload:agent?sessions=60&hours=1").requests(1)
    lru, mine = hit_rates(requests, 400)
    assert mine > lru + 0.5
    assert hit_rates(requests, 400) == (lru, mine)


def test_no_reuse_costs_nothing() -> None:
    """Prompts that never return: nothing to win, nothing to lose, and nothing is believed."""
    requests = parse_workload("workload:chat?sessions=150&hours=1").requests(3)
    seen: set[bytes] = set()
    once = [request for request in requests if not (request.chain[:8] in seen or seen.add(request.chain[:8]))]
    lru, mine = hit_rates(once, 200)
    assert mine == lru


def test_predictions_on_a_generated_workload_are_calibrated() -> None:
    requests = parse_workload("workload:agent?sessions=150&hours=2").requests(1)
    run = Replay(lambda view: WorthPolicy(view, guarded=False), 500)
    assert isinstance(run.policy, WorthPolicy)
    for n, request in enumerate(requests):
        if n == len(requests) // 3:
            run.policy.forecast.log = Calibration()
        run.step(request)
    log = run.policy.forecast.log
    assert isinstance(log, Calibration)
    assert log.count > 2000
    assert log.expected_calibration_error().value < 0.03


def test_forgetting_ghosts_bounds_the_tree_and_costs_little() -> None:
    requests = parse_workload("workload:agent?sessions=120&hours=3").requests(1)
    hits = {}
    for limit in (10**9, 2000):
        run = Replay(WorthPolicy, 500)
        assert isinstance(run.policy, WorthPolicy)
        for n, request in enumerate(requests):
            run.step(request)
            while n % 20 == 0 and run.tree.blocks > limit:
                for segment in run.policy.forecast.forgettable(run.tree.blocks - limit, run.tier.extent):
                    run.tree.truncate(segment, 0)
        run.policy.forecast.sessions.check_integrity()
        run.tier.check_integrity()
        hits[limit] = run.result().hit_rate
    assert hits[2000] > hits[10**9] - 0.02
