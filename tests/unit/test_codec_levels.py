"""Choosing encodings by time and by quality."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codec.calibration import Gate
from kvtier.codec.levels import RECOMPUTE, Level, choose_level, choose_levels, pays, presets_within, select_codec
from kvtier.errors import ConfigError
from tests.unit.codec_rows import SMALL, calibration_of

MB = 1_000_000
LEVELS = [
    Level("raw", 160 * MB, 160 * MB, 20e9),
    Level("int8", 82 * MB, 160 * MB, 3e9, 1e-4),
    Level("d4", 45 * MB, 160 * MB, 1e9, 1e-3),
    Level("d3", 35 * MB, 160 * MB, 1e9, 5e-3),
]


@pytest.mark.parametrize(
    ("bytes_per_s", "recompute_s", "budget_s", "want"),
    [
        (1e9, 9.0, 0.2, "raw"),  # 0.16 s
        (1e9, 9.0, 0.1, "int8"),  # 0.082 s; d4 would wait 0.16 s for its decoder
        (200e6, 9.0, 0.3, "d4"),
        (200e6, 9.0, 0.2, "d3"),
        (200e6, 0.05, 0.2, RECOMPUTE),
        (10e6, 9.0, 0.2, "d3"),  # nothing fits: the quickest
        (10e6, 2.0, 0.2, RECOMPUTE),  # nothing fits, computing is quicker than 3.5 s
    ],
)
def test_the_finest_level_that_fits(bytes_per_s: float, recompute_s: float, budget_s: float, want: str) -> None:
    assert choose_level(LEVELS, bytes_per_s, recompute_s, budget_s).level == want


def test_a_drop_in_throughput_is_answered_by_coarser_levels_and_the_deadline_is_kept() -> None:
    speeds = [2e9, 2e9, 300e6, 300e6, 300e6, 2e9]
    plans = choose_levels([LEVELS] * 6, [9.0] * 6, 1.2, lambda i: speeds[i])
    assert [plan.level for plan in plans[:2]] == ["raw", "raw"]
    assert {plan.level for plan in plans[2:5]} <= {"int8", "d4", "d3"}
    assert sum(plan.seconds for plan in plans) <= 1.2


@given(
    speeds=st.lists(st.floats(1e6, 1e11), min_size=1, max_size=12),
    deadline_s=st.floats(0.01, 10),
    recompute_s=st.floats(0.001, 10),
)
def test_a_plan_misses_the_deadline_only_where_nothing_keeps_it(
    speeds: list[float], deadline_s: float, recompute_s: float
) -> None:
    n = len(speeds)
    plans = choose_levels([LEVELS] * n, [recompute_s] * n, deadline_s, lambda i: speeds[i])
    fastest = [min(recompute_s, *(level.seconds(speed) for level in LEVELS)) for speed in speeds]
    if all(seconds <= deadline_s / n for seconds in fastest):
        assert sum(plan.seconds for plan in plans) <= deadline_s * (1 + 1e-9)


def test_a_codec_slower_than_its_tier_is_refused() -> None:
    d4 = LEVELS[2]
    assert pays(d4, 500e6)
    assert not pays(d4, 3e9)  # an NVMe drive delivers the plain row before the decoder is done
    assert select_codec(LEVELS, 3.5e9, max_kl=1.0) == "raw"
    assert select_codec(LEVELS, 500e6, max_kl=1.0) == "d3"
    assert select_codec(LEVELS, 500e6, max_kl=2e-3) == "d4"


def test_lossy_codecs_need_a_budget() -> None:
    zstd = Level("zstd", 115 * MB, 160 * MB, 0.5e9)
    assert select_codec([*LEVELS, zstd], 100e6, max_kl=None) == "zstd"
    assert select_codec([*LEVELS, zstd], 3e9, max_kl=None) == "raw"


def test_presets_within_a_budget() -> None:
    calibration = calibration_of(
        SMALL, gates={"d6": Gate(1e-4, 6.5), "d4": Gate(1e-3, 4.5), "d3": Gate(3e-2, 3.5), "int8": Gate(1e-4, 8.25)}
    )
    assert presets_within(calibration) == ["d4", "d6"]
    assert presets_within(calibration, 2e-4) == ["d6"]
    assert presets_within(calibration, 1.0) == ["d3", "d4", "d6"]


def test_arguments_must_match() -> None:
    with pytest.raises(ConfigError):
        choose_levels([LEVELS], [1.0, 2.0], 1.0, lambda i: 1e9)
    with pytest.raises(ConfigError):
        choose_levels([[]], [1.0], 1.0, lambda i: 1e9)
