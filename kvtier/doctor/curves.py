"""Measuring what a medium costs without touching anything that lies on it."""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from kvtier.doctor.findings import CurvePoint
from kvtier.tiers import numa
from kvtier.tiers.addresses import address_of
from kvtier.tiers.cxl.medium import Place

_FILE_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_MEMORY_SIZES = (4 << 10, 64 << 10, 1 << 20, 32 << 20)
_REPEATS = 5


def far_memory(place: Place) -> memoryview | None:
    """32 MiB of the kind a cxl tier at `place` would have; None for a device, of which all memory may hold rows.
    Raises OSError."""
    size = _MEMORY_SIZES[-1]
    if place.is_device:
        return None
    if not place.path:
        view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        numa.bind(address_of(view), size, place.node)
        return view
    fd, _ = _scratch(os.path.dirname(place.path) or ".")
    try:
        os.posix_fallocate(fd, 0, size)
        return memoryview(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def memory_curve(memory: memoryview | None = None) -> list[CurvePoint]:
    """Copies between two buffers, or between one and `memory` (32 MiB, overwritten)."""
    near = np.ones(_MEMORY_SIZES[-1], dtype=np.uint8)
    far = np.ones(len(near), dtype=np.uint8) if memory is None else np.frombuffer(memory, dtype=np.uint8)
    far[:] = 1

    def point(size: int) -> CurvePoint:
        return CurvePoint(
            size,
            _median_s(lambda: np.copyto(near[:size], far[:size])),
            _median_s(lambda: np.copyto(far[:size], near[:size])),
        )

    return [point(size) for size in _MEMORY_SIZES]


def folder_curve(folder: str) -> tuple[list[CurvePoint], bool]:
    """Reads and writes of a nameless file in `folder`, and whether they bypass the page cache. Raises OSError."""
    fd, direct = _scratch(folder)
    buffer = memoryview(mmap.mmap(-1, _FILE_SIZES[-1]))
    buffer[:] = os.urandom(1 << 16) * (len(buffer) >> 16)
    try:
        points = []
        for size in _FILE_SIZES:
            part = buffer[:size]
            write_s = _median_s(lambda part=part: _whole(os.pwritev(fd, [part], 0), part))  # type: ignore[misc]
            read_s = _median_s(lambda part=part: _whole(os.preadv(fd, [part], 0), part))  # type: ignore[misc]
            points.append(CurvePoint(size, read_s, write_s))
        return points, direct
    finally:
        os.close(fd)


def _whole(moved: int, part: memoryview) -> None:
    if moved != part.nbytes:
        raise OSError(errno.EIO, f"short transfer of {moved} bytes")


def _scratch(folder: str) -> tuple[int, bool]:
    """A file without a name: it is gone with this process, whatever happens to it."""
    for flags, direct in ((os.O_DIRECT, True), (0, False)):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600), direct
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # a file system without nameless files
        return os.dup(file.fileno()), False


def _median_s(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)
