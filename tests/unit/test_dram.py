"""The dram tier: background population, zero-copy rows, the engine's buffer, memory bounds."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.testing.rows import chain_rows, payload_of, read_back, soiled_buffers, store_rows
from kvtier.tiers import populate
from kvtier.tiers.addresses import address_of, row_stride
from kvtier.tiers.dram import DramTier
from kvtier.tiers.memory import HostSlab, available_memory_bytes
from kvtier.tiers.protocol import RowStatus

MIB = 1 << 20


def test_rows_start_where_direct_io_can_use_them() -> None:
    for row_bytes in (64 << 10, 70_001, 1 << 20):
        assert row_stride(row_bytes) % 4096 == 0
    assert row_stride(1000) == 1024
    tier = DramTier.own(70_001, 2 * MIB)
    assert all(address_of(tier.row(slot)) % 4096 == 0 for slot in range(tier.stats().capacity_rows))
    tier.close()


def test_a_row_filled_in_place_is_published_without_a_copy() -> None:
    tier = DramTier.own(5000, MIB)
    (row,) = chain_rows(1)
    slots = tier.reserve(1)
    assert slots is not None
    view = tier.row(int(slots[0]))
    view[:] = payload_of(row, 5000)
    assert tier.write(slots, [row], [view]) == [RowStatus.OK]
    assert read_back(tier, slots, [row]) == [RowStatus.OK]
    assert tier.read(slots, [row], [view]) == [RowStatus.OK]
    assert view == payload_of(row, 5000)
    tier.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_flipped_bit_is_found_when_checksums_are_on(in_place: bool) -> None:
    for checksums, expected in ((True, RowStatus.CORRUPT), (False, RowStatus.OK)):
        tier = DramTier.own(5000, MIB, checksums=checksums)
        rows = chain_rows(2)
        slots = store_rows(tier, rows)
        tier.row(int(slots[1]))[1234] ^= 4
        targets = [tier.row(int(slot)) for slot in slots] if in_place else soiled_buffers(2, 5000)
        assert tier.read(slots, rows, targets) == [RowStatus.OK, expected]
        assert tier.stats().faults == ({"corrupt": 1} if checksums else {})
        tier.close()


def test_rows_lie_in_the_engine_s_buffer_and_padding_is_left_alone() -> None:
    buffer = np.full((6, 1100), 0xEE, dtype=np.uint8)
    tier = DramTier.over(buffer, 1000, 6, 1100)
    rows = chain_rows(6)
    slots = store_rows(tier, rows)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        assert buffer[slot, :1000].tobytes() == bytes(payload_of(row, 1000))
        assert (buffer[slot, 1000:] == 0xEE).all()
    tier.close()
    assert buffer[0, 1000] == 0xEE


@pytest.mark.parametrize(
    ("row_bytes", "n_rows", "stride"), [(1000, 7, 1100), (1200, 6, 1100), (0, 6, 1100), (1000, 0, 1100)]
)
def test_rows_that_do_not_fit_the_engine_s_buffer_are_refused(row_bytes: int, n_rows: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="do not fit the engine's region of 6600 bytes"):
        DramTier.over(np.zeros(6600, dtype=np.uint8), row_bytes, n_rows, stride)


def test_a_read_only_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match="read-only region"):
        DramTier.over(memoryview(bytes(6600)), 1000, 6, 1100)


class SlowPopulation:
    """Stands in for madvise: lets the test decide when each chunk is ready, or fails one."""

    def __init__(self, code: int = 0, fail_at: int = -1) -> None:
        self.permits = threading.Semaphore(0)
        self.calls: list[tuple[int, int]] = []
        self._code, self._fail_at = code, fail_at

    def madvise(self, address: int, length: int, advice: int) -> int:
        assert address % 4096 == length % 4096 == 0
        call = len(self.calls)
        self.calls.append((address, length))
        if call:
            assert self.permits.acquire(timeout=20)
        if call == self._fail_at:
            ctypes.set_errno(self._code)
            return -1
        return 0


def wait_for(what: object, seconds: float = 20.0) -> None:
    end_s = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end_s, "never came true"
        time.sleep(0.001)


def test_first_use_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    population = SlowPopulation()
    monkeypatch.setattr(populate, "_libc", population)
    tier = DramTier.own(64 << 10, 8 * MIB, first_chunk_bytes=MIB, chunk_bytes=3 * MIB)
    assert tier.stats().capacity_rows == 128
    rows = chain_rows(16)
    slots = store_rows(tier, rows)
    assert sorted(slots.tolist()) == list(range(16))
    assert tier.reserve(1) is None
    assert not tier.wait_ready(0.01)
    assert tier.stats().medium_bytes == MIB
    population.permits.release()
    wait_for(lambda: tier.stats().medium_bytes == 4 * MIB)
    more = tier.reserve(48)
    assert more is not None
    assert tier.reserve(1) is None
    population.permits.release(10)
    assert tier.wait_ready(20)
    rest = tier.reserve(64)
    assert rest is not None
    assert sorted([*slots.tolist(), *more.tolist(), *rest.tolist()]) == list(range(128))
    assert read_back(tier, slots, rows) == [RowStatus.OK] * 16
    tier.check_integrity()
    tier.close()


def test_memory_that_runs_out_leaves_what_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    population = SlowPopulation(errno.ENOMEM, fail_at=2)
    monkeypatch.setattr(populate, "_libc", population)
    population.permits.release(10)
    tier = DramTier.own(64 << 10, 8 * MIB, first_chunk_bytes=MIB, chunk_bytes=2 * MIB)
    assert tier.wait_ready(20)
    assert tier.stats().faults == {"populate_enomem": 1}
    assert tier.stats().medium_bytes == 3 * MIB
    assert tier.reserve(49) is None
    assert tier.reserve(48) is not None
    tier.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_kernel_without_populate_is_touched_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    population = SlowPopulation(errno.EINVAL, fail_at=0)
    monkeypatch.setattr(populate, "_libc", population)
    tier = DramTier.own(64 << 10, MIB, shared_path=str(tmp_path / "slab") if shared else None)
    rows = chain_rows(16)
    assert read_back(tier, store_rows(tier, rows), rows) == [RowStatus.OK] * 16
    tier.close()


def test_closing_stops_population(monkeypatch: pytest.MonkeyPatch) -> None:
    population = SlowPopulation()
    monkeypatch.setattr(populate, "_libc", population)
    tier = DramTier.own(64 << 10, 64 * MIB, first_chunk_bytes=MIB, chunk_bytes=MIB)
    wait_for(lambda: len(population.calls) == 2)
    threading.Timer(0.05, population.permits.release).start()
    tier.close()
    assert len(population.calls) == 2


def test_a_view_taken_before_close_stays_valid() -> None:
    tier = DramTier.own(5000, MIB)
    (row,) = chain_rows(1)
    slots = store_rows(tier, [row])
    view = tier.row(int(slots[0]))
    tier.close()
    assert view == payload_of(row, 5000)


RSS_SCRIPT = """
import sys
from kvtier.tiers.dram import DramTier
def rss():
    return int([l for l in open('/proc/self/status') if l.startswith(('RssAnon', 'RssShmem'))][%d].split()[1]) << 10
before = rss()
cap = 96 << 20
tier = DramTier.own(300_000, cap, chunk_bytes=16 << 20, first_chunk_bytes=1 << 20, shared_path=%r)
early = rss() - before
tier.wait_ready()
ready = rss() - before
slots = tier.reserve(tier.stats().capacity_rows)
for slot in slots.tolist():
    tier.row(slot)[:] = bytes([slot %% 256]) * 300_000
full = rss() - before
print(cap, early, ready, full, tier.stats().medium_bytes)
"""


@pytest.mark.parametrize("shared", [False, True])
def test_resident_memory_is_the_cap_within_two_percent(tmp_path: Path, shared: bool) -> None:
    path = f"/dev/shm/kvtier-test-{os.getpid()}" if shared else None
    script = RSS_SCRIPT % (1 if shared else 0, path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    cap, _, ready, full, medium = map(int, done.stdout.split())
    assert abs(full - medium) <= 0.02 * cap
    assert abs(ready - full) <= 0.02 * cap
    assert cap * 0.98 <= full <= cap * 1.02


def test_a_shared_slab_is_a_file_other_processes_can_map_and_goes_with_close(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    path.write_bytes(b"left by a killed process")
    tier = DramTier.own(5000, MIB, shared_path=str(path))
    (row,) = chain_rows(1)
    slots = store_rows(tier, [row])
    start = int(slots[0]) * tier.stride_bytes
    assert path.read_bytes()[start : start + 5000] == bytes(payload_of(row, 5000))
    assert path.stat().st_mode & 0o777 == 0o600
    tier.close()
    assert not path.exists()


def test_caps_that_cannot_be_are_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dram_bytes is 1000, less than one row of 5120 bytes"):
        DramTier.own(5000, 1000)
    with pytest.raises(ConfigError, match=r"dram_bytes asks for \d+ but \d+ bytes of memory are available; set"):
        DramTier.own(5000, 1 << 50)
    with pytest.raises(ConfigError, match=r"has room for \d+; lower dram_bytes, or enlarge it"):
        DramTier.own(5000, 1 << 50, shared_path=str(tmp_path / "slab"))
    with pytest.raises(ConfigError, match="cannot be made"):
        DramTier.own(5000, MIB, shared_path=str(tmp_path / "no" / "such" / "folder" / "slab"))


def test_available_memory_respects_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 80 kB\n")
    assert available_memory_bytes(str(tmp_path)) == 80 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    assert available_memory_bytes(str(tmp_path)) == 80 << 10
    (group / "memory.max").write_text("45000\n")
    assert available_memory_bytes(str(tmp_path)) == 40_000
    assert available_memory_bytes() > MIB


def test_batches_of_64_are_reserved_and_released_within_a_microsecond_a_block() -> None:
    tier = DramTier.over(np.zeros(4096 * 512, dtype=np.uint8), 512, 4096, 512)
    best = float("inf")
    for _ in range(30):
        begin_s = time.process_time()
        for _ in range(100):
            slots = tier.reserve(64)
            assert slots is not None
            tier.release(slots)
        best = min(best, (time.process_time() - begin_s) / 6400)
    assert best <= 1e-6
    tier.close()


@pytest.mark.parametrize("attempt", range(20))
def test_reading_under_close_never_touches_memory_that_is_gone(attempt: int) -> None:
    tier = DramTier.own(100_000, 4 * MIB)
    rows = chain_rows(20, attempt)
    slots = store_rows(tier, rows)
    answers: list[list[RowStatus]] = []
    start = threading.Barrier(3)

    def read() -> None:
        start.wait()
        answers.extend(read_back(tier, slots, rows) for _ in range(3))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    start.wait()
    tier.close()
    for thread in threads:
        thread.join()
    assert len(answers) == 6
    assert {frozenset(answer) for answer in answers} <= {frozenset([RowStatus.OK]), frozenset([RowStatus.CLOSED])}


def test_host_slab_reports_chunks_that_cover_every_row_once() -> None:
    slab = HostSlab(5000, MIB, first_chunk_bytes=20_000, chunk_bytes=100_000)
    chunks: list[tuple[int, int]] = []
    slab.populate(lambda first, end: chunks.append((first, end)), pytest.fail)
    assert slab.wait_populated(20)
    assert chunks[0][0] == 0
    assert chunks[-1][1] == slab.n_rows
    assert all(before[1] == after[0] for before, after in itertools.pairwise(chunks))
    slab.close()
    slab.close()
