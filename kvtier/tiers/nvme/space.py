"""The folder of the nvme tier: who may use it, what is in it, and how much of it a slab may take.

The cap covers every file of kvtier in the folder: this key space's slab and journal, the temporary file of journal
compaction, and the files of other key spaces (another model, a former weight version). A slab takes what is free under
the cap. If that is less than it has already, or less than half the cap for a new one, the least recently used files of
other key spaces are removed until it fits; files another process has open are counted and never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.tiers.addresses import round_up
from kvtier.tiers.nvme.format import Geometry
from kvtier.tiers.nvme.io import BLOCK, Syscalls
from kvtier.tiers.nvme.journal import journal_bytes

PREFIX = "kvtier-"
SLAB_SUFFIX = ".slab"
JOURNAL_SUFFIX = ".journal"
_SUFFIXES = (SLAB_SUFFIX, JOURNAL_SUFFIX, JOURNAL_SUFFIX + ".tmp")
WEAR_FILE = "kvtier.wear"
_FOLDER_LOCK = "kvtier.lock"
_FOLDER_LOCK_WAIT_S = 10.0
_LIVING_HOLDER_WAIT_S, _UNKNOWN_HOLDER_WAIT_S, _DEAD_HOLDER_WAIT_S = 0.5, 3.0, 30.0
_SLACK_BYTES = 64 << 10
_SLACK_SHARE = 4096
_SCRATCH_BYTES = 4 << 20


class Plan(NamedTuple):
    """Sizes of one key space's files. `total_bytes` is never exceeded, whatever happens."""

    n_slots: int
    scratch_bytes: int
    slab_bytes: int
    journal_bytes: int
    total_bytes: int

    @property
    def scratch_offset(self) -> int:
        """Where in the slab the room for probes starts."""
        return self.slab_bytes - self.scratch_bytes


def plan_files(room_bytes: int, geometry: Geometry) -> Plan:
    """The most slots that fit `room_bytes` with journal, its temporary twin, probe scratch and metadata of the file
    system (extent blocks count as the file's own)."""
    scratch = max(BLOCK, min(_SCRATCH_BYTES, room_bytes // 16 // BLOCK * BLOCK))
    fixed = BLOCK + scratch + _SLACK_BYTES + room_bytes // _SLACK_SHARE
    per_slot = geometry.slot_bytes + 2 * (journal_bytes(1 << 20) - journal_bytes(0)) / (1 << 20)
    n = max(0, int((room_bytes - fixed - 2 * journal_bytes(0)) / per_slot) + 2)
    while n > 0 and fixed + n * geometry.slot_bytes + 2 * journal_bytes(n) > room_bytes:
        n -= 1
    slab = BLOCK + n * geometry.slot_bytes + scratch
    return Plan(n, scratch, slab, journal_bytes(n), room_bytes)


def least_cap_bytes(geometry: Geometry) -> int:
    """The smallest cap under which one row fits."""
    cap = round_up(BLOCK + geometry.slot_bytes + 2 * journal_bytes(1) + _SLACK_BYTES, BLOCK)
    while plan_files(cap, geometry).n_slots < 1:
        cap += cap // 16 // BLOCK * BLOCK + BLOCK
    return cap


class KeySpaceFiles(NamedTuple):
    """The files of one key space in the folder, by stem."""

    folder: Path
    stem: str

    @property
    def slab(self) -> str:
        """Path of the slab."""
        return str(self.folder / (self.stem + SLAB_SUFFIX))

    @property
    def journal(self) -> str:
        """Path of the journal."""
        return str(self.folder / (self.stem + JOURNAL_SUFFIX))

    def occupied_bytes(self) -> int:
        """Bytes of the medium the files occupy now."""
        return sum(allocated_bytes(str(self.folder / (self.stem + suffix))) for suffix in _SUFFIXES)

    def remove(self, syscalls: Syscalls) -> None:
        """Delete the files, the slab last. Raises OSError."""
        for suffix in reversed(_SUFFIXES):
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(str(self.folder / (self.stem + suffix)))


def allocated_bytes(path: str) -> int:
    """Bytes of the medium behind `path` (0 if it is not there)."""
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def files_of(folder: Path, key_space_digest: bytes) -> KeySpaceFiles:
    """The files of a key space: its digest names them."""
    return KeySpaceFiles(folder, PREFIX + key_space_digest[:12].hex())


def other_files(folder: Path, own: KeySpaceFiles) -> list[KeySpaceFiles]:
    """The files of all other key spaces, least recently used first."""
    return [files for files in key_spaces_in(folder) if files.stem != own.stem]


def key_spaces_in(folder: Path) -> list[KeySpaceFiles]:
    """The files of all key spaces, least recently used first (opening a slab writes its superblock)."""
    stems: dict[str, float] = {}
    for entry in os.scandir(folder):
        for suffix in _SUFFIXES:
            if entry.name.startswith(PREFIX) and entry.name.endswith(suffix):
                with contextlib.suppress(OSError):
                    stem = entry.name.removesuffix(suffix)
                    stems[stem] = max(stems.get(stem, 0.0), entry.stat(follow_symlinks=False).st_mtime)
    return [KeySpaceFiles(folder, stem) for stem in sorted(stems, key=lambda s: (stems[s], s))]


@contextmanager
def locked_folder(path: str, syscalls: Syscalls) -> Iterator[Path]:
    """Make the folder if need be and keep other processes from opening slabs in it meanwhile.

    Raises ConfigError if the path cannot be used, or another process keeps the folder for too long.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = syscalls.open(str(folder / _FOLDER_LOCK), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unusable(path, error) from error
    try:
        deadline = time.monotonic() + _FOLDER_LOCK_WAIT_S
        while not try_lock(fd, syscalls):
            if time.monotonic() > deadline:
                raise ConfigError(f"nvme_path {path!r} is being opened by {holder_of(fd)}; wait, or use another path")
            time.sleep(0.02)
        yield folder
    finally:
        syscalls.close(fd)


def unusable(path: str, error: OSError) -> ConfigError:
    """The start-up error for a path that cannot be read, written or made."""
    what = {
        errno.ENOTDIR: "is not a directory",
        errno.EEXIST: "is not a directory",
        errno.EACCES: "is not writable",
        errno.EPERM: "is not writable",
        errno.EROFS: "is on a read-only file system",
    }.get(error.errno or 0, f"cannot be used ({error.strerror or error})")
    return ConfigError(f"nvme_path {path!r} {what}; set it to a directory this process may write")


def try_lock(fd: int, syscalls: Syscalls) -> bool:
    """Take the exclusive lock of an open file if nobody has it."""
    try:
        syscalls.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_soon(fd: int, syscalls: Syscalls) -> bool:
    """Take the exclusive lock of a file, waiting for a process that was killed, and hardly for one that lives.

    A process that used io_uring is gone before its rings are: the kernel ends what they had under way, and lets go of
    the file, in a worker of its own (`iou_exit`). Until then the lock has no owner, and rightly so: the last writes of
    the dead still land. Mostly that is 5 to 20 ms after the process was reaped; on a busy disk it has been 5 s. In a
    container the kernel does not name a holder that was reaped, nor one in another container: the wait is in between.
    """
    began_s = time.monotonic()
    while not try_lock(fd, syscalls):
        pid = _holder_pid(fd)
        known_s = _DEAD_HOLDER_WAIT_S if _is_dead(pid) else _LIVING_HOLDER_WAIT_S
        limit_s = known_s if pid else _UNKNOWN_HOLDER_WAIT_S
        if time.monotonic() - began_s > limit_s:
            return False
        time.sleep(0.005)
    return True


def holder_of(fd: int) -> str:
    """Who holds the lock of an open file, as far as the kernel tells."""
    pid = _holder_pid(fd)
    return f"process {pid}" if pid else "another process"


def _holder_pid(fd: int) -> int:
    """The process that took the lock of an open file; 0 where the kernel does not tell."""
    inode = os.fstat(fd).st_ino
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[5].rsplit(":", 1)[1]) == inode:
                return int(fields[4])
    return 0


def _is_dead(pid: int) -> bool:
    """Whether a process has ended, or is a zombie."""
    if pid <= 0:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def make_room(
    own: KeySpaceFiles, cap_bytes: int, had_bytes: int, syscalls: Syscalls, fault: Callable[[str], None]
) -> int:
    """Bytes the files of `own` may occupy under the cap, after removing what must go. Folder locked by the caller.

    `had_bytes` is what a sound slab and journal of this key space occupy now, 0 if there are none. Files that cannot
    be removed are counted and stay counted against the cap.
    """
    others = other_files(own.folder, own)
    occupied = {files: files.occupied_bytes() for files in others}
    kept = sum(occupied.values())
    wanted = min(cap_bytes, had_bytes or cap_bytes // 2)
    for files in others:
        if cap_bytes - kept >= wanted:
            break
        if _remove_unless_open(files, syscalls, fault):
            kept -= occupied[files] - files.occupied_bytes()
    return cap_bytes - kept


def _remove_unless_open(files: KeySpaceFiles, syscalls: Syscalls, fault: Callable[[str], None]) -> bool:
    try:
        fd = syscalls.open(files.slab, os.O_RDWR | os.O_CREAT)
        try:
            if not try_lock(fd, syscalls):
                return False
            files.remove(syscalls)
        finally:
            syscalls.close(fd)
    except OSError:
        fault("other_key_space_not_removed")
        return False
    fault("other_key_space_removed")
    return True


def check_medium(path: str, cap_bytes: int, folder: Path) -> None:
    """Raise ConfigError if the cap is more than the medium can give kvtier's files in this folder."""
    held = sum(
        allocated_bytes(entry.path)
        for entry in os.scandir(folder)
        if entry.name.startswith(PREFIX) and entry.name.endswith(_SUFFIXES)
    )
    state = os.statvfs(folder)
    possible = state.f_bavail * state.f_frsize + held
    if cap_bytes > possible:
        raise ConfigError(
            f"nvme_bytes is {cap_bytes} but the medium of {path!r} has room for {possible}; "
            f"set nvme_bytes to {possible // (1 << 20)}MiB at most, or free space"
        )
