"""Host memory for rows: one mapping with huge pages, near its device, populated in the background."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tiers import numa
from kvtier.tiers.addresses import address_of, round_up, row_stride
from kvtier.tiers.populate import CHUNK_BYTES, FIRST_CHUNK_BYTES, Population

_PAGE = mmap.PAGESIZE


class HostSlab:
    """`n_rows` rows of `row_stride(row_bytes)` within `cap_bytes` of memory.

    Anonymous memory with huge pages where the kernel has them, or the shared file `shared_path` (made afresh, removed
    by `close`), for workers in other processes. Fresh pages come from `numa_nodes`, if any are named. Raises
    ConfigError if the cap holds no row or the machine lacks memory.
    """

    def __init__(
        self,
        row_bytes: int,
        cap_bytes: int,
        *,
        shared_path: str | None = None,
        numa_nodes: Sequence[int] = (),
        chunk_bytes: int = CHUNK_BYTES,
        first_chunk_bytes: int = FIRST_CHUNK_BYTES,
    ) -> None:
        self.stride_bytes = row_stride(row_bytes)
        self.n_rows = cap_bytes // self.stride_bytes
        if self.n_rows < 1:
            raise ConfigError(
                f"dram_bytes is {cap_bytes}, less than one row of {self.stride_bytes} bytes; raise it, or set it to 0"
            )
        self._bytes = round_up(self.n_rows * self.stride_bytes, _PAGE)
        self._path = shared_path
        self._fd = -1
        self._map = self._map_anonymous() if shared_path is None else self._map_shared(shared_path)
        self.view = memoryview(self._map)[: self.n_rows * self.stride_bytes]
        self._numa_nodes = tuple(numa_nodes)
        self._population = Population(
            self.view,
            self.stride_bytes,
            self.n_rows,
            fd=self._fd,
            chunk_bytes=chunk_bytes,
            first_chunk_bytes=first_chunk_bytes,
        )

    def populate(self, ready: Callable[[int, int], None], failed: Callable[[str], None]) -> None:
        """Start population (see `Population`). Memory that cannot be placed is counted, and used where it is."""
        if self._numa_nodes:
            try:
                numa.prefer(address_of(self.view), self.view.nbytes, self._numa_nodes)
            except OSError:
                failed("numa_not_bound")
        self._population.start(ready, failed)

    def wait_populated(self, timeout_s: float | None = None) -> bool:
        """Wait until population has ended; False if it has not by then."""
        return self._population.wait(timeout_s)

    def close(self) -> None:
        """Stop populating and let go of the memory: it goes back once no view of a row is left. Idempotent."""
        self._population.stop()
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
