"""Host memory for rows: one mapping, populated in the background so that nobody waits for first touches.

Touching fresh memory costs 0.2 to 1 s a GiB, far more than using it. `HostSlab` maps everything at once, populates a
small first chunk before it returns and the rest in a thread, and hands chunks over as they become ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

_MADV_POPULATE_WRITE = 23
_PAGE = mmap.PAGESIZE
_FIRST_CHUNK_BYTES = 32 << 20
_CHUNK_BYTES = 256 << 20
_SECTOR = 512
_PAGE_ALIGNED_FROM_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(buffer: memoryview | npt.NDArray[np.uint8]) -> int:
    """Where a contiguous buffer starts in memory."""
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def round_up(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def row_stride(row_bytes: int) -> int:
    """Bytes from one row to the next: rows start on a page, small ones on a sector, so that direct I/O can use them."""
    return round_up(row_bytes, _PAGE if row_bytes >= _PAGE_ALIGNED_FROM_BYTES else _SECTOR)


class HostSlab:
    """`n_rows` rows of `row_stride(row_bytes)` within `cap_bytes` of memory.

    Anonymous memory with huge pages where the kernel has them, or the shared file `shared_path` (made afresh, removed
    by `close`), for workers in other processes. Raises ConfigError if the cap holds no row or the machine lacks memory.
    """

    def __init__(
        self,
        row_bytes: int,
        cap_bytes: int,
        *,
        shared_path: str | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        first_chunk_bytes: int = _FIRST_CHUNK_BYTES,
    ) -> None:
        self.stride_bytes = row_stride(row_bytes)
        self.n_rows = cap_bytes // self.stride_bytes
        if self.n_rows < 1:
            raise ConfigError(
                f"dram_bytes is {cap_bytes}, less than one row of {self.stride_bytes} bytes; raise it, or set it to 0"
            )
        self._bytes = round_up(self.n_rows * self.stride_bytes, _PAGE)
        self._chunk_rows = max(1, chunk_bytes // self.stride_bytes)
        self._first_rows = min(self.n_rows, max(1, first_chunk_bytes // self.stride_bytes))
        self._path = shared_path
        self._fd = -1
        self._map = self._map_anonymous() if shared_path is None else self._map_shared(shared_path)
        self.view = memoryview(self._map)[: self.n_rows * self.stride_bytes]
        self._base = address_of(self.view)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def populate(self, ready: Callable[[int, int], None], failed: Callable[[str], None]) -> None:
        """Populate the first chunk now and the rest in a thread; call `ready(first_row, end_row)` for each chunk.

        If memory runs out, `failed` is told once and what is ready is all there will be.
        """
        if not self._populate_chunk(0, self._first_rows, ready, failed) or self._first_rows == self.n_rows:
            return

        def rest() -> None:
            for first in range(self._first_rows, self.n_rows, self._chunk_rows):
                end = min(self.n_rows, first + self._chunk_rows)
                if self._stop.is_set() or not self._populate_chunk(first, end, ready, failed):
                    return

        self._thread = threading.Thread(target=rest, name="kvtier-populate", daemon=True)
        self._thread.start()

    def wait_populated(self, timeout_s: float | None = None) -> bool:
        """Wait until population has ended; False if it has not by then."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Stop populating and let go of the memory: it goes back once no view of a row is left. Idempotent."""
        self._stop.set()
        self.wait_populated()
        self.view = memoryview(b"")
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path or "")

    def _map_anonymous(self) -> mmap.mmap:
        available = available_memory_bytes()
        if self._bytes > available:
            raise ConfigError(
                f"dram_bytes asks for {self._bytes} but {available} bytes of memory are available; "
                f"set dram_bytes to {available // (1 << 20)}MiB at most"
            )
        mapping = mmap.mmap(-1, self._bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def _map_shared(self, path: str) -> mmap.mmap:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # left by a killed process; whoever still maps it keeps the old file
            state = os.statvfs(os.path.dirname(path) or ".")
            available = state.f_bavail * state.f_frsize
            if self._bytes > available:
                raise ConfigError(
                    f"dram_bytes asks for {self._bytes} but {os.path.dirname(path)!r} has room for {available}; "
                    f"lower dram_bytes, or enlarge it (a container: --shm-size)"
                )
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, self._bytes)
            return mmap.mmap(self._fd, self._bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ConfigError(f"shared memory file {path!r} cannot be made: {error.strerror}") from error

    def _populate_chunk(
        self, first: int, end: int, ready: Callable[[int, int], None], failed: Callable[[str], None]
    ) -> bool:
        start = self._base + first * self.stride_bytes
        aligned = start // _PAGE * _PAGE
        length = round_up(self._base + end * self.stride_bytes, _PAGE) - aligned
        code = 0
        if _libc.madvise(aligned, length, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel before 5.14
                code = self._touch(first * self.stride_bytes, end * self.stride_bytes)
        if code:
            failed(f"populate_{errno.errorcode.get(code, str(code)).lower()}")
            return False
        ready(first, end)
        return True

    def _touch(self, start: int, end: int) -> int:
        """Populate by writing to every page; a shared file is given its space first, or a full one would be SIGBUS."""
        if self._fd >= 0:
            try:
                os.posix_fallocate(self._fd, start, end - start)
            except OSError as error:
                return error.errno or errno.EIO
        np.frombuffer(self.view, dtype=np.uint8)[start:end:_PAGE] = 0
        return 0


def available_memory_bytes(root: str = "/") -> int:
    """Memory this process may still use: what the kernel reports as available, within its cgroup's limit."""
    base = Path(root)
    available = 1 << 62
    for line in (base / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        limit = int((base / "sys/fs/cgroup/memory.max").read_text())
        current = int((base / "sys/fs/cgroup/memory.current").read_text())
        available = min(available, max(0, limit - current))
    return available
