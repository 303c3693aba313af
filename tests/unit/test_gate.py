"""The load-or-recompute gate and the prefill model it prices recompute with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.place.gate import LoadCurve, PrefillModel, choose_cut


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


def test_nothing_is_declined_before_recompute_was_seen_at_this_size() -> None:
    slow = LoadCurve(latency_s=100.0, bytes_per_s=1.0)
    found = [(slow, np.arange(11) * 1e6)]
    assert choose_cut(found, PrefillModel(), 0, 32, 320).blocks == 10
    short = PrefillModel()
    for _ in range(10):
        short.observe([(0, 8)], 0.01)
    assert choose_cut(found, short, 0, 32, 320).blocks == 10, "steps of 8 tokens say nothing of 320"


def test_a_tier_slower_than_recompute_is_declined_and_a_fast_one_is_not() -> None:
    model = trained()
    sizes = np.arange(33) * 1e6
    assert choose_cut([(LoadCurve(0.0, 1e3), sizes)], model, 0, 32, 1100).blocks == 0
    assert choose_cut([(LoadCurve(1e-4, 1e9), sizes)], model, 0, 32, 1100).blocks == 32


@given(
    latency=st.floats(0, 2),
    rate=st.floats(1e5, 1e10),
    backlog=st.floats(0, 2),
    blocks=st.integers(1, 40),
    price=st.floats(0, 9),
    split=st.integers(0, 40),
)
def test_the_cut_is_the_brute_force_minimum(
    latency: float, rate: float, backlog: float, blocks: int, price: float, split: int
) -> None:
    """Regression test (a) of the placement study: the gate against brute force over every cut."""
    model, prompt, start = trained(), 64 + 32 * blocks + 7, 64
    slow_blocks = np.maximum(np.arange(blocks + 1) - min(split, blocks), 0)
    fast = LoadCurve(0.0, 1e10), (np.arange(blocks + 1) - slow_blocks) * 1e6
    slow = LoadCurve(latency, rate, backlog), slow_blocks * 1e6

    def total(k: int) -> float:
        load = float(fast[0].seconds(fast[1])[k] + slow[0].seconds(slow[1])[k])
        return load + (1 + price) * float(model.seconds_from(np.array([start + 32 * k]), prompt)[0])

    cut = choose_cut([fast, slow], model, start, 32, prompt, price)
    assert total(cut.blocks) == pytest.approx(min(total(k) for k in range(blocks + 1)), rel=1e-9, abs=1e-12)
