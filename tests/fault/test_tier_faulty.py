"""The faulty tier does exactly what its plan says, and always the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script, Seeded
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows, payload_of, read_back, soiled_buffers, store_rows
from kvtier.tiers.protocol import RowStatus

ROW_BYTES = 100
OK, IO_ERROR, FULL, CORRUPT, CLOSED = (
    RowStatus.OK,
    RowStatus.IO_ERROR,
    RowStatus.FULL,
    RowStatus.CORRUPT,
    RowStatus.CLOSED,
)


def make(*faults: Fault, slowdown: float = 1.0) -> tuple[FaultyTier, list[float]]:
    slept: list[float] = []
    return FaultyTier(MemoryTier(ROW_BYTES, 16), Script(faults), slowdown=slowdown, sleep=slept.append), slept


def write(tier: FaultyTier, n: int = 3, seed: int = 0) -> list[RowStatus]:
    rows = chain_rows(n, seed)
    slots = tier.reserve(n)
    assert slots is not None
    return tier.write(slots, rows, [payload_of(row, ROW_BYTES) for row in rows])


@pytest.mark.parametrize(
    ("kind", "status"), [(FaultKind.EIO, IO_ERROR), (FaultKind.ENOSPC, FULL), (FaultKind.SHORT, IO_ERROR)]
)
def test_a_write_fails_for_one_row_or_for_all_and_publishes_none_of_them(kind: FaultKind, status: RowStatus) -> None:
    tier, _ = make(Fault("write", 0, kind, row=1), Fault("write", 1, kind))
    assert write(tier) == [OK, status, OK]
    assert write(tier, seed=1) == [status] * 3
    assert write(tier, seed=2) == [OK] * 3
    assert isinstance(tier.inner, MemoryTier)
    assert len(tier.inner.published) == 5
    assert tier.stats().faults == {status.value: 4}
    assert tier.injected[kind] == 2
    assert tier.stats().used_rows == 9


@pytest.mark.parametrize(
    ("kind", "status"),
    [(FaultKind.EIO, IO_ERROR), (FaultKind.SHORT, IO_ERROR), (FaultKind.ENOSPC, IO_ERROR), (FaultKind.FLIP, CORRUPT)],
)
def test_a_read_fails_once_with_a_spoilt_target_and_then_works(kind: FaultKind, status: RowStatus) -> None:
    tier, _ = make(Fault("read", 1, kind, row=2, bit=77))
    rows = chain_rows(3)
    slots = store_rows(tier, rows)
    assert read_back(tier, slots, rows) == [OK] * 3
    targets = soiled_buffers(3, ROW_BYTES)
    assert tier.read(slots, rows, targets) == [OK, OK, status]
    assert targets[2] != payload_of(rows[2], ROW_BYTES)
    assert targets[1] == payload_of(rows[1], ROW_BYTES)
    assert read_back(tier, slots, rows) == [OK] * 3


def test_a_row_that_rots_is_corrupt_until_its_slot_is_released() -> None:
    tier, _ = make(Fault("write", 0, FaultKind.FLIP, row=0, bit=5))
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    for _ in range(3):
        assert read_back(tier, slots, rows) == [CORRUPT, OK]
    tier.release(slots)
    again = store_rows(tier, rows)
    assert read_back(tier, again, rows) == [OK, OK]


def test_delays_and_slowness_are_slept_not_measured() -> None:
    tier, slept = make(Fault("write", 0, FaultKind.DELAY, delay_s=30.0), Fault("read", 0, FaultKind.DELAY, delay_s=5.0))
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    assert read_back(tier, slots, rows) == [OK, OK]
    assert slept == [30.0, 5.0]
    slow, slept = make(slowdown=100.0)
    slots = store_rows(slow, rows)
    assert read_back(slow, slots, rows) == [OK, OK]
    assert len(slept) == 2
    assert all(seconds > 0 for seconds in slept)
    assert slow.probe().read_bytes_per_s == pytest.approx(slow.inner.probe().read_bytes_per_s / 100)


def test_a_tier_that_is_pulled_away_in_the_middle_answers_closed() -> None:
    tier, _ = make(Fault("read", 1, FaultKind.CLOSED))
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    assert read_back(tier, slots, rows) == [OK, OK]
    assert read_back(tier, slots, rows) == [CLOSED, CLOSED]
    assert write_closed(tier) == [CLOSED, CLOSED]
    assert tier.reserve(1) is None


def write_closed(tier: FaultyTier) -> list[RowStatus]:
    rows = chain_rows(2)
    return tier.write(np.array([5, 6], dtype=np.int32), rows, [payload_of(row, ROW_BYTES) for row in rows])


def test_a_seed_gives_the_same_faults_every_time_and_another_seed_others() -> None:
    def history(seed: int) -> list[RowStatus]:
        tier = FaultyTier(MemoryTier(ROW_BYTES, 400), Seeded(seed, 0.3), sleep=lambda seconds: None)
        answers: list[RowStatus] = []
        for call in range(30):
            rows = chain_rows(8, call)
            slots = tier.reserve(8)
            assert slots is not None
            answers += tier.write(slots, rows, [payload_of(row, ROW_BYTES) for row in rows])
            answers += read_back(tier, slots, rows)
        assert sum(tier.injected.values()) > 50
        assert tier.injected[FaultKind.CLOSED] == 0
        return answers

    assert history(1) == history(1)
    assert history(1) != history(2)
    assert {OK, IO_ERROR, FULL, CORRUPT} <= set(history(1))
