"""Buffers a codec thread keeps between calls: fresh ones of this size would come page by page from the kernel."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

_ALIGN_BYTES = 4096  # direct I/O takes the buffers as they are


class Scratch(threading.local):
    """Named buffers of the calling thread. A buffer's content is good until the same thread asks for the name again."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def bytes_of(self, name: str, n_bytes: int) -> npt.NDArray[np.uint8]:
        """`n_bytes` writable bytes, page-aligned, content undefined."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < n_bytes:
            whole = np.empty(n_bytes + _ALIGN_BYTES, dtype=np.uint8)
            start = -whole.__array_interface__["data"][0] % _ALIGN_BYTES
            buffer = self._buffers[name] = whole[start : start + n_bytes]
        return buffer[:n_bytes]
