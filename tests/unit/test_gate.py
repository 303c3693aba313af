"""The load-or-recompute gate and the prefill model it prices recompute with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.place.gate import (
    IDLE,
    Cut,
    GpuLoad,
    LinkLoad,
    LoadCurve,
    PrefillModel,
    Stages,
    choose_cut,
    may_start,
    recompute_by_cut,
    work_left,
)


def trained(a: float = 0.01, b: float = 1e-3, c: float = 1e-7) -> PrefillModel:
    """A model that has seen exact prefill steps of many sizes."""
    model = PrefillModel()
    for n in (32, 64, 256, 1024, 2048):
        for start in (0, 512):
            model.observe([(start, start + n)], a + b * n + c * n * (2 * start + n) / 2)
    return model


def test_the_model_recovers_what_generated_its_observations() -> None:
    model = trained()
    expected = 0.01 + 1e-3 * 1500 + 1e-7 * 1500 * (500 + 2000) / 2
    assert model.seconds_from(np.array([500]), 2000)[0] == pytest.approx(expected, rel=1e-6)
    assert model.seconds_from(np.array([2000]), 2000)[0] == 0.0


def test_a_thousand_short_steps_do_not_push_out_what_a_long_one_said() -> None:
    model = trained()
    before = model.seconds_from(np.array([0]), 2048)[0]
    for _ in range(1000):
        model.observe([(896, 900)], 0.012)
    assert model.seconds_from(np.array([0]), 2048)[0] == pytest.approx(before, rel=0.1)


def test_several_prompts_in_one_step_count_together() -> None:
    model = PrefillModel()
    for n in (100, 200, 400, 800):
        model.observe([(0, n), (0, n)], 2e-3 * n)
    assert model.seconds_from(np.array([0]), 800)[0] == pytest.approx(0.8, rel=0.05)


def cut_of(stages: Stages, model: PrefillModel, blocks: int, prompt: int, gpu: GpuLoad = IDLE) -> Cut:
    return choose_cut(stages, recompute_by_cut(model, 0, 32, prompt, blocks), blocks, gpu)


def test_nothing_is_declined_before_recompute_was_seen_at_this_size() -> None:
    stages = [[LinkLoad(LoadCurve(latency_s=100.0, bytes_per_s=1.0), np.arange(11) * 1e6)]]
    assert cut_of(stages, PrefillModel(), 10, 320).blocks == 10
    short = PrefillModel()
    for _ in range(10):
        short.observe([(0, 8)], 0.01)
    assert cut_of(stages, short, 10, 320).blocks == 10, "steps of 8 tokens say nothing of 320"


def test_a_tier_slower_than_recompute_is_declined_and_a_fast_one_is_not() -> None:
    model = trained()
    sizes = np.arange(33) * 1e6
    assert cut_of([[LinkLoad(LoadCurve(0.0, 1e3), sizes)]], model, 32, 1100).blocks == 0
    assert cut_of([[LinkLoad(LoadCurve(1e-4, 1e9), sizes)]], model, 32, 1100).blocks == 32


def test_a_busy_gpu_loads_what_an_idle_one_would_recompute_and_a_busy_link_the_reverse() -> None:
    model = trained(a=0.0, c=0.0)
    sizes = np.arange(33) * 1e6  # 32 ms to compute a block, 40 ms to load it
    slow = LinkLoad(LoadCurve(0.0, 25e6), sizes)
    assert cut_of([[slow]], model, 32, 1100).blocks == 0
    assert cut_of([[slow]], model, 32, 1100, GpuLoad(price=1.0)).blocks == 32
    assert cut_of([[replace(slow, price=4.0)]], model, 32, 1100, GpuLoad(price=1.0)).blocks == 0


def test_what_a_full_queue_at_the_gpu_hides_costs_nothing() -> None:
    model = trained(a=0.0, c=0.0)
    slow = LinkLoad(LoadCurve(0.0, 20e6), np.arange(33) * 1e6)  # 50 ms a block
    cut = cut_of([[slow]], model, 32, 1100, GpuLoad(queue_s=0.71))
    assert cut.blocks == 14, "what loads within the queue is free, and no more"
    assert cut.exposed_s == pytest.approx(0.0)
    assert cut_of([[slow]], model, 32, 1100, GpuLoad(queue_s=5.0)).blocks == 32


def test_without_a_prefill_model_everything_found_is_offered_whatever_the_load() -> None:
    assert choose_cut([], None, 0).blocks == 0
    assert choose_cut([], None, 7, GpuLoad(queue_s=1.0, price=9.0)).blocks == 7


links = st.builds(
    lambda latency, rate, backlog, price, first: (LoadCurve(latency, rate, backlog), price, first),
    st.floats(0, 2),
    st.floats(1e5, 1e10),
    st.floats(0, 2),
    st.floats(0, 9),
    st.integers(0, 24),
)


@given(
    stages=st.lists(st.lists(links, max_size=3), max_size=3),
    blocks=st.integers(0, 24),
    price=st.one_of(st.just(0.0), st.just(0.8 / 0.2), st.floats(0, 9)),
    queue=st.floats(0, 3),
    overlap=st.booleans(),
    whole=st.booleans(),
)
def test_the_cut_is_the_brute_force_minimum(
    stages: list[list[tuple[LoadCurve, float, int]]],
    blocks: int,
    price: float,
    queue: float,
    overlap: bool,
    whole: bool,
) -> None:
    """Regression test (a) of the placement study: the gate against brute force over every cut, idle and at ρ = 0.8."""
    model, prompt = trained(), 32 * blocks + 7

    def moved(first: int, k: int) -> float:
        return max(0, k - first) * 1e6  # blocks below `first` are not on this link

    def cost(k: int) -> float:
        load, taken = 0.0, 0.0
        for stage in stages:
            slowest = 0.0
            for curve, of_link, first in stage:
                n_bytes = moved(first, k)
                if n_bytes:
                    slowest = max(slowest, curve.backlog_s + curve.latency_s + n_bytes / curve.bytes_per_s)
                    taken += of_link * n_bytes / curve.bytes_per_s
            load += slowest
        left = float(model.seconds_from(np.array([32 * k]), prompt)[0])
        first_token = max(load, queue + left) if overlap else max(load, queue) + left
        return first_token + price * left + taken

    real = [
        [LinkLoad(curve, np.array([moved(first, k) for k in range(blocks + 1)]), p) for curve, p, first in stage]
        for stage in stages
    ]
    gpu = GpuLoad(queue, price, overlap)
    cut = choose_cut(real, recompute_by_cut(model, 0, 32, prompt, blocks), blocks, gpu, whole)
    allowed = [0, blocks] if whole else list(range(blocks + 1))
    least = min(cost(k) for k in allowed)
    assert cut.blocks in allowed
    assert cost(cut.blocks) == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert 0.0 <= cut.exposed_s <= cut.load_s + 1e-9
    assert cut.effective_hit <= 1.0


def test_ties_go_to_the_longer_load() -> None:
    assert choose_cut([], np.ones(5), 4).blocks == 4


def test_a_cut_explains_itself_by_the_effective_hit_model() -> None:
    """Half of a prompt that is all attention: 1 - h² of the work is left, and the load is added to it."""
    assert work_left(0.5) == (0.5, 0.75)
    n = 10
    recompute = np.array([1.0 - (k / n) ** 2 for k in range(n + 1)])
    cut = choose_cut([[LinkLoad(LoadCurve(0.0, 100.0), np.arange(6.0))]], recompute[:6], 5)
    assert (cut.blocks, cut.found) == (5, 5)
    assert cut.recompute_s == pytest.approx(work_left(0.5)[1])
    assert cut.exposed_s == pytest.approx(0.05)
    assert cut.effective_hit == pytest.approx(1 - 0.8)


def test_compute_starts_only_when_the_load_will_not_hold_it_up() -> None:
    assert may_start(0.5, 0.5)
    assert not may_start(0.51, 0.5)
