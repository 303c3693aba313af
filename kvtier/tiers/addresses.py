"""Addresses and alignment of buffers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PAGE_BYTES = 4096
_SECTOR_BYTES = 512
_PAGE_ALIGNED_FROM_BYTES = 64 << 10


def address_of(buffer: memoryview | npt.NDArray[np.uint8]) -> int:
    """Where a contiguous buffer starts in memory."""
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def round_up(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def row_stride(row_bytes: int) -> int:
    """Bytes from one row to the next: rows start on a page, small ones on a sector, so that direct I/O can use them."""
    return round_up(row_bytes, _PAGE_BYTES if row_bytes >= _PAGE_ALIGNED_FROM_BYTES else _SECTOR_BYTES)
