"""The folder of the nvme tier: who may use it, what the cap covers, what has to go, and what the messages say."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.testing.rows import chain_rows, read_back, store_rows
from kvtier.tiers.nvme import NvmeTier, space
from kvtier.tiers.nvme.format import Geometry
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.nvme.journal import journal_bytes
from kvtier.tiers.nvme.space import least_cap_bytes, plan_files
from kvtier.tiers.protocol import RowStatus

ROW_BYTES = 20_000
CAP = 4 << 20


def open_tier(
    folder: Path, key_space: int = 1, cap_bytes: int = CAP, layout: str = "layout", **more: object
) -> NvmeTier:
    return NvmeTier(str(folder), bytes([key_space]) * 32, layout, ROW_BYTES, cap_bytes, **more)  # type: ignore[arg-type]


def occupied(folder: Path) -> int:
    """What `du` counts: everything in the folder, and the folder."""
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def slabs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.slab"))


@pytest.mark.parametrize("row_bytes", [1, 4096, 100_000, 1 << 20])
@pytest.mark.parametrize("room_bytes", [3 << 20, 64 << 20, 1 << 40])
def test_a_plan_uses_the_room_and_never_more(room_bytes: int, row_bytes: int) -> None:
    geometry = Geometry.of(row_bytes)
    plan = plan_files(room_bytes, geometry)
    assert plan.slab_bytes + 2 * plan.journal_bytes <= room_bytes
    one_more = plan.slab_bytes + geometry.slot_bytes + 2 * journal_bytes(plan.n_slots + 1)
    assert one_more > room_bytes - (room_bytes // 16 + room_bytes // 4096 + (64 << 10) + 3 * geometry.slot_bytes)
    assert plan.scratch_offset % 4096 == plan.slab_bytes % 4096 == 0


@pytest.mark.parametrize("row_bytes", [1, 20_000, 3 << 20])
def test_the_least_cap_that_is_named_works_and_is_tight(row_bytes: int) -> None:
    geometry = Geometry.of(row_bytes)
    least = least_cap_bytes(geometry)
    assert plan_files(least, geometry).n_slots >= 1
    assert plan_files(least * 4 // 5, geometry).n_slots == 0


def test_the_whole_cap_is_preallocated_and_not_exceeded(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert tier.stats().capacity_rows * Geometry.of(ROW_BYTES).slot_bytes > CAP * 3 // 4
    assert CAP * 3 // 4 < occupied(tmp_path) <= CAP
    assert tier.stats().medium_bytes <= CAP
    tier.close()


def test_a_path_that_does_not_exist_is_made(tmp_path: Path) -> None:
    open_tier(tmp_path / "a" / "b").close()
    assert slabs(tmp_path / "a" / "b")


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"nvme_path '.*' is not a directory; set it to a directory"):
            open_tier(path)
    assert (tmp_path / "file").read_text() == "mine"


class ReadOnly(Syscalls):
    """A file system where nothing can be opened for writing (root ignores permission bits, so it is played)."""

    def __init__(self, code: int) -> None:
        self.code = code

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        raise OSError(self.code, os.strerror(self.code), path)


@pytest.mark.parametrize(
    ("code", "said"), [(errno.EACCES, "is not writable"), (errno.EROFS, "read-only"), (errno.EIO, "cannot be used")]
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, code: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_tier(tmp_path, syscalls=ReadOnly(code))


def test_a_cap_larger_than_the_medium_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nvme_bytes is \d+ but the medium .* has room for \d+; set nvme_bytes to \d+MiB"
    ):
        open_tier(tmp_path, cap_bytes=1 << 50)
    assert occupied(tmp_path) < 64 << 10


def test_a_cap_too_small_for_a_row_names_the_least(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"needs at least {least_cap_bytes(Geometry.of(ROW_BYTES))}"):
        open_tier(tmp_path, cap_bytes=10_000)
    tier = open_tier(tmp_path, cap_bytes=least_cap_bytes(Geometry.of(ROW_BYTES)))
    assert tier.stats().capacity_rows >= 1
    tier.close()


class FullMedium(Syscalls):
    """Lies about free space until it counts."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_medium_that_turns_out_full_is_refused_and_leaves_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold nvme_bytes"):
        open_tier(tmp_path, syscalls=FullMedium())
    open_tier(tmp_path).close()


class NoPreallocation(Syscalls):
    """A file system without fallocate."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_without_preallocation_the_files_grow_within_the_cap(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, syscalls=NoPreallocation())
    rows = chain_rows(tier.stats().capacity_rows)
    slots = store_rows(tier, rows)
    assert read_back(tier, slots, rows) == [RowStatus.OK] * len(rows)
    assert occupied(tmp_path) <= CAP
    tier.close()


def test_the_second_opener_is_told_who_has_the_slab(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}; give this engine another nvme_path"):
        open_tier(tmp_path)
    rows = chain_rows(2)
    assert read_back(tier, store_rows(tier, rows), rows) == [RowStatus.OK] * 2
    tier.close()
    open_tier(tmp_path).close()


def test_another_process_is_named_too_and_its_death_frees_the_slab(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom kvtier.tiers.nvme import NvmeTier\n"
        f"tier = NvmeTier(sys.argv[1], bytes([1]) * 32, 'layout', {ROW_BYTES}, {CAP})\n"
        "print('open', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=f"process {child.pid}"):
            open_tier(tmp_path)
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()
    open_tier(tmp_path).close()


def test_many_openers_at_once_one_wins(tmp_path: Path) -> None:
    won: list[NvmeTier] = []
    lost: list[ConfigError] = []

    def race() -> None:
        try:
            won.append(open_tier(tmp_path))
        except ConfigError as error:
            lost.append(error)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    won[0].close()


def test_a_new_key_space_takes_what_is_free_and_at_least_half(tmp_path: Path) -> None:
    """Two models used in turns share the cap; the first had all of it and must go, then both fit."""
    open_tier(tmp_path, 1).close()
    second = open_tier(tmp_path, 2)
    assert second.stats().faults == {"other_key_space_removed": 1}
    second.close()
    assert len(slabs(tmp_path)) == 1
    open_tier(tmp_path, 3, cap_bytes=2 * CAP).close()
    assert len(slabs(tmp_path)) == 2
    assert occupied(tmp_path) <= 2 * CAP
    for key_space in (2, 3, 2, 3):
        tier = open_tier(tmp_path, key_space, cap_bytes=2 * CAP)
        assert tier.stats().faults == {}
        tier.close()
        assert len(slabs(tmp_path)) == 2
        assert occupied(tmp_path) <= 2 * CAP


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    for key_space, cap in ((1, CAP), (2, 2 * CAP), (3, 4 * CAP)):
        open_tier(tmp_path, key_space, cap_bytes=cap).close()
    names = {path.name: path for path in tmp_path.glob("*.slab")}
    assert len(names) == 3
    for age, key_space in ((100, 2), (50, 3), (10, 1)):
        for path in tmp_path.glob(f"kvtier-{bytes([key_space] * 12).hex()}*"):
            moment = path.stat().st_mtime - age
            os.utime(path, (moment, moment))
    tier = open_tier(tmp_path, 4, cap_bytes=4 * CAP)
    removed = set(names) - set(slabs(tmp_path))
    assert f"kvtier-{bytes([2] * 12).hex()}.slab" in removed
    assert f"kvtier-{bytes([1] * 12).hex()}.slab" not in removed
    assert tier.stats().faults["other_key_space_removed"] == len(removed)
    assert occupied(tmp_path) <= 4 * CAP
    tier.close()


def test_a_slab_in_use_is_never_removed(tmp_path: Path) -> None:
    first = open_tier(tmp_path, 1)
    rows = chain_rows(3)
    slots = store_rows(first, rows)
    with pytest.raises(ConfigError, match=r"of which \d+ are left by other slabs"):
        open_tier(tmp_path, 2)
    second = open_tier(tmp_path, 2, cap_bytes=2 * CAP)
    assert second.stats().capacity_rows > 10
    assert occupied(tmp_path) <= 2 * CAP
    assert read_back(first, slots, rows) == [RowStatus.OK] * 3
    first.close()
    second.close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "model.safetensors"
    theirs.write_bytes(b"w" * 100_000)
    (tmp_path / "kvtier-notes.txt").write_text("hello")
    open_tier(tmp_path, 1).close()
    open_tier(tmp_path, 2).close()
    assert theirs.read_bytes() == b"w" * 100_000
    assert (tmp_path / "kvtier-notes.txt").read_text() == "hello"


class CannotUnlink(Syscalls):
    """Files of another key space that will not go (EPERM)."""

    def unlink(self, path: str) -> None:
        if bytes([1] * 12).hex() in path and os.path.exists(path):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        super().unlink(path)


def test_a_file_that_cannot_be_removed_is_counted_and_skipped(tmp_path: Path) -> None:
    open_tier(tmp_path, 1).close()
    open_tier(tmp_path, 2, cap_bytes=2 * CAP).close()
    tier = open_tier(tmp_path, 3, cap_bytes=2 * CAP, syscalls=CannotUnlink())
    assert tier.stats().faults == {"other_key_space_not_removed": 1, "other_key_space_removed": 1}
    assert len(slabs(tmp_path)) == 2
    assert occupied(tmp_path) <= 2 * CAP
    tier.close()


@pytest.mark.parametrize("factor", [0.3, 0.6, 1.7, 4.0])
def test_another_cap_keeps_what_fits(tmp_path: Path, factor: float) -> None:
    tier = open_tier(tmp_path)
    rows = chain_rows(tier.stats().capacity_rows)
    slots = store_rows(tier, rows)
    tier.close()
    resized = open_tier(tmp_path, cap_bytes=int(CAP * factor))
    recovered = resized.recover()
    assert occupied(tmp_path) <= CAP * factor
    assert len(recovered) == min(len(rows), resized.stats().capacity_rows)
    by_slot = {int(slot): row for slot, row in zip(slots, rows, strict=True)}
    assert all(by_slot[found.slot] == found.row for found in recovered)
    found_slots = np.array([found.slot for found in recovered], dtype=np.int32)
    statuses = read_back(resized, found_slots, [found.row for found in recovered])
    assert statuses.count(RowStatus.OK) >= len(recovered) - 3
    free = resized.stats().capacity_rows - len(recovered)
    assert resized.reserve(free + 1) is None
    resized.check_integrity()
    resized.close()


def test_restarting_five_times_under_load_stays_within_the_cap(tmp_path: Path) -> None:
    """LMCache#1454: left-over files were not counted after a restart."""
    for restart in range(5):
        tier = open_tier(tmp_path, key_space=1 + restart % 2)
        tier.recover()
        held = tier.reserve(tier.stats().capacity_rows - tier.stats().used_rows)
        assert held is not None
        tier.release(held)
        rows = chain_rows(min(len(held), 40), restart)
        store_rows(tier, rows)
        assert occupied(tmp_path) <= CAP
        tier.close()
        assert occupied(tmp_path) <= CAP


def test_a_left_over_temporary_file_is_removed(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (journal,) = tmp_path.glob("*.journal")
    leftover = journal.with_name(journal.name + ".tmp")
    leftover.write_bytes(b"x" * 1_000_000)
    tier = open_tier(tmp_path)
    assert not leftover.exists()
    assert occupied(tmp_path) <= CAP
    tier.close()


def test_a_lock_of_the_dead_is_waited_for_and_one_of_the_living_is_not(tmp_path: Path) -> None:
    """As after io_uring: who took the lock is dead and reaped, and something of it still has the file open."""
    path, ready = tmp_path / "file", tmp_path / "ready"
    code = (
        "import fcntl, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "if os.fork() == 0:\n"
        "    while not os.path.exists(sys.argv[2] + '.go'): time.sleep(0.01)\n"
        "    time.sleep(1.0)\n"
        "    os._exit(0)\n"
        "open(sys.argv[2], 'w').close()\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path), str(ready)])
    while not ready.exists():
        time.sleep(0.01)
    fd = os.open(path, os.O_RDWR)
    began = time.monotonic()
    assert not space.lock_soon(fd, Syscalls())
    assert 0.5 <= time.monotonic() - began < 10
    holder.kill()
    holder.wait()
    assert not space.try_lock(fd, Syscalls())
    Path(str(ready) + ".go").touch()
    began = time.monotonic()
    assert space.lock_soon(fd, Syscalls())
    assert time.monotonic() - began > 0.6, "longer than for the living"
    os.close(fd)


def test_a_holder_the_kernel_does_not_name_is_waited_for_a_little_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a PID namespace /proc/locks leaves out who was reaped: a killed engine in a container is not named."""
    monkeypatch.setattr(space, "_holder_pid", lambda fd: 0)
    held, fd = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert space.try_lock(held, Syscalls())
    threading.Timer(0.8, os.close, (held,)).start()
    assert space.lock_soon(fd, Syscalls()), "let go after more than the living are given"
    monkeypatch.setattr(space, "_UNKNOWN_HOLDER_WAIT_S", 0.05)
    again = os.open(tmp_path / "file", os.O_RDWR)
    assert not space.lock_soon(again, Syscalls()), "not for ever"
    for descriptor in (fd, again):
        os.close(descriptor)
