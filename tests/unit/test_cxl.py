"""The cxl tier: restart, kill, whose bytes they are, and every way its medium can be wrong."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, TierIOError
from kvtier.testing.rows import chain_rows, payload_of, read_back, soiled_buffers, store_rows
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.cxl.format import Region, least_cap_bytes
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.protocol import RowStatus, TierProbe
from tests.machines import add_dax, add_node

MIB = 1 << 20
ROW = 100_000


def tier_at(path: Path | str, *, key: bytes = b"\1", layout: str = "layout", cap: int = 16 * MIB) -> CxlTier:
    return CxlTier(str(path), key * 32, layout, ROW, cap)


@pytest.mark.parametrize("row_bytes", [1, 512, 65_536, 70_001, 3 * MIB])
@pytest.mark.parametrize("cap", [4 * MIB, 7 * MIB + 1, 64 * MIB])
def test_rows_headers_and_scratch_fit_the_cap_and_do_not_overlap(row_bytes: int, cap: int) -> None:
    region = Region.within(cap, row_bytes)
    headers_end = 4096 + region.n_slots * 128
    if region.n_slots:
        assert headers_end + region.scratch_bytes <= region.rows_offset
        assert region.rows_offset % (2 * MIB) == region.total_bytes % (2 * MIB) == 0
        assert region.rows_offset + region.n_slots * region.stride_bytes <= region.total_bytes <= cap
        assert region.rows_offset + (region.n_slots + 17_000) * (region.stride_bytes + 128) > region.total_bytes
    least = least_cap_bytes(row_bytes)
    assert Region.within(least, row_bytes).n_slots >= 1
    assert Region.within(least - 2 * MIB, row_bytes).n_slots == 0


def test_rows_survive_a_restart_in_the_order_they_were_written(tmp_path: Path) -> None:
    path, rows, others = tmp_path / "cxl", chain_rows(40), chain_rows(5, seed=1)
    tier = tier_at(path)
    slots = store_rows(tier, rows)
    gone = store_rows(tier, others)
    tier.release(gone)
    tier.release(slots[30:])
    tier.close()
    again = tier_at(path)
    found = again.recover()
    assert [item.row for item in found] == rows[:30]
    assert again.recover() == []
    assert again.stats().used_rows == 30
    kept = np.array([item.slot for item in found], dtype=np.int32)
    assert read_back(again, kept, rows[:30]) == [RowStatus.OK] * 30
    assert again.wait_ready(20)
    free = again.stats().capacity_rows - 30
    more = again.reserve(free)
    assert more is not None
    assert not set(more.tolist()) & set(kept.tolist())
    again.check_integrity()
    again.close()


@pytest.mark.parametrize("change", [{"key": b"\2"}, {"layout": "other"}, {"cap": 24 * MIB}])
def test_rows_of_another_key_space_layout_or_size_are_never_found(tmp_path: Path, change: dict[str, object]) -> None:
    path, rows = tmp_path / "cxl", chain_rows(4)
    tier = tier_at(path)
    slots = store_rows(tier, rows)
    tier.close()
    other = tier_at(path, **change)  # type: ignore[arg-type]
    assert other.recover() == []
    assert other.stats().faults == {"region_foreign": 1}
    assert read_back(other, slots, rows) == [RowStatus.FOREIGN] * 4
    other.close()


def test_a_flipped_bit_is_found_in_payload_and_header(tmp_path: Path) -> None:
    path, rows = tmp_path / "cxl", chain_rows(6)
    tier = tier_at(path)
    slots = store_rows(tier, rows)
    tier.close()
    region = Region.within(16 * MIB, ROW)
    with path.open("r+b") as file:
        for offset in (region.rows_offset + int(slots[1]) * region.stride_bytes + 777, 4096 + 128 * int(slots[4]) + 50):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 16]))
    again = tier_at(path)
    assert {item.row for item in again.recover()} == {row for i, row in enumerate(rows) if i != 4}
    assert again.stats().faults == {"header_corrupt": 1}
    expected = [RowStatus.OK] * 6
    expected[1], expected[4] = RowStatus.CORRUPT, RowStatus.FOREIGN
    assert read_back(again, slots, rows) == expected
    again.close()


def test_a_file_cut_off_under_the_tier_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path, rows = tmp_path / "cxl", chain_rows(3)
    tier = tier_at(path)
    slots = store_rows(tier, rows)
    os.truncate(path, 2 * MIB + 50_000)
    assert read_back(tier, slots, rows) == [RowStatus.IO_ERROR] * 3
    more = tier.reserve(1)
    assert more is not None
    assert tier.write(more, rows[:1], [payload_of(rows[0], ROW)]) == [RowStatus.IO_ERROR]
    assert tier.probe().read_latency_s == float("inf")
    tier.release(slots)
    assert tier.stats().faults == {"medium_truncated": 2, "io_error": 4}
    tier.close()
    again = tier_at(path)  # grown again: headers promise what was cut off, and checksums tell
    slots = np.array([item.slot for item in again.recover()], dtype=np.int32)
    assert read_back(again, slots, rows) == [RowStatus.CORRUPT] * 3
    again.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "cxl")
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}; give this engine another one"):
        tier_at(tmp_path / "cxl")
    tier.close()
    tier_at(tmp_path / "cxl").close()


def test_somebody_else_s_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"do not lose me" * 100)
    with pytest.raises(ConfigError, match="holds something that is not kvtier's"):
        tier_at(path)
    assert path.read_bytes() == b"do not lose me" * 100


def test_paths_and_caps_that_cannot_be_say_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory; name a device, a node"):
        tier_at(tmp_path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        tier_at(tmp_path / "no" / "file")
    with pytest.raises(ConfigError, match=r"cxl_bytes is 2097152; a row of 100000 bytes needs at least \d+"):
        tier_at(tmp_path / "cxl", cap=2 * MIB)
    with pytest.raises(ConfigError, match=r"has room for \d+; set cxl_bytes to \d+MiB at most"):
        tier_at(tmp_path / "cxl", cap=1 << 50)
    with pytest.raises(ConfigError, match="neither a devdax device that sysfs knows nor a file"):
        tier_at("/dev/null")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", ["ftruncate", "fallocate", "preadv", "flock"])
def test_a_medium_that_fails_while_it_is_opened_costs_the_tier_and_leaves_it_unlocked(
    tmp_path: Path, step: str, code: int
) -> None:
    path = tmp_path / "cxl"
    tier_at(path, cap=8 * MIB).close()

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    broken = Syscalls()
    setattr(broken, step, fail)
    with pytest.raises(TierIOError, match="cannot be mapped"):
        CxlTier(str(path), b"\1" * 32, "layout", ROW, 16 * MIB, syscalls=broken)
    tier_at(path).close()


def test_a_device_is_mapped_aligned_and_keeps_its_rows(tmp_path: Path) -> None:
    add_node(tmp_path, 2, total=0, hmat=(250, 30_000, 300, 20_000))
    device = add_dax(tmp_path, "dax0.0", 32 * MIB, node=2)
    rows = chain_rows(20)
    tier = CxlTier("auto", b"\1" * 32, "layout", ROW, 1 << 40, root=str(tmp_path))
    assert tier.probe() == TierProbe(250e-9, 30e9, 300e-9, 20e9)
    assert tier.probe() != TierProbe(250e-9, 30e9, 300e-9, 20e9)
    slots = store_rows(tier, rows)
    tier.close()
    assert device.stat().st_size == 32 * MIB
    again = CxlTier(str(device), b"\1" * 32, "layout", ROW, 1 << 40, root=str(tmp_path))
    assert [item.row for item in again.recover()] == rows
    assert read_back(again, slots, rows) == [RowStatus.OK] * 20
    again.close()


def test_memory_of_a_node_is_bound_there_and_starts_empty() -> None:
    try:
        tier = CxlTier("node:0", b"\1" * 32, "layout", ROW, 16 * MIB)
    except TierIOError as error:
        pytest.skip(f"this kernel does not let us place memory: {error}")
    except ConfigError as error:
        pytest.skip(f"no NUMA node 0 in sysfs: {error}")
    rows = chain_rows(5)
    assert read_back(tier, store_rows(tier, rows), rows) == [RowStatus.OK] * 5
    assert tier.stats().faults == {}
    tier.close()
    again = CxlTier("node:0", b"\1" * 32, "layout", ROW, 16 * MIB)
    assert again.recover() == []
    again.close()


def test_a_node_s_memory_that_cannot_be_bound_costs_the_tier(tmp_path: Path) -> None:
    add_node(tmp_path, 900)
    with pytest.raises(TierIOError, match="cannot be bound to NUMA node 900"):
        CxlTier("auto", b"\1" * 32, "layout", ROW, 16 * MIB, root=str(tmp_path))
    with pytest.raises(ConfigError, match="bytes free; set cxl_bytes to"):
        CxlTier("node:900", b"\1" * 32, "layout", ROW, 1 << 50, root=str(tmp_path))


KILLED = """
import sys
from kvtier.testing.rows import chain_rows, store_rows
from kvtier.tiers.cxl import CxlTier
tier = CxlTier(sys.argv[1], b"\\1" * 32, "layout", 100_000, 16 << 20)
tier.recover()
for turn in range(10_000):
    slots = store_rows(tier, chain_rows(20, turn))
    print(turn, flush=True)
    if turn:
        tier.release(before)
    before = slots
"""


@pytest.mark.parametrize("attempt", range(8))
def test_a_killed_process_leaves_sound_rows_and_never_a_wrong_byte(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "cxl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    turn = -1
    for _ in range(2 + attempt * 3):
        turn = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    turn = max([turn, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    tier = tier_at(path)
    found = tier.recover()
    slots = np.array([item.slot for item in found], dtype=np.int32)
    statuses = read_back(tier, slots, [item.row for item in found])
    assert set(statuses) == {RowStatus.OK}
    assert set(chain_rows(20, turn)) <= {item.row for item in found}
    assert len(found) <= 60
    assert tier.read(slots[:1], chain_rows(1, "other"), soiled_buffers(1, ROW)) == [RowStatus.FOREIGN]
    tier.close()
