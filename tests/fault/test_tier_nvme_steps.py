"""Every system call of the nvme tier fails once, in every way, and the process dies at every one of them.

Whatever happens: no exception but the documented ones at start, no wrong byte, no row that was said to be written and
was not released is lost without a counted reason, and never more bytes on the medium than the cap.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, TierIOError
from kvtier.testing.rows import chain_rows, payload_of, read_back, store_rows
from kvtier.tiers.nvme import NvmeTier, uring
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.nvme.uring import uring_missing
from kvtier.tiers.protocol import RowId, RowStatus
from tests.fault.syscalls import EIO, ENOSPC, LosingSyscalls, PowerCut, SteppingRing, StepSyscalls, os_error

needs_uring = pytest.mark.skipif(bool(uring_missing()), reason=uring_missing() or "io_uring works")
ROW_BYTES = 9_000
CAP = 1 << 20
SOAK = bool(os.environ.get("KVTIER_SOAK"))


@dataclass
class Ledger:
    """What the tier has promised: slot → row for rows written OK and not released; and rows whose fate is open."""

    held: dict[int, RowId] = field(default_factory=dict)
    doubtful: dict[int, RowId] = field(default_factory=dict)
    lost: dict[int, RowId] = field(default_factory=dict)
    statuses: list[RowStatus] = field(default_factory=list)


class Backend:
    """What the tiers of this file go through."""

    name = "threads"


@pytest.fixture(scope="module", params=["threads", pytest.param("io_uring", marks=needs_uring)], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs on both back ends; io_uring for real, each of its transfers one step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uring, "Ring", SteppingRing)
        patch.setattr(Backend, "name", request.param)
        yield request.param


def open_tier(folder: Path, syscalls: StepSyscalls, cap: int = CAP) -> NvmeTier:
    return NvmeTier(
        str(folder),
        b"\5" * 32,
        "layout",
        ROW_BYTES,
        cap,
        max_io_bytes=40_000,
        syscalls=syscalls,
        backend=Backend.name,
        frees_in_background=False,
    )


def write(tier: NvmeTier, ledger: Ledger, rows: list[RowId]) -> None:
    slots = tier.reserve(len(rows))
    assert slots is not None
    numbers = slots.tolist()
    ledger.doubtful.update(zip(numbers, rows, strict=True))
    statuses = tier.write(slots, rows, [payload_of(row, ROW_BYTES) for row in rows])
    for slot, row, status in zip(numbers, rows, statuses, strict=True):
        del ledger.doubtful[slot]
        ledger.statuses.append(status)
        if status is RowStatus.OK:
            ledger.held[slot] = row
        else:
            release(tier, ledger, [slot])


def release(tier: NvmeTier, ledger: Ledger, slots: list[int]) -> None:
    going = {slot: ledger.held.pop(slot) for slot in slots if slot in ledger.held}
    ledger.doubtful.update(going)
    tier.release(np.array(slots, dtype=np.int32))
    for slot in going:
        del ledger.doubtful[slot]


def verify(tier: NvmeTier, ledger: Ledger) -> list[RowStatus]:
    slots = list(ledger.held)
    return read_back(tier, np.array(slots, dtype=np.int32), [ledger.held[slot] for slot in slots])


def run(folder: Path, syscalls: StepSyscalls, ledger: Ledger) -> dict[str, int]:
    """Some of everything, with a restart: joined and single writes, reads, releases, reuse, compaction.

    Returns the faults counted.
    """
    tier = open_tier(folder, syscalls)
    write(tier, ledger, chain_rows(7, "a"))
    ledger.statuses += verify(tier, ledger)
    release(tier, ledger, list(ledger.held)[1:4])
    write(tier, ledger, chain_rows(2, "b"))
    tier._journal.compact()
    release(tier, ledger, list(ledger.held)[:1])
    tier.close()
    faults = Counter(tier.stats().faults)
    tier = open_tier(folder, syscalls)
    found = {item.slot: item.row for item in tier.recover()}
    ledger.lost = {slot: row for slot, row in ledger.held.items() if found.get(slot) != row}
    assert set(found) <= set(ledger.held)
    ledger.held = {slot: row for slot, row in ledger.held.items() if slot in found}
    write(tier, ledger, chain_rows(1, "c"))
    release(tier, ledger, list(ledger.held)[:1])
    write(tier, ledger, chain_rows(3, "d", group=2))
    ledger.statuses += verify(tier, ledger)
    tier.check_integrity()
    tier.close()
    return dict(faults + Counter(tier.stats().faults))


def recovered(folder: Path, *, sound: bool = True, cap: int = CAP) -> tuple[NvmeTier, dict[int, RowId]]:
    """Reopen on a healthy machine; every recovered row must read back with its own bytes or not at all."""
    tier = open_tier(folder, StepSyscalls(folder, cap), cap)
    found = {item.slot: item.row for item in tier.recover()}
    statuses = read_back(tier, np.array(list(found), dtype=np.int32), list(found.values()))
    if sound:
        assert set(statuses) <= {RowStatus.OK}, statuses
    tier.check_integrity()
    return tier, {s: r for (s, r), status in zip(found.items(), statuses, strict=True) if status is RowStatus.OK}


@pytest.fixture(scope="module")
def step_names(tmp_path_factory: pytest.TempPathFactory, backend: str) -> list[str]:
    """The system calls of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    syscalls, ledger = StepSyscalls(folder, CAP), Ledger()
    assert run(folder, syscalls, ledger) == {}
    assert set(ledger.statuses) == {RowStatus.OK}
    tier, found = recovered(folder)
    tier.close()
    assert found == ledger.held
    assert len(found) == 8
    assert not ledger.lost
    return syscalls.names


def each_step(step_names: list[str], tmp_path: Path) -> Iterable[tuple[int, str, Path]]:
    for step, name in enumerate(step_names):
        folder = tmp_path / f"{step}-{name}"
        folder.mkdir()
        yield step, name, folder


def at(
    step: int, fault: Callable[[], OSError | str | PowerCut]
) -> Callable[[int, str], OSError | str | PowerCut | None]:
    return lambda now, name: fault() if now == step else None


@pytest.mark.parametrize("code", [EIO, ENOSPC])
def test_every_call_fails_once(tmp_path: Path, step_names: list[str], code: int) -> None:
    counted = 0
    for step, name, folder in each_step(step_names, tmp_path):
        ledger = Ledger()
        try:
            faults = run(folder, StepSyscalls(folder, CAP, at(step, lambda: os_error(code))), ledger)
        except (ConfigError, TierIOError):
            assert not ledger.lost, (step, name)
        else:
            bad = [status for status in ledger.statuses if status is not RowStatus.OK]
            assert set(bad) <= {RowStatus.IO_ERROR, RowStatus.FULL}
            assert faults.get("io_error", 0) + faults.get("full", 0) == len(bad)
            counted += bool(faults)
            silent = (
                "preadv",
                "pwritev",
                "unlink",
                "close",
                "fallocate",
                "ftruncate",
            )  # repeated, or of no consequence
            assert faults or name in silent, (step, name)
            if ledger.lost:
                assert faults == {"journal_io_error": 1}, (step, name)
        tier, found = recovered(folder)
        assert found == ledger.held, (step, name)
        again = Ledger(held=dict(found))
        write(tier, again, chain_rows(2, "after"))
        assert set(again.statuses) == {RowStatus.OK}
        tier.close()
    assert counted > 10


def test_a_run_that_fails_is_repeated_row_by_row(tmp_path: Path, step_names: list[str]) -> None:
    """One failing transfer of several rows costs no row; a failing row costs only itself."""
    first_write = step_names.index("pwritev", len(step_names) - 1 - step_names[::-1].index("flock"))
    assert first_write > 0
    lost = []
    for step in range(first_write, len(step_names)):
        if step_names[step] not in ("pwritev", "preadv"):
            continue
        folder = tmp_path / str(step)
        folder.mkdir()
        ledger = Ledger()
        try:
            run(folder, StepSyscalls(folder, CAP, at(step, lambda: os_error(EIO))), ledger)
        except TierIOError:
            continue
        lost.append(sum(status is not RowStatus.OK for status in ledger.statuses))
    assert lost.count(0) > 5
    assert max(lost) <= 7


def test_every_transfer_comes_short_once(tmp_path: Path, step_names: list[str]) -> None:
    for step, name, folder in each_step(step_names, tmp_path):
        if name not in ("preadv", "pwritev"):
            continue
        ledger = Ledger()
        faults = run(folder, StepSyscalls(folder, CAP, at(step, lambda: "short")), ledger)
        assert set(ledger.statuses) == {RowStatus.OK}, (step, name)
        assert faults == {}
        tier, found = recovered(folder)
        assert found == ledger.held
        tier.close()


def test_the_process_dies_at_every_call(tmp_path: Path, step_names: list[str]) -> None:
    """Half of the write, if it is one, was done. A killed process loses nothing it was told is there."""
    for step, name, folder in each_step(step_names, tmp_path):
        ledger, syscalls = Ledger(), StepSyscalls(folder, CAP, at(step, PowerCut))
        with pytest.raises(PowerCut):
            run(folder, syscalls, ledger)
        syscalls.kill()
        tier, found = recovered(folder, sound=False)
        for slot, row in ledger.held.items():
            assert found.get(slot) == row, (step, name)
        for slot, row in found.items():
            assert row in (ledger.held.get(slot), ledger.doubtful.get(slot)), (step, name)
        tier.close()


def test_a_probe_that_fails_is_counted_and_reports_an_unusable_tier(tmp_path: Path) -> None:
    syscalls = StepSyscalls(tmp_path, CAP)
    tier = open_tier(tmp_path, syscalls)
    syscalls.at = lambda step, name: os_error(EIO)
    probe = tier.probe()
    assert probe.read_latency_s == probe.write_latency_s == float("inf")
    assert tier.stats().faults == {"probe_io_error": 1}
    syscalls.at = lambda step, name: None
    assert tier.probe().read_latency_s < 1
    tier.close()


@pytest.mark.parametrize("seed", range(40 if SOAK else 2))
def test_the_power_fails_at_every_call(tmp_path: Path, step_names: list[str], seed: int) -> None:
    """Unsynced blocks are lost at random. Rows may be lost; bytes are never wrong, and the tier works on."""
    draw = random.Random(seed)
    kept = promised = 0
    for step, _name, folder in each_step(step_names, tmp_path):
        ledger, syscalls = Ledger(), LosingSyscalls(folder, CAP, at(step, PowerCut), draw=draw)
        with pytest.raises(PowerCut):
            run(folder, syscalls, ledger)
        syscalls.kill()
        syscalls.lose()
        tier, found = recovered(folder, sound=False)
        kept += len(found)
        promised += len(ledger.held)
        free = tier.stats().capacity_rows - tier.stats().used_rows
        again = Ledger()
        write(tier, again, chain_rows(min(3, free), "after"))
        assert verify(tier, again) == [RowStatus.OK] * min(3, free)
        tier.close()
    assert 0 < kept < promised


@pytest.mark.parametrize("cap", [CAP, CAP + 500_000], ids=["same cap", "journal rewritten for another cap"])
def test_the_power_fails_right_after_a_restart(tmp_path: Path, cap: int) -> None:
    """What an orderly shutdown made durable stays so at every moment of opening it again."""
    names: list[str] = []
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        tier, ledger = open_tier(folder, StepSyscalls(folder, CAP)), Ledger()
        write(tier, ledger, chain_rows(7))
        tier.close()
        syscalls = LosingSyscalls(folder, cap, at(step, PowerCut), draw=random.Random(0), share=1.0)
        try:
            tier = open_tier(folder, syscalls, cap)
            names = syscalls.names
        except PowerCut:
            pass
        syscalls.kill()
        syscalls.lose()
        tier, found = recovered(folder, cap=cap)
        assert found == ledger.held, step
        tier.close()
        if names:
            break
    assert ("rename" in names) == (cap != CAP)


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_a_smaller_cap_holds_before_anything_is_written(tmp_path: Path, share: float) -> None:
    """Shrinking: from the first write on, the old and the new journal and the slab together fit the new cap."""
    tier, ledger = open_tier(tmp_path, StepSyscalls(tmp_path, CAP)), Ledger()
    write(tier, ledger, chain_rows(tier.stats().capacity_rows))
    tier.close()
    smaller = int(CAP * share)
    syscalls = StepSyscalls(tmp_path, CAP)

    def watch(step: int, name: str) -> None:
        if name == "pwritev" and syscalls.cap_bytes != smaller:
            syscalls.cap_bytes, syscalls.most_bytes = smaller, 0

    syscalls.at = watch
    tier = open_tier(tmp_path, syscalls, smaller)
    assert syscalls.cap_bytes == smaller
    assert 0 < len(tier.recover()) < len(ledger.held)
    tier.close()


class Stalling(Syscalls):
    """A disk whose writes wait for a gate, once it is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60)
        return super().pwritev(fd, buffers, offset)


def test_a_release_and_a_reserve_wait_for_no_disk(tmp_path: Path) -> None:
    """They come from the engine's thread: the journal is written by another, and before the slot is written again."""
    disk, rows = Stalling(), chain_rows(7)
    tier = NvmeTier(str(tmp_path), b"\5" * 32, "layout", ROW_BYTES, CAP, syscalls=disk)
    slots = store_rows(tier, rows)
    disk.gate.clear()
    tier.release(slots)  # would not come back before the gate opens
    assert disk.waiting.wait(20)
    more = tier.reserve(tier.stats().capacity_rows)
    assert more is not None, "what was released is free at once"
    assert tier.read(slots, rows, [memoryview(bytearray(ROW_BYTES)) for _ in rows]) == [RowStatus.FOREIGN] * 7
    new = chain_rows(len(more), "new")
    with ThreadPoolExecutor(1) as mover:
        writing = mover.submit(tier.write, more, new, [payload_of(row, ROW_BYTES) for row in new])
        assert not writing.done()
        disk.gate.set()
        assert writing.result(20) == [RowStatus.OK] * len(more)
    assert read_back(tier, more, new) == [RowStatus.OK] * len(more)
    tier.check_integrity()
    tier.close()
    again, found = recovered(tmp_path)
    assert set(found.values()) == set(new)
    again.close()


def test_nothing_is_written_to_a_slot_that_the_journal_still_calls_published(tmp_path: Path) -> None:
    syscalls = StepSyscalls(tmp_path, CAP)
    tier = open_tier(tmp_path, syscalls)
    ledger = Ledger()
    write(tier, ledger, chain_rows(tier.stats().capacity_rows))
    syscalls.at = lambda step, name: os_error(EIO) if name == "pwritev" else None
    tier.release(np.array(list(ledger.held)[:3], np.int32))
    slots = tier.reserve(3)
    assert slots is not None
    rows = chain_rows(3, "after")
    names = len(syscalls.names)
    assert tier.write(slots, rows, [payload_of(row, ROW_BYTES) for row in rows]) == [RowStatus.IO_ERROR] * 3
    assert syscalls.names[names:] == ["pwritev"], "the journal was tried, and no row was touched"
    assert tier.stats().faults == {"release_not_journaled": 2, "io_error": 3}
    syscalls.at = lambda step, name: None
    assert tier.write(slots, rows, [payload_of(row, ROW_BYTES) for row in rows]) == [RowStatus.OK] * 3
    tier.check_integrity()
    tier.close()
