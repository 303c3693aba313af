"""shared_fs when things go wrong: every call fails once, files are damaged or vanish, writers die, machines race.

Longer than most files: every test here shares the same few fixtures of one medium.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError, TierIOError
from kvtier.testing.rows import chain_rows, payload_of, read_back, soiled_buffers, store_rows
from kvtier.tiers.protocol import RowId, RowStatus
from kvtier.tiers.shared_fs import SharedFsTier
from kvtier.tiers.shared_fs.filesystem import FileSystem

ROW = 20_000
CAP = 8 << 20
VERBS = ("open", "preadv", "pwritev", "fdatasync", "rename", "stat", "fstat", "touch", "mkdir", "flock", "listing")


class FailingFs(FileSystem):
    """Counts calls, those of one thread if `only` names it, and fails the one whose number is `at`."""

    def __init__(self, error: int = errno.EIO) -> None:
        self.calls = 0
        self.at = -1
        self.error = error
        self.failed = ""
        self.only = 0

    def _check(self, verb: str) -> None:
        if self.only and threading.get_ident() != self.only:
            return
        number, self.calls = self.calls, self.calls + 1
        if number == self.at:
            self.failed = verb
            raise OSError(self.error, os.strerror(self.error))


def _failing(verb: str) -> Callable[..., Any]:
    def call(self: FailingFs, *arguments: Any) -> Any:
        self._check(verb)
        return getattr(FileSystem, verb)(self, *arguments)

    return call


for _verb in VERBS:
    setattr(FailingFs, _verb, _failing(_verb))


def open_tier(folder: Path, cap_bytes: int = CAP, row_bytes: int = ROW, fs: FileSystem | None = None) -> SharedFsTier:
    return SharedFsTier(str(folder), b"\5" * 32, "layout", row_bytes, cap_bytes, fs=fs)


def du(folder: Path) -> int:
    """What `du` counts. Not atomic, as `du` is not: what comes and goes meanwhile is left out."""
    total = folder.stat().st_blocks
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks
            except FileNotFoundError:
                continue
    return total * 512


def objects(folder: Path) -> list[Path]:
    return [path for path in (folder / "kvtier" / "objects").rglob("*") if path.is_file()]


def adopt(tier: SharedFsTier, rows: list[RowId]) -> np.ndarray[Any, np.dtype[np.int32]]:
    slots = tier.reserve(len(rows))
    assert slots is not None
    tier.adopt(slots, rows)
    return slots


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SharedFsTier]:
    made = open_tier(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_every_call_of_a_write_and_a_read_fails_once(tmp_path: Path, error: int) -> None:
    """Whatever fails: a status, no exception, no wrong byte, no file left aside; and the next try works."""
    fs = FailingFs(error)
    tier = open_tier(tmp_path, fs=fs)
    fs.only = threading.get_ident()  # the cleaner's calls come when they like, and would be counted among ours
    seen = set()
    for round_ in range(50):
        rows = chain_rows(2, seed=round_)
        payloads = [payload_of(row, ROW) for row in rows]
        slots = tier.reserve(2)
        assert slots is not None
        fs.at, fs.failed = fs.calls + round_, ""
        statuses = tier.write(slots, rows, payloads)
        assert not list((tmp_path / "kvtier" / "tmp").glob("*/*"))
        good = [i for i, status in enumerate(statuses) if status is RowStatus.OK]
        into = soiled_buffers(2, ROW)
        read = tier.read(slots, rows, into)
        for i in range(2):
            assert read[i] is not RowStatus.OK or bytes(into[i]) == bytes(payloads[i])
            assert i in good or read[i] is RowStatus.FOREIGN
        if fs.failed:
            seen.add(fs.failed)
        fs.at = -1
        tier.release(slots)
        again = tier.reserve(2)
        assert again is not None
        assert tier.write(again, rows, payloads) == [RowStatus.OK] * 2
        assert read_back(tier, again, rows) == [RowStatus.OK] * 2
        tier.release(again)
    tier.close()
    assert {"open", "pwritev", "fdatasync", "rename", "stat", "preadv"} <= seen
    assert du(tmp_path) <= CAP


@pytest.mark.parametrize("call", range(12))
def test_a_medium_that_fails_at_the_start_is_an_error_of_the_medium(tmp_path: Path, call: int) -> None:
    fs = FailingFs()
    fs.at = call
    with pytest.raises(TierIOError, match="does not answer"):
        open_tier(tmp_path, fs=fs)
    open_tier(tmp_path).close()


def test_paths_and_caps_that_cannot_work_say_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"shared_fs_path .* cannot be used"):
        open_tier(tmp_path / "file")
    with pytest.raises(ConfigError, match="shared_fs_bytes is 50000, less than 4 rows"):
        open_tier(tmp_path / "other", cap_bytes=50_000)


def test_a_medium_that_does_not_answer_questions_raises_a_tier_error(tmp_path: Path) -> None:
    fs = FailingFs()
    tier = open_tier(tmp_path, fs=fs)
    fs.at = fs.calls
    with pytest.raises(TierIOError):
        tier.exists(chain_rows(1))
    assert tier.exists(chain_rows(1)) == [False]
    tier.close()


def test_files_cut_off_anywhere_are_misses_and_are_written_anew(tmp_path: Path, tier: SharedFsTier) -> None:
    (row,) = chain_rows(1)
    slots = store_rows(tier, [row])
    (path,) = objects(tmp_path)
    whole = path.read_bytes()
    for length in [0, 1, 511, 512, 4095, 4096, len(whole) // 2, len(whole) - 128, len(whole) - 1, len(whole) + 512]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((whole + bytes(512))[:length])
        assert tier.exists([row]) == [False]
        assert tier.read(slots, [row], soiled_buffers(1, ROW)) == [RowStatus.CORRUPT]
        assert not path.exists()
        assert tier.read(slots, [row], soiled_buffers(1, ROW)) == [RowStatus.VANISHED]
        again = store_rows(tier, [row])
        assert read_back(tier, again, [row]) == [RowStatus.OK]
        tier.release(again)


def test_one_flipped_bit_anywhere_is_a_miss(tmp_path: Path, tier: SharedFsTier) -> None:
    (row,) = chain_rows(1)
    slots = store_rows(tier, [row])
    (path,) = objects(tmp_path)
    whole = path.read_bytes()
    draw = random.Random(3)
    header = range(8 * (len(whole) - 128), 8 * (len(whole) - 12))
    for bit in [*draw.sample(range(8 * ROW), 40), *draw.sample(header, 40)]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert tier.read(slots, [row], soiled_buffers(1, ROW)) == [RowStatus.CORRUPT], bit
        assert not path.exists(), "what is damaged is removed, so that it is written anew"
    assert tier.stats().faults == {"corrupt": 80}


def test_a_file_of_another_row_or_layout_is_foreign(tmp_path: Path, tier: SharedFsTier) -> None:
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    first, second = (Path(tier._files.path(row)) for row in rows)
    first.write_bytes(second.read_bytes())
    assert tier.read(slots, rows, soiled_buffers(2, ROW)) == [RowStatus.FOREIGN, RowStatus.OK]
    assert not first.exists()
    other = SharedFsTier(str(tmp_path), b"\5" * 32, "another layout", ROW, CAP)
    assert other.exists(rows) == [False, False], "another layout has other names"
    other.close()


def test_what_one_machine_writes_another_reads_and_writes_only_once(tmp_path: Path, tier: SharedFsTier) -> None:
    rows = chain_rows(8)
    store_rows(tier, rows)
    before = {path: path.stat().st_ino for path in objects(tmp_path)}
    other = open_tier(tmp_path)
    assert other.exists([*rows, *chain_rows(2, seed=9)]) == [True] * 8 + [False] * 2
    slots = adopt(other, rows)
    assert read_back(other, slots, rows) == [RowStatus.OK] * 8
    other.release(slots)
    store_rows(other, rows)
    assert {path: path.stat().st_ino for path in objects(tmp_path)} == before
    other.close()


def test_a_row_removed_by_another_machine_has_vanished(tmp_path: Path, tier: SharedFsTier) -> None:
    rows = chain_rows(3)
    slots = store_rows(tier, rows)
    os.unlink(tier._files.path(rows[1]))
    statuses = tier.read(slots, rows, soiled_buffers(3, ROW))
    assert statuses == [RowStatus.OK, RowStatus.VANISHED, RowStatus.OK]
    assert tier.stats().faults == {"vanished": 1}


def test_room_is_made_oldest_first_and_never_a_block_before_what_builds_on_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    chains = [chain_rows(20, seed=seed) for seed in range(10)]
    for age, rows in enumerate(chains[:-1]):
        store_rows(tier, rows)
        for i, row in enumerate(rows):
            # The head of a chain looks older than its tail: the links must hold it, not the clock.
            os.utime(tier._files.path(row), (1000 + 100 * age + i, 1000 + 100 * age + i))
    freed = tier.clean()
    assert freed == 0 or du(tmp_path) < 0.8 * CAP
    store_rows(tier, chains[-1])
    left = [tier.exists(rows) for rows in chains]
    for there in left:
        count = sum(there)
        assert there == [True] * count + [False] * (20 - count), "a tail without its head"
    small = SharedFsTier(str(tmp_path), b"\5" * 32, "layout", ROW, CAP // 2)
    assert small.clean() > 0
    left = [tier.exists(rows) for rows in chains]
    counts = [sum(there) for there in left]
    assert counts[0] == 0, "the oldest went first"
    assert counts[-1] == 20
    assert counts == sorted(counts)
    for there, count in zip(left, counts, strict=True):
        assert there == [True] * count + [False] * (20 - count), "a tail without its head"
    assert du(tmp_path) <= 0.8 * (CAP // 2) + 65536
    small.close()
    tier.close()


def test_a_file_that_cannot_be_removed_is_skipped_with_what_it_builds_on(tmp_path: Path) -> None:
    class Stubborn(FileSystem):
        stuck = ""

        def unlink(self, path: str) -> None:
            if path == self.stuck:
                raise PermissionError(errno.EPERM, "Operation not permitted", path)
            super().unlink(path)

    fs = Stubborn()
    tier = open_tier(tmp_path, fs=fs)
    old, new = chain_rows(20, seed=1), chain_rows(20, seed=2)
    store_rows(tier, old)
    store_rows(tier, new)
    for age, row in enumerate([*old, *new]):
        os.utime(tier._files.path(row), (1000 + age, 1000 + age))
    fs.stuck = tier._files.path(old[10])
    small = SharedFsTier(str(tmp_path), b"\5" * 32, "layout", ROW, 900_000, fs=fs)
    assert small.clean() > 0
    assert tier.exists(old) == [True] * 11 + [False] * 9, "what builds on it went, what it builds on stayed"
    assert sum(tier.exists(new)) < 20, "and room was made elsewhere"
    assert small.stats().faults["evict_errno_1"] == 1
    small.close()
    tier.close()


def test_files_lie_in_two_levels_of_few_folders(tmp_path: Path, tier: SharedFsTier) -> None:
    rows = chain_rows(200)
    places = [Path(tier._files.path(row)).relative_to(tmp_path / "kvtier" / "objects").parts for row in rows]
    assert all(len(parts) == 4 for parts in places), "key space, two levels, name"
    for level in (1, 2):
        names = {parts[level] for parts in places}
        assert 40 < len(names) <= 64, "spread evenly over 64 folders"
    assert len({parts[3] for parts in places}) == 200


def test_what_is_read_is_in_use(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    old, new = chain_rows(10, seed=1), chain_rows(10, seed=2)
    slots = store_rows(tier, old)
    store_rows(tier, new)
    for row in [*old, *new]:
        stamp = time.time() - (7200 if row in old else 3600)
        os.utime(tier._files.path(row), (stamp, stamp))
    assert read_back(tier, slots, old) == [RowStatus.OK] * 10
    small = SharedFsTier(str(tmp_path), b"\5" * 32, "layout", ROW, 900_000)
    small.clean()
    assert sum(tier.exists(old)) > sum(tier.exists(new))
    small.close()
    tier.close()


def test_a_full_medium_refuses_and_makes_room_by_itself(tmp_path: Path) -> None:
    cap = 2 << 20
    tier = open_tier(tmp_path, cap_bytes=cap)
    for seed in range(30):
        rows = chain_rows(8, seed=seed)
        slots = tier.reserve(8)
        if slots is None:
            break
        statuses = tier.write(slots, rows, [payload_of(row, ROW) for row in rows])
        assert set(statuses) <= {RowStatus.OK, RowStatus.FULL}
        assert du(tmp_path) <= cap
        tier.release(slots)
        time.sleep(0.02)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        slots = tier.reserve(1)
        assert slots is not None
        rows = chain_rows(1, seed=1000 + int(time.monotonic() * 100) % 10_000)
        if tier.write(slots, rows, [payload_of(rows[0], ROW)]) == [RowStatus.OK]:
            break
        tier.release(slots)
        time.sleep(0.05)
    else:
        pytest.fail("no room was made")
    assert du(tmp_path) <= cap
    tier.close()


def test_a_damaged_ledger_is_counted_anew(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store_rows(tier, chain_rows(50))
    tier.close()
    (tmp_path / "kvtier" / "usage").write_bytes(b"\xff" * 32)
    again = open_tier(tmp_path)
    assert du(tmp_path) <= again.stats().medium_bytes <= du(tmp_path) + CAP // 16
    assert again.stats().faults == {"ledger_damaged": 1}
    again.close()


def test_a_process_stopped_with_the_ledger_in_its_hand_stops_no_reader_and_no_writer_for_long(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, cap_bytes=64 << 20)
    rows = chain_rows(3)
    slots = store_rows(tier, rows)
    held = os.open(tmp_path / "kvtier" / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    began = time.monotonic()
    more, statuses = chain_rows(60, seed=1), []
    for first in range(0, 60, 20):
        mine = tier.reserve(20)
        assert mine is not None
        part = more[first : first + 20]
        statuses += tier.write(mine[:1], part[:1], [payload_of(part[0], ROW)])
        assert read_back(tier, slots, rows) == [RowStatus.OK] * 3
    tier._ledger._free = 0
    mine = tier.reserve(1)
    assert mine is not None
    assert tier.write(mine, [more[1]], [payload_of(more[1], ROW)]) == [RowStatus.FULL], "refused, not stuck"
    assert time.monotonic() - began < 5
    assert tier.stats().faults == {"ledger_busy": 1, "full": 1}
    with pytest.raises(TierIOError, match="another process holds the ledger"):
        open_tier(tmp_path, cap_bytes=64 << 20)
    os.close(held)
    assert tier.write(mine, [more[1]], [payload_of(more[1], ROW)]) == [RowStatus.OK]
    tier.close()


WRITER = """
import sys
from pathlib import Path
from kvtier.testing.rows import chain_rows, payload_of
from tests.fault.test_tier_shared_fs import open_tier, ROW
folder, cap, first, common = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
tier = open_tier(folder, cap_bytes=cap)
print("open", flush=True)
for seed in range(1_000_000):
    rows = chain_rows(4, seed=seed if seed % common == 0 else first + seed)
    slots = tier.reserve(4)
    tier.write(slots, rows, [payload_of(row, ROW) for row in rows])
    tier.release(slots)
"""


def start_writer(folder: Path, cap: int, first: int, common: int = 3) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(folder), str(cap), str(first), str(common)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2])
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    process.stdout.close()
    return process


def test_writers_on_several_machines_are_killed_and_the_cap_holds_throughout(tmp_path: Path) -> None:
    """Three writers, partly of the same rows, one stopped now and then, each killed at a random moment."""
    cap, draw = 4 << 20, random.Random(11)
    most, kills = 0, 0
    writers = [start_writer(tmp_path, cap, 1_000_000 * i) for i in range(3)]
    try:
        deadline = time.monotonic() + (120 if os.environ.get("KVTIER_SOAK") else 8)
        while time.monotonic() < deadline:
            victim = draw.randrange(3)
            if draw.random() < 0.3:
                writers[victim].send_signal(signal.SIGSTOP)
            for _ in range(draw.randrange(1, 6)):
                most = max(most, du(tmp_path))
                assert most <= cap, f"{most} bytes on the medium"
                time.sleep(draw.random() * 0.05)
            writers[victim].kill()
            writers[victim].wait()
            kills += 1
            writers[victim] = start_writer(tmp_path, cap, 1_000_000 * (kills + 3))
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGCONT)
            writer.kill()
            writer.wait()
    assert kills >= 3
    assert most > cap // 2, "the medium was really filled"
    tier = open_tier(tmp_path, cap_bytes=cap)
    tier.clean()
    assert [path.name for path in (tmp_path / "kvtier" / "tmp").iterdir()] == [tier._ledger.writer], "orphans are swept"
    assert len(list((tmp_path / "kvtier" / "writers").iterdir())) == 1
    assert tier.stats().faults.get("writer_died", 0) <= 3
    assert du(tmp_path) <= tier.stats().medium_bytes <= cap
    for path in objects(tmp_path):
        assert path.stat().st_size == tier._files.geometry.slot_bytes, "a file in place is whole"
    found = 0
    for seed in range(0, 400, 3):
        rows = chain_rows(4, seed=seed)
        there = [row for row, ok in zip(rows, tier.exists(rows), strict=True) if ok]
        slots = adopt(tier, there)
        assert read_back(tier, slots, there) == [RowStatus.OK] * len(there)
        tier.release(slots)
        found += len(there)
    assert found
    tier.close()
