"""The multi-tier replay's own promises: regression tests (a) to (j) of the placement study, and its invariants.

The long ones, on recorded traces, run with KVTIER_SOAK=1.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.index.tree import Segment
from kvtier.sim.node.arrivals import plan
from kvtier.sim.node.experiment import Setting, make_row, serve
from kvtier.sim.node.flight import Flight
from kvtier.sim.node.hardware import load_hardware
from kvtier.sim.node.hints import Announcer
from kvtier.sim.node.links import Priority
from kvtier.sim.node.node import Node
from kvtier.sim.node.variants import VARIANTS
from kvtier.sim.sources import open_source
from kvtier.sim.workloads import parse_workload
from tests.sim.node_scenes import BLOCK_BYTES, BLOCK_TOKENS, hardware, node, opened, request

soak = pytest.mark.skipif("KVTIER_SOAK" not in os.environ, reason="takes minutes; set KVTIER_SOAK=1")


def first(n: int, start: int = 1) -> list[int]:
    return list(range(start, start + n))


def run_checked(made: Node, sessions: list) -> None:  # type: ignore[type-arg]
    """Every invariant after every event."""
    made.plan(sessions)
    while made.loop.step():
        made.check_integrity()
    assert not made.running
    assert not made.waiting


def path_of(made: Node, blocks: list[int]) -> list[Segment]:
    return made.tree.insert(request(blocks).chain)


# --- (a) the gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.8])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_the_cut_is_the_best_of_all_cuts(rho: float, overlap: bool) -> None:
    drawn = np.random.default_rng(7)
    for _ in range(40):
        speeds = {name: float(drawn.uniform(2, 60)) for name in ("h2d", "nvme_read")}
        made, _ = node(on=hardware(**speeds), overlap=overlap, price_links=False)
        # So much use, long enough ago that it has decayed to rho.
        made.running = 100
        made.gpu_busy.note(60.0 * -math.log(1.0 - rho), 0.0) if rho else None
        price = rho / (1.0 - rho)
        total = int(drawn.integers(2, 30))
        in_hbm = int(drawn.integers(0, total))
        in_dram = int(drawn.integers(in_hbm, total + 1))
        found = int(drawn.integers(in_dram, total + 1))
        backlog = {"h2d": float(drawn.integers(0, 3)), "nvme_read": float(drawn.integers(0, 3))}
        for link in (made.h2d, made.nvme_read):
            if backlog[link.name]:
                link.submit(backlog[link.name] * link.bytes_per_s, Priority.DEMAND, lambda: None)
        flight = Flight(0, opened("s"), 0, 0.0, request(first(total)), total * BLOCK_TOKENS, 0)
        costs = {}
        for cut in range(in_hbm, found + 1):
            rest_s = max(total - cut, 1 / BLOCK_TOKENS) / 10.0
            loads_s = [0.0]
            if cut > in_hbm:
                loads_s.append(backlog["h2d"] + (cut - in_hbm) / speeds["h2d"])
            if cut > in_dram:
                loads_s.append(backlog["nvme_read"] + (cut - in_dram) / speeds["nvme_read"])
            ttft_s = max(max(loads_s), rest_s) if overlap else max(loads_s) + rest_s
            costs[cut] = ttft_s + price * rest_s
        chosen = made._cut(flight, in_hbm, in_dram, found)
        assert costs[chosen] == pytest.approx(min(costs.values()))


# --- (b) starting before all is loaded --------------------------------------------------------------------------------


def test_b_nobody_starts_with_more_to_load_than_to_compute() -> None:
    made, _ = node(hbm=200, dram=300, nvme=2000)
    started: list[tuple[float, float]] = []
    resident = made.gpu.resident

    def spy(flight: Flight) -> int:
        started.append((flight.load_left_s(made.loop.now), flight.compute_s))
        return resident(flight)

    made.gpu.resident = spy
    made.run(plan(parse_workload("workload:agent?sessions=30&hours=0.05", BLOCK_TOKENS).requests(1), 1.0, 1))
    assert any(left_s for left_s, _ in started)
    assert all(left_s <= compute_s for left_s, compute_s in started)
    assert made.gpu.stalled_s < 0.01 * made.gpu.busy_s


# --- (c) what is on its way down is a hit -----------------------------------------------------------------------------


def test_c_a_block_being_copied_down_is_a_hit() -> None:
    made, score = node("native", hbm=10, on=hardware(d2h=0.5, prefill=100.0))
    run_checked(
        made,
        [
            opened("a", request(first(8), 0.0), request(first(8), 2.0)),
            opened("b", request(first(8, 100), 1.0)),  # drives the first out of HBM while its copy takes 16 s
        ],
    )
    assert score.blocks["miss"] == 16
    assert score.blocks["dram"] >= 6


# --- (d) no tail without its head -------------------------------------------------------------------------------------


def test_d_a_full_write_queue_drops_tails_never_heads() -> None:
    made, _ = node("native", hbm=100, dram=100, on=hardware(nvme_write=1.0, prefill=1000.0))
    run_checked(made, [opened("a", request(first(30), 0.0)), opened("b", request(first(30, 100), 0.1))])
    assert made.nvme.leading(path_of(made, first(30))) == 10  # ten seconds' worth
    assert made.nvme.leading(path_of(made, first(30, 100))) == 0
    assert made.storer.dropped_blocks == 50
    made.nvme.check_integrity()


requests_drawn = st.lists(
    st.tuples(
        st.integers(0, 3),  # which tree of prompts
        st.lists(st.integers(0, 1), min_size=1, max_size=5),  # which branch at every fork
        st.floats(0.0, 20.0),
        st.integers(0, 300),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60)
@given(requests_drawn, st.sampled_from(sorted(VARIANTS)), st.integers(0, 40), st.integers(0, 60))
def test_d_invariants_hold_after_every_event(
    drawn: list[tuple[int, list[int], float, int]], variant: str, dram: int, nvme: int
) -> None:
    ids: dict[tuple[int, ...], int] = {}
    sessions = []
    for n, (root, turns, at_s, output) in enumerate(drawn):
        chain = []
        for depth in range(len(turns)):
            chain += [ids.setdefault((root, *turns[: depth + 1], -1, block), len(ids) + 1) for block in range(3)]
        sessions.append(opened(str(n % 7), request(chain, at_s, output_tokens=output)))
    made, score = node(variant, hbm=20, dram=dram, nvme=nvme if dram else 0, promote=variant.startswith("kvtier"))
    run_checked(made, sessions)
    assert len(score.ttft_s) + made.refused == len(drawn)
    assert sum(score.blocks.values()) == sum(
        s.requests[0].blocks
        for s in sessions
        if s.requests[0].blocks + -(-s.requests[0].outcome.output_tokens // 100) <= 20
    )
    assert all(seconds > 0 for seconds in score.ttft_s)


# --- (e) queued and hinted blocks stay --------------------------------------------------------------------------------


def test_e_what_is_protected_goes_only_when_nothing_else_is_left() -> None:
    made, _ = node("native", hbm=20)
    for start in (1, 100):
        made.run([opened("s", request(first(8, start), made.loop.now))])
    kept, other = path_of(made, first(8)), path_of(made, first(8, 100))
    made.hbm.protect(kept)
    assert made.hbm.make_room(12, made.loop.now) == 12
    assert made.hbm.leading(kept) == 8
    assert made.hbm.leading(other) == 0
    assert made.hbm.make_room(20, made.loop.now) == 12
    assert made.hbm.leading(kept) == 8
    assert made.hbm.make_room(20, made.loop.now, force=True) == 20
    assert made.hbm.forced == 8


def test_e_a_hinted_session_is_kept_and_brought_up() -> None:
    """Its blocks have left HBM; announced, they are there again before it is."""
    scene = [
        opened("a", request(first(8), 0.0), request(first(9), 20.0)),
        *(opened(f"other {n}", request(first(8, 100 * n), 1.0 + n)) for n in range(1, 6)),
    ]
    found = {}
    for variant in ("kvtier", "kvtier+hints"):
        made, score = node(variant, dram=100)
        run_checked(made, scene)
        found[variant] = (score.blocks["hbm"], made.speculation.used_share)
    assert found["kvtier+hints"][0] == 8
    assert found["kvtier"][0] < 8
    assert found["kvtier+hints"][1] == 1.0


def test_e_a_hinted_session_is_brought_up_once_there_is_room() -> None:
    """When it is due, somebody else fills HBM until half a second before it is back."""
    made, score = node("kvtier+hints", dram=100)
    run_checked(
        made,
        [
            opened("a", request(first(8), 0.0), request(first(9), 20.0)),
            opened("b", request(first(19, 100), 15.5, output_tokens=100)),
        ],
    )
    assert score.blocks["hbm"] == 8
    assert made.speculation.used_share == 1.0


def test_e_protection_ends_however_wrong_the_hints() -> None:
    requests = parse_workload("workload:agent?sessions=25&hours=0.1").requests(1)
    wrong = Announcer(missing=0.3, false_share=0.5, mistimed=0.9)
    made, _ = serve(requests, load_hardware("A25"), VARIANTS["kvtier+hints"], 1, Setting(announcer=wrong, load=4.0))
    assert made.hinted is not None
    assert sum(made.hinted.outcomes.values()) > 100
    assert (made.hbm.protected, made.dram.protected) == (0, 0)
    made.check_integrity()


def test_e_room_for_a_promoted_tail_is_not_made_of_its_head() -> None:
    """The head is all that is left to evict."""
    made, _ = node("kvtier", hbm=12, dram=100, promote=True)
    made.run([opened("a", request(first(12), 0.0))])
    path = path_of(made, first(12))
    made.hbm.evict(path[-1], 4)
    made.hbm.policy.on_evicted(path[-1], 12, made.loop.now)
    made.hbm.outside = 8  # what runs takes the rest
    promotion = made.promotion
    assert promotion is not None
    promotion.promoter.plan = lambda candidates, *rest: candidates  # type: ignore[method-assign, assignment]
    promotion.tick()
    assert made.hbm.leading(path) == 4
    assert made.speculation.moved_blocks == 0


# --- (f) is tests/unit/test_node_links.py; here: demand pushes a prefetch under way -----------------------------------


def test_f_demand_pushes_the_prefetch_it_waits_for() -> None:
    made, score = node(
        "kvtier+hints", hbm=40, dram=100, on=hardware(h2d=4.0, prefill=2.0), gate="none", look_ahead=False
    )
    run_checked(
        made,
        [
            opened("a", request(first(20), 0.0), request(first(20), 30.0)),
            *(opened(f"other {n}", request(first(30, 1000 * n), 10.0 + n / 10)) for n in range(1, 2)),
        ],
    )
    assert sum(made.h2d.moved_bytes) <= 20 * BLOCK_BYTES  # moved once, by prefetch or by demand
    assert score.blocks["miss"] == 20 + 30


# --- (g) worth on NVMe ------------------------------------------------------------------------------------------------


@soak
@pytest.mark.parametrize("tiers", ["", "hbm=240GiB,dram=1TiB,nvme=4TiB"])
def test_g_the_guard_keeps_worth_on_nvme_within_a_tenth_of_a_point(shared_folder: Path, tiers: str) -> None:
    requests = open_source(str(shared_folder / "traces" / "mooncake_conv_0-30min.jsonl.gz")).requests(1)
    misses = []
    for order in ("lru", "kvtier"):
        variant = msgspec.structs.replace(VARIANTS["kvtier"], nvme=order)
        _, score = serve(requests, load_hardware("A25"), variant, 1, Setting(load=0.5, tiers=tiers))
        misses.append(score.blocks["miss"] / sum(score.blocks.values()))
    assert misses[1] <= misses[0] + 0.001


# --- (h) overload -----------------------------------------------------------------------------------------------------


def test_h_overload_ends_without_collapse() -> None:
    """Four times what the node can take, with one slow drive: it works through it, faster than native."""
    requests = parse_workload("workload:rag?hours=0.05").requests(1)[:700]
    hw = load_hardware("A6")
    mean_s = {}
    for name in ("native", "kvtier"):
        made, score = serve(requests, hw, VARIANTS[name], 1, Setting(load=4.0, tiers="hbm=60GiB,dram=120GiB,nvme=8TiB"))
        assert len(score.ttft_s) == len(requests) - len(requests) // 4
        assert not made.waiting
        assert not made.running
        mean_s[name] = float(np.mean(score.ttft_s))
    assert mean_s["kvtier"] < mean_s["native"]


@soak
def test_h_overload_by_recorded_agents_ends_without_collapse(shared_folder: Path) -> None:
    """Coding agents start twelve times as often as recorded, on drives of 6 GB/s: requests never stop waiting."""
    requests = open_source(str(shared_folder / "traces" / "cc_v6_global_454sessions.jsonl.gz")).requests(1)
    requests = [r for r in requests if r.arrival_s - requests[0].arrival_s < 8 * 3600.0]
    mean_s = {}
    for name in ("native", "kvtier"):
        made, score = serve(requests, load_hardware("A6"), VARIANTS[name], 1, Setting(load=12.0))
        assert not made.waiting
        assert not made.running
        mean_s[name] = float(np.mean(score.ttft_s))
    assert mean_s["native"] > 100.0, "it is an overload"
    assert mean_s["kvtier"] < 0.6 * mean_s["native"]


# --- (i) determinism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["native", "kvtier", "kvtier+hints"])
def test_i_equal_seeds_give_equal_rows(variant: str) -> None:
    source = parse_workload("workload:agent?sessions=25&hours=0.1")
    hw, setting = load_hardware("A6"), Setting(announcer=Announcer(missing=0.2, false_share=0.2, mistimed=0.5))
    rows = []
    for seed in (1, 1, 2):
        made, score = serve(source.requests(seed), hw, VARIANTS[variant], seed, setting)
        rows.append(msgspec.json.encode(make_row("t", made, score, 0, 1.0, setting)))
    assert rows[0] == rows[1] != rows[2]


# --- (j) bytes are counted --------------------------------------------------------------------------------------------


def test_j_every_byte_is_counted_once() -> None:
    made, score = node("native", hbm=10, dram=10, nvme=100, on=hardware(prefill=100.0))
    run_checked(
        made,
        [opened("a", request(first(8), 0.0), request(first(8), 60.0)), opened("b", request(first(8, 100), 30.0))],
    )
    assert score.blocks["miss"] == 16
    assert score.blocks["nvme"] > 0
    moved = {link.name: sum(link.moved_bytes) / BLOCK_BYTES for link in made.links}
    loaded = score.blocks["dram"] + score.blocks["nvme"]
    assert moved["nvme_write"] == 16 == made.storer.written_blocks
    assert moved["nvme_read"] == score.blocks["nvme"]
    assert moved["h2d"] == loaded


# --- what it must show, at small size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_any_cache_is_better_than_none(share: float) -> None:
    requests = parse_workload("workload:chat?sessions=250&hours=0.2").requests(1)
    blocks = len(set(itertools.chain.from_iterable(np.frombuffer(r.chain, np.uint64).tolist() for r in requests)))
    dram = max(1, round(share * blocks / 9))
    sizes = Setting(load=1.0, tiers=f"hbm=400,dram={dram},nvme={8 * dram}")
    mean_s = {
        name: float(np.mean(serve(requests, load_hardware("A6"), VARIANTS[name], 1, sizes)[1].ttft_s))
        for name in ("none", "engine", "kvtier")
    }
    assert mean_s["kvtier"] <= mean_s["engine"] <= mean_s["none"]


def test_nothing_reused_nothing_read() -> None:
    requests = [request(first(10, 100 * n), 0.3 * n) for n in range(1, 200)]
    mean_s = {}
    for name in ("engine", "kvtier"):
        made, score = node(name, hbm=60, dram=100, nvme=300, on=hardware(prefill=100.0))
        made.run([opened(str(n), r) for n, r in enumerate(requests)])
        assert not sum(made.nvme_read.moved_bytes)
        assert not sum(made.h2d.moved_bytes)
        mean_s[name] = float(np.mean(score.ttft_s))
    assert mean_s["kvtier"] <= 1.01 * mean_s["engine"]


@soak
@pytest.mark.parametrize(
    ("trace", "load", "point", "most"),
    [
        ("mooncake_conv_0-30min.jsonl.gz", 0.5, "A25", 1.0),
        ("mooncake_conv_0-30min.jsonl.gz", 0.5, "A6", 1.0),
        ("mooncake_synthetic.jsonl.gz", 0.38, "A25", 1.0),
        ("mooncake_synthetic.jsonl.gz", 0.38, "A6", 0.8),
        ("cc_v6_global_454sessions.jsonl.gz", 1.5, "A25", 0.94),
    ],
)
def test_recorded_traces_are_served_sooner_than_by_native(
    shared_folder: Path, trace: str, load: float, point: str, most: float
) -> None:
    requests = open_source(str(shared_folder / "traces" / trace)).requests(1)
    setting, hw = Setting(load=load), load_hardware(point)
    mean_s = {
        name: float(np.mean(serve(requests, hw, VARIANTS[name], 1, setting)[1].ttft_s)) for name in ("native", "kvtier")
    }
    assert mean_s["kvtier"] <= most * mean_s["native"]
