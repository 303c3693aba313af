"""The mover: everything submitted comes back, reads go first, and a stuck write never blocks a read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.cache.budget import TokenBucket
from kvtier.cache.mover import Mover, Transfer, Urgency
from kvtier.testing.clock import VirtualClock
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows, payload_of, soiled_buffers
from kvtier.tiers.protocol import RowId, RowStatus, Slots

ROW = 64


class Gated(MemoryTier):
    """Holds writes until the gate opens and remembers the order of calls."""

    def __init__(self) -> None:
        super().__init__(ROW, 256, name="gated")
        self.gate = threading.Event()
        self.calls: list[tuple[str, int]] = []
        self.broken = False

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        self.calls.append(("write", len(slots)))
        self.gate.wait(10)
        if self.broken:
            raise RuntimeError("a tier that breaks its contract")
        return super().write(slots, rows, sources)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        self.calls.append(("read", len(slots)))
        return super().read(slots, rows, targets)


@pytest.fixture
def tier() -> Gated:
    return Gated()


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover(threads=2, chunk_bytes=4 * ROW)
    yield mover
    mover.close()


def transfer(tier: Gated, n: int, *, read: bool, slots: Slots | None = None) -> Transfer:
    rows = chain_rows(n)
    if slots is None:
        slots = tier.reserve(n)
        assert slots is not None
    views = soiled_buffers(n, ROW) if read else [payload_of(row, ROW) for row in rows]
    return Transfer(tier, slots, rows, views, read, Urgency.DEMAND if read else Urgency.STORE)


def collect(mover: Mover, n: int) -> list[Transfer]:
    done: list[Transfer] = []
    deadline = time.monotonic() + 10
    while len(done) < n and time.monotonic() < deadline:
        done += mover.collect()
        time.sleep(0.001)
    return done


def test_a_write_and_its_read_come_back_byte_exact_and_in_chunks(mover: Mover, tier: Gated) -> None:
    tier.gate.set()
    write = transfer(tier, 10, read=False)
    mover.submit(write)
    assert collect(mover, 1) == [write]
    assert write.statuses == [RowStatus.OK] * 10
    assert sorted(n for _, n in tier.calls) == [2, 4, 4]
    read = transfer(tier, 10, read=True, slots=write.slots)
    mover.submit(read)
    collect(mover, 1)
    assert [bytes(view) for view in read.views] == [bytes(payload_of(row, ROW)) for row in read.rows]
    assert not mover.busy
    assert mover.rows_waiting == {"read": 0, "write": 0}


def test_stuck_writes_leave_a_thread_for_reads(mover: Mover, tier: Gated) -> None:
    tier.gate.set()
    first = transfer(tier, 4, read=False)
    mover.submit(first)
    collect(mover, 1)
    tier.gate.clear()
    for _ in range(5):
        mover.submit(transfer(tier, 4, read=False))
    read = transfer(tier, 4, read=True, slots=first.slots)
    mover.submit(read)
    assert collect(mover, 1) == [read], "the read ended while every write is stuck"
    tier.gate.set()
    assert len(collect(mover, 5)) == 5


def test_a_tier_that_raises_costs_misses_and_no_thread(mover: Mover, tier: Gated) -> None:
    tier.gate.set()
    tier.broken = True
    mover.submit(transfer(tier, 4, read=False))
    (failed,) = collect(mover, 1)
    assert failed.statuses == [RowStatus.IO_ERROR] * 4
    tier.broken = False
    mover.submit(transfer(tier, 4, read=False))
    (fine,) = collect(mover, 1)
    assert fine.statuses == [RowStatus.OK] * 4


def test_a_cancelled_transfer_comes_back_undone(mover: Mover, tier: Gated) -> None:
    blocker, cancelled = transfer(tier, 4, read=False), transfer(tier, 8, read=False)
    mover.submit(blocker)
    mover.submit(cancelled)
    mover.cancel(cancelled)
    tier.gate.set()
    done = collect(mover, 2)
    assert {id(t) for t in done} == {id(blocker), id(cancelled)}
    assert RowStatus.CLOSED in cancelled.statuses


def test_an_empty_transfer_comes_back_too(mover: Mover, tier: Gated) -> None:
    empty = Transfer(tier, np.empty(0, np.int32), [], [], True, Urgency.DEMAND)
    mover.submit(empty)
    assert collect(mover, 1) == [empty]


def test_drain_says_whether_everything_ended(mover: Mover, tier: Gated) -> None:
    mover.submit(transfer(tier, 4, read=False))
    assert not mover.drain(0.05)
    tier.gate.set()
    assert mover.drain(5.0)


def test_a_stalled_tier_holds_up_no_other(mover: Mover, tier: Gated) -> None:
    other = Gated()
    other.name = "other"
    other.gate.set()
    for _ in range(8):
        mover.submit(transfer(tier, 4, read=False))
    write = transfer(other, 4, read=False)
    mover.submit(write)
    assert collect(mover, 1) == [write]
    tier.gate.set()
    assert len(collect(mover, 8)) == 8


def test_small_reads_of_many_requests_travel_in_one_call(tier: Gated) -> None:
    tier.gate.set()
    mover = Mover(threads=2, chunk_bytes=1 << 20)
    first = transfer(tier, 40, read=False)
    mover.submit(first)
    collect(mover, 1)
    held = threading.Event()
    plain, tier.read = tier.read, lambda *a: held.wait(10) and plain(*a)  # type: ignore[method-assign,assignment,return-value]
    rows = [Transfer(tier, first.slots[i : i + 1], first.rows[i : i + 1], soiled_buffers(1, ROW), True, Urgency.DEMAND)
            for i in range(40)]  # fmt: skip
    tier.calls.clear()
    for row in rows:
        mover.submit(row)
    held.set()
    assert len(collect(mover, 40)) == 40
    assert all(row.statuses == [RowStatus.OK] for row in rows)
    assert [bytes(row.views[0]) for row in rows] == [bytes(payload_of(row.rows[0], ROW)) for row in rows]
    assert len(tier.calls) <= 3, "two threads took one each; the rest went together"
    mover.close()


def test_cancelling_frees_the_queue_at_once(mover: Mover, tier: Gated) -> None:
    running, waiting = transfer(tier, 4, read=False), transfer(tier, 8, read=False)
    mover.submit(running)
    time.sleep(0.05)
    mover.submit(waiting)
    mover.cancel(waiting)
    assert mover.collect() == [waiting], "back although the tier still hangs"
    assert waiting.dropped.all()
    assert mover.backlog_bytes("gated", read=False) == 4 * ROW
    tier.gate.set()
    assert collect(mover, 1) == [running]


def test_a_demand_makes_a_look_ahead_urgent(tier: Gated) -> None:
    tier.gate.set()
    mover = Mover(threads=2, chunk_bytes=4 * ROW)
    first = transfer(tier, 12, read=False)
    mover.submit(first)
    collect(mover, 1)
    held = threading.Event()
    plain, tier.read = tier.read, lambda *a: held.wait(10) and plain(*a)  # type: ignore[method-assign,assignment,return-value]
    ahead = [
        Transfer(tier, first.slots[i : i + 4], first.rows[i : i + 4], soiled_buffers(4, ROW), True, Urgency.LOOK_AHEAD)
        for i in (0, 4, 8, 0, 4, 8)
    ]
    for each in ahead:
        mover.submit(each)
    time.sleep(0.05)
    mover.hasten(ahead[-1], Urgency.DEMAND)
    held.set()
    done = collect(mover, 6)
    assert done.index(ahead[-1]) <= 3, "only what was moving already came before it"
    mover.close()


def test_a_budget_is_kept_and_bytes_in_flight_are_bounded(tier: Gated) -> None:
    tier.gate.set()
    mover = Mover(threads=2, chunk_bytes=4 * ROW, budgets={"gated.write": 4 * ROW * 20})
    write = transfer(tier, 32, read=False)
    began = time.monotonic()
    mover.submit(write)
    collect(mover, 1)
    assert write.statuses == [RowStatus.OK] * 32
    assert time.monotonic() - began >= 7 / 20 - 0.01, "8 calls at 20 a second: the first goes at once"
    assert mover.most_bytes_in_flight <= 2 * 4 * ROW
    read = transfer(tier, 32, read=True, slots=write.slots)
    began = time.monotonic()
    mover.submit(read)
    collect(mover, 1)
    assert time.monotonic() - began < 0.3, "the other direction has a budget of its own"
    mover.close()


def test_a_demand_read_waits_for_one_call_at_most(tier: Gated) -> None:
    """However much is queued before it."""
    tier.gate.set()
    mover = Mover(threads=2, chunk_bytes=4 * ROW)
    first = transfer(tier, 40, read=False)
    mover.submit(first)
    collect(mover, 1)
    step = threading.Semaphore(0)
    plain, tier.read = tier.read, lambda *a: step.acquire(timeout=10) and plain(*a)  # type: ignore[method-assign,assignment,return-value]
    ahead = Transfer(tier, first.slots, first.rows, soiled_buffers(40, ROW), True, Urgency.LOOK_AHEAD)
    mover.submit(ahead)
    time.sleep(0.05)
    demand = Transfer(tier, first.slots[:4], first.rows[:4], soiled_buffers(4, ROW), True, Urgency.DEMAND)
    mover.submit(demand)
    step.release(3)
    assert collect(mover, 1) == [demand], "two calls were moving; the third was the demand"
    step.release(20)
    collect(mover, 1)
    mover.close()


def test_a_call_that_does_not_come_back_is_reported_once(tier: Gated) -> None:
    clock = VirtualClock()
    mover = Mover(threads=2, chunk_bytes=4 * ROW, now=clock.now)
    mover.submit(transfer(tier, 4, read=False))
    time.sleep(0.05)
    assert mover.stuck(5.0) == []
    clock.advance(6.0)
    assert mover.stuck(5.0) == ["gated"]
    assert mover.stuck(5.0) == []
    assert not mover.detach("gated", timeout_s=0.05)
    tier.gate.set()
    assert len(collect(mover, 1)) == 1
    mover.close()


def test_a_budget_that_frees_between_two_looks_at_the_clock_wakes_its_thread(tier: Gated) -> None:
    """Nobody else would: the transfer would lie there until the next one comes."""

    class Fickle(TokenBucket):
        looks = 0

        def wait_s(self, now_s: float) -> float:
            self.looks += 1
            return 1e-6 if self.looks == 1 else 0.0

    tier.gate.set()
    mover = Mover(threads=2)
    mover.submit(transfer(tier, 1, read=False))
    assert len(collect(mover, 1)) == 1
    link = mover._links["gated"]
    link._buckets[False] = Fickle()
    mover.submit(transfer(tier, 1, read=False))
    assert len(collect(mover, 1)) == 1
    mover.close()
