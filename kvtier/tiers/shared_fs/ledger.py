"""Who may write how much: one cap for every process on every machine that uses the path, without a server.

A writer first claims bytes from an allowance. Allowances are granted under one lock file, and written down in a file
for each writer, so that at all times

    bytes on the medium ≤ `used` in the ledger + the allowances written down ≤ cap.

A writer reports what it used when it asks for more. It holds a lock on its own file as long as it lives (the kernel
drops it with the process, kill -9 included): whoever finds a writer's file unlocked counts its allowance as used,
removes its temporary files, and the next scan sets the count right. A stopped process keeps its lock, and so
what it may still write stays reserved. Counting may err upwards, never downwards.

Needs a file system whose flock works between the machines (NFS v3/v4, CephFS, GPFS, Lustre mounted with `flock`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.codec.checksum import checksum64
from kvtier.tiers.shared_fs.filesystem import FileSystem

_STATE = struct.Struct("<8sqQ")
_ALLOWANCE = struct.Struct("<8sq")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"KVTledg1"
_LOCK_WAIT_S = 1.0
_SHARE_OF_CAP = 64
_MOST_AT_ONCE_BYTES = 256 << 20
OVERHEAD_BYTES = 1024
"""What one more file costs beside its blocks: its entry in a folder that grows by whole blocks."""
FOLDER_BYTES = 8192
_WRITER_BYTES = 16384
"""A writer's own file and folder, and their entries."""


class State(NamedTuple):
    """The ledger: bytes in use as far as reported, and bytes ever reported."""

    used: int
    reported: int


class Ledger:
    """This process's allowance, and the way to more. Thread-safe."""

    def __init__(self, root: str, cap_bytes: int, fs: FileSystem, fault: Callable[[str], None]) -> None:
        """Join the writers of `root`. Raises OSError."""
        self.root = root
        self.cap_bytes = cap_bytes
        self.writer = uuid.uuid4().hex
        self.temporary = os.path.join(root, "tmp", self.writer)
        self.last_total = 0
        self._fs = fs
        self._fault = fault
        self._writers = os.path.join(root, "writers")
        self._own_path = os.path.join(self._writers, self.writer)
        self._lock = threading.Lock()
        self._free = self._in_flight = self._consumed = 0
        self._closed = False
        for folder in (self._writers, os.path.join(root, "tmp"), os.path.join(root, "objects")):
            fs.make_folder(folder)
        self._lock_fd = fs.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT)
        try:
            with self._everyone():
                state, others = self._settled()
                # Locked before anyone else can look: a writer's file that is not locked is a dead writer's.
                self._own_fd = fs.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                fs.flock(self._own_fd, fcntl.LOCK_EX)
                fs.make_folder(self.temporary)
                self._write_state(State(state.used + _WRITER_BYTES, state.reported))
                self._write_allowance()
                self.last_total = state.used + _WRITER_BYTES + others
        except OSError:
            fs.close(self._lock_fd)
            raise

    def claim(self, n_bytes: int) -> bool:
        """Whether `n_bytes` may be written now. What is claimed must be settled. Raises OSError."""
        with self._lock:
            try:
                if self._closed or (self._free < n_bytes and not self._grant(n_bytes)):
                    return False
            except TimeoutError:
                self._fault("ledger_busy")
                return False
            self._free -= n_bytes
            self._in_flight += n_bytes
            return True

    def settle(self, claimed: int, written: int) -> None:
        """Of `claimed` bytes, `written` are on the medium now."""
        with self._lock:
            self._in_flight -= claimed
            self._consumed += written
            self._free += claimed - written

    @property
    def known_bytes(self) -> int:
        """Bytes on the medium as far as this process knows, its own latest included; never more than the cap."""
        with self._lock:
            return min(self.cap_bytes, self.last_total - self._free)

    def begin_scan(self) -> int:
        """Bytes reported by everyone until now, this process's latest included; for `end_scan`. Raises OSError."""
        with self._lock, self._everyone():
            state = self._report(self._settled()[0])
            self._write_allowance()
            return state.reported

    def end_scan(self, scanned_bytes: int, reported_before: int) -> int:
        """The tree was found to occupy `scanned_bytes`, some of which may have been reported during the scan. Returns
        what is in use or allowed. Raises OSError."""
        with self._lock, self._everyone():
            state, others = self._settled()
            state = State(scanned_bytes + state.reported - reported_before, state.reported)
            self._write_state(state)
            return self._total(state, others)

    def freed(self, n_bytes: int) -> None:
        """Files of `n_bytes` were removed. Raises OSError."""
        with self._lock, self._everyone():
            state, others = self._settled()
            state = State(max(0, state.used - n_bytes), state.reported)
            self._write_state(state)
            self._total(state, others)

    def close(self) -> None:
        """Report what was used and leave. Idempotent. Raises OSError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._free = 0
            try:
                with self._everyone():
                    state = self._report(self._settled()[0])
                    self._write_state(State(state.used + self._in_flight, state.reported))
                    self._sweep(self.writer)
            finally:
                self._fs.close(self._own_fd)
                self._fs.close(self._lock_fd)

    # --- under the lock -----------------------------------------------------------------------------------------

    @contextmanager
    def _everyone(self) -> Iterator[None]:
        """Keep every other process from the ledger. Raises TimeoutError if one of them keeps it for long: it may have
        been stopped with the lock in its hand."""
        deadline, pause_s = time.monotonic() + _LOCK_WAIT_S, 0.001
        while True:
            try:
                self._fs.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds the ledger", self.root) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        try:
            yield
        finally:
            self._fs.flock(self._lock_fd, fcntl.LOCK_UN)

    def _grant(self, need: int) -> bool:
        with self._everyone():
            state, others = self._settled()
            state = self._report(state)
            room = self.cap_bytes - self._total(state, others)
            at_once = max(need, min(self.cap_bytes // _SHARE_OF_CAP, _MOST_AT_ONCE_BYTES))
            granted = min(at_once, room) if room >= need - self._free else 0
            self._free += granted
            try:
                self._write_allowance()
            except OSError:
                self._free -= granted
                raise
            self.last_total += granted
        return self._free >= need

    def _report(self, state: State) -> State:
        """Move what was consumed from the allowance to the ledger, the ledger first."""
        state = State(state.used + self._consumed, state.reported + self._consumed)
        self._write_state(state)
        self._consumed = 0
        return state

    def _total(self, state: State, others: int) -> int:
        self.last_total = state.used + others + self._free + self._in_flight + self._consumed
        return self.last_total

    def _settled(self) -> tuple[State, int]:
        """The ledger with the dead counted out, and the allowances of the other living."""
        state, others = self._read_state(), 0
        for entry in self._fs.listing(self._writers):
            writer = os.path.basename(entry.path)
            if writer == self.writer:
                continue
            fd = self._fs.open(entry.path, os.O_RDWR)
            try:
                allowance = self._read_allowance(fd)
                if self._is_dead(fd):
                    # All it was allowed may be on the medium. The next scan knows better.
                    state = State(state.used + allowance, state.reported)
                    self._write_state(state)
                    self._sweep(writer)
                    self._fault("writer_died")
                else:
                    others += allowance
            finally:
                self._fs.close(fd)
        return state, others

    def _is_dead(self, fd: int) -> bool:
        try:
            self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _sweep(self, writer: str) -> None:
        """Remove a writer's temporary files and then its own."""
        folder = os.path.join(self.root, "tmp", writer)
        with contextlib.suppress(FileNotFoundError):
            for entry in self._fs.listing(folder):
                self._fs.remove(entry.path)
            self._fs.rmdir(folder)
        self._fs.remove(os.path.join(self._writers, writer))

    def _read_state(self) -> State:
        """The ledger as it is; counted anew where there is none, or a damaged one."""
        fd = self._fs.open(os.path.join(self.root, "usage"), os.O_RDWR | os.O_CREAT)
        try:
            sealed = _read(self._fs, fd, _STATE.size + _CHECKSUM.size)
        finally:
            self._fs.close(fd)
        if _is_whole(sealed, _STATE.size):
            _, used, reported = _STATE.unpack_from(sealed)
            return State(used, reported)
        if sealed:
            self._fault("ledger_damaged")
        return State(sum(entry.bytes for entry in self._fs.tree(self.root)) + FOLDER_BYTES, 0)

    def _write_state(self, state: State) -> None:
        fd = self._fs.open(os.path.join(self.root, "usage"), os.O_RDWR | os.O_CREAT)
        try:
            _write(self._fs, fd, _STATE.pack(_MAGIC, *state))
        finally:
            self._fs.close(fd)

    def _read_allowance(self, fd: int) -> int:
        sealed = _read(self._fs, fd, _ALLOWANCE.size + _CHECKSUM.size)
        if not _is_whole(sealed, _ALLOWANCE.size):
            # Killed before its first word, or damaged: it may have been given this much.
            return min(self.cap_bytes // _SHARE_OF_CAP, _MOST_AT_ONCE_BYTES) if sealed else 0
        return int(_ALLOWANCE.unpack_from(sealed)[1])

    def _write_allowance(self) -> None:
        _write(self._fs, self._own_fd, _ALLOWANCE.pack(_MAGIC, self._free + self._in_flight + self._consumed))


def _read(fs: FileSystem, fd: int, size: int) -> bytes:
    buffer = memoryview(bytearray(size))
    return bytes(buffer[: fs.preadv(fd, [buffer], 0)])


def _write(fs: FileSystem, fd: int, fields: bytes) -> None:
    sealed = fields + _CHECKSUM.pack(checksum64(fields))
    if fs.pwritev(fd, [memoryview(sealed)], 0) != len(sealed):
        raise OSError(5, "short write to the ledger")


def _is_whole(sealed: bytes, size: int) -> bool:
    if len(sealed) != size + _CHECKSUM.size or not sealed.startswith(_MAGIC):
        return False
    return bool(_CHECKSUM.unpack_from(sealed, size)[0] == checksum64(sealed[:size]))
