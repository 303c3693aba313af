"""First touches in the background: rows of a mapping become usable chunk by chunk, and nobody waits for the rest.

Touching fresh memory costs 0.2 to 1 s a GiB, far more than using it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from kvtier.tiers.addresses import address_of, round_up

_MADV_POPULATE_WRITE = 23
_PAGE = mmap.PAGESIZE
FIRST_CHUNK_BYTES = 32 << 20
CHUNK_BYTES = 256 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Population:
    """Populates `n_rows` rows of `stride_bytes` in `view`, a mapping of the file `fd` (-1: of anonymous memory).

    What the memory holds already stays. A `device` has all of its memory: there, a kernel that cannot populate the
    mapping beforehand leaves first touches to first use.
    """

    def __init__(
        self,
        view: memoryview,
        stride_bytes: int,
        n_rows: int,
        *,
        fd: int = -1,
        device: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        first_chunk_bytes: int = FIRST_CHUNK_BYTES,
    ) -> None:
        self._view = view
        self._base = address_of(view)
        self._stride = stride_bytes
        self._n_rows = n_rows
        self._fd = fd
        self._device = device
        self._chunk_rows = max(1, chunk_bytes // stride_bytes)
        self._first_rows = min(n_rows, max(1, first_chunk_bytes // stride_bytes))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, ready: Callable[[int, int], None], failed: Callable[[str], None]) -> None:
        """Populate the first chunk now and the rest in a thread; call `ready(first_row, end_row)` for each chunk.

        If memory runs out, `failed` is told once and what is ready is all there will be.
        """
        if not self._populate_chunk(0, self._first_rows, ready, failed) or self._first_rows == self._n_rows:
            return

        def rest() -> None:
            for first in range(self._first_rows, self._n_rows, self._chunk_rows):
                end = min(self._n_rows, first + self._chunk_rows)
                if self._stop.is_set() or not self._populate_chunk(first, end, ready, failed):
                    return

        self._thread = threading.Thread(target=rest, name="kvtier-populate", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until population has ended; False if it has not by then."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        """End after the chunk under way, and let go of the view. Idempotent."""
        self._stop.set()
        self.wait()
        self._view = memoryview(b"")

    def _populate_chunk(
        self, first: int, end: int, ready: Callable[[int, int], None], failed: Callable[[str], None]
    ) -> bool:
        start = self._base + first * self._stride
        aligned = start // _PAGE * _PAGE
        length = round_up(self._base + end * self._stride, _PAGE) - aligned
        code = 0
        if _libc.madvise(aligned, length, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel before 5.14, or a mapping of a device's own pages
                code = 0 if self._device else self._touch(first * self._stride, end * self._stride)
        if code:
            failed(f"populate_{errno.errorcode.get(code, str(code)).lower()}")
            return False
        ready(first, end)
        return True

    def _touch(self, start: int, end: int) -> int:
        """Populate by writing to every page; a file is given its space first, or a full one would be SIGBUS."""
        if self._fd >= 0:
            try:
                os.posix_fallocate(self._fd, start, end - start)
            except OSError as error:
                return error.errno or errno.EIO
        np.frombuffer(self._view, dtype=np.uint8)[start:end:_PAGE] |= 0
        return 0
