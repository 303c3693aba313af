"""Direct I/O on one file: aligned, vectored, complete or an error.

Everything the nvme tier asks of the operating system goes through `Syscalls`, so that a test can make any single step
fail without patching globals. All calls block and release the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtier.tiers.addresses import round_up

BLOCK = 4096
"""File offsets and lengths are multiples of this: it suits devices with 512-byte and with 4-KiB sectors."""

_SECTOR = 512

IOV_MAX = int(os.sysconf("SC_IOV_MAX"))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Syscalls:
    """The operating system as the nvme tier sees it. Every method raises OSError as the kernel says."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Real fallocate: glibc's posix_fallocate would write every block where the file system cannot."""
        if _libc.fallocate(fd, 0, offset, length) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)


class DirectFile:
    """One open file for block-aligned vectored transfers.

    With O_DIRECT where the file system takes it; otherwise buffered, dropping what was read or written from the page
    cache. `memory_align` is the alignment asked of buffers (1 when buffered). Thread-safe for disjoint ranges.
    """

    def __init__(self, path: str, syscalls: Syscalls, *, direct: bool = True) -> None:
        self.path = path
        self._sys = syscalls
        flags = os.O_RDWR | os.O_CREAT
        self.direct = direct
        if direct:
            try:
                self.fd = syscalls.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        if not self.direct:
            self.fd = syscalls.open(path, flags)
        self.memory_align = BLOCK if self.direct else 1

    def find_memory_align(self) -> None:
        """Lower `memory_align` to a sector if the device takes buffers aligned that loosely. Needs a first block."""
        if not self.direct:
            return
        page = mmap.mmap(-1, 2 * BLOCK)
        try:
            if self._sys.preadv(self.fd, [memoryview(page)[_SECTOR : _SECTOR + BLOCK]], 0) == BLOCK:
                self.memory_align = _SECTOR
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def read_block(self, offset: int) -> bytes:
        """The block at `offset`, cut off where the file ends. Raises OSError."""
        block, done = memoryview(mmap.mmap(-1, BLOCK)), 0
        while done < BLOCK:
            moved = self._sys.preadv(self.fd, [block[done:]], offset + done)
            if moved <= 0:
                break
            done += moved
        return bytes(block[:done])

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` from `offset` on. Raises OSError (EIO where the file ends too early)."""
        self._transfer(self._sys.preadv, offset, buffers)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` at `offset`. Raises OSError; what was written until then is undefined."""
        self._transfer(self._sys.pwritev, offset, buffers)

    def _transfer(
        self, call: Callable[[int, Sequence[memoryview], int], int], offset: int, buffers: Sequence[memoryview]
    ) -> None:
        start, total = offset, sum(b.nbytes for b in buffers)
        pending = list(buffers)
        while pending:
            moved = call(self.fd, pending[:IOV_MAX], offset)
            if moved <= 0 or (self.direct and moved % _SECTOR):
                raise OSError(errno.EIO, f"short transfer of {moved} bytes at {offset}", self.path)
            offset += moved
            pending = _drop(pending, moved)
        if not self.direct:
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(self.fd, start, total, os.POSIX_FADV_DONTNEED)


def _drop(buffers: list[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of `buffers` after their first `n_bytes` were transferred."""
    for i, buffer in enumerate(buffers):
        if n_bytes < buffer.nbytes:
            return [buffer[n_bytes:], *buffers[i + 1 :]] if n_bytes else buffers[i:]
        n_bytes -= buffer.nbytes
    return []


class BouncePool:
    """Aligned scratch buffers of one size, made on demand and kept: as many as threads needed at once."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = round_up(buffer_bytes, BLOCK)
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """A page-aligned buffer of `buffer_bytes`, contents undefined."""
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, self.buffer_bytes))
        try:
            yield buffer
        finally:
            with self._lock:
                self._idle.append(buffer)
