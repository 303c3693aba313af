"""The dram and cxl tiers against memcpy of the same blocks by the same number of threads, and what checksums cost."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.bench.rows import Bytes, Moves, warm_rows
from kvtier.bench.turns import Line, Side, Workers, compare
from kvtier.errors import ConfigError
from kvtier.tiers.addresses import address_of, row_stride
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.cxl.format import REGION_ALIGN_BYTES
from kvtier.tiers.cxl.medium import find_place
from kvtier.tiers.dram import DramTier

_CALL_BYTES = 16 << 20  # what the mover hands a tier at most, by default


def bench_memory(
    block_bytes: int, depth: int, rounds: int, turn_s: float, total_bytes: int, cxl: str
) -> Iterator[Line]:
    """Lines for dram and cxl, copies and checksums. `cxl` is what `cxl_path` would say; empty: a file in /dev/shm."""
    n = max(8, total_bytes // block_bytes)
    workers = Workers(n, block_bytes, depth, max(1, _CALL_BYTES // block_bytes), turn_s)
    ordinary, other = warm_rows(n, block_bytes), warm_rows(n, block_bytes)

    def against(tier: str, op: str, limit: str, ours: Side, theirs: Side) -> Line:
        return compare(tier, op, block_bytes, depth, limit, (ours, theirs), rounds)

    with _dram(block_bytes, n, checksums=False) as plain:
        moves = Moves(plain, ordinary, workers)
        yield against("dram", "write", "memcpy", moves.writing(), _memcpy(workers, other, ordinary))
        yield against("dram", "read", "memcpy", moves.reading(), _memcpy(workers, ordinary, other))
        with _dram(block_bytes, n, checksums=True) as checked:
            verified = Moves(checked, ordinary, workers)
            label = "copy without checksum"
            yield against("checksum", "write", label, verified.writing(), moves.writing())
            yield against("checksum", "read", label, verified.reading(), moves.reading())
    del other
    with _cxl(block_bytes, n, cxl) as (tier, memory):
        there = warm_rows(n, block_bytes, memory)
        moves = Moves(tier, ordinary, workers)
        yield against("cxl", "write", "memcpy into such memory", moves.writing(), _memcpy(workers, there, ordinary))
        yield against("cxl", "read", "memcpy out of such memory", moves.reading(), _memcpy(workers, ordinary, there))
        del there
    workers.close()


def _memcpy(workers: Workers, targets: list[Bytes], sources: list[Bytes]) -> Side:
    """libc's memcpy, block by block, without the GIL and without kvtier."""
    to, of = [address_of(row) for row in targets], [address_of(row) for row in sources]
    size = workers.block_bytes
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    libc.memcpy.restype = ctypes.c_void_p

    def move(first: int, end: int) -> None:
        for i in range(first, end):
            libc.memcpy(to[i], of[i], size)

    return workers.side(move)


@contextmanager
def _dram(row_bytes: int, n: int, *, checksums: bool) -> Iterator[DramTier]:
    tier = DramTier.own(row_bytes, n * row_stride(row_bytes), checksums=checksums)
    try:
        tier.wait_ready()
        yield tier
    finally:
        tier.close()


@contextmanager
def _cxl(row_bytes: int, n: int, path: str) -> Iterator[tuple[CxlTier, mmap.mmap]]:
    """A cxl tier of its own, and as much memory of the same kind to copy to and from without it.

    On a device the second mapping would hold the tier's rows: there the limit is memcpy to shared memory.
    """
    cap = n * (row_stride(row_bytes) + 128) + (n * row_bytes >> 5) + 3 * REGION_ALIGN_BYTES
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shm, prefix="kvtier-bench-") as folder, contextlib.ExitStack() as stack:
        given = bool(path) and (find_place(path).is_device or find_place(path).node >= 0)
        if path and not given:
            raise ConfigError(f"--cxl {path!r} is neither a devdax device nor node:N; leave it out for a stand-in")
        chosen = path if given else os.path.join(folder, "cxl")
        tier = CxlTier(chosen, b"\1" * 32, "benchmark", row_bytes, cap)
        stack.callback(tier.close)
        tier.wait_ready()
        fd = os.open(os.path.join(folder, "raw"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        stack.callback(os.close, fd)
        os.ftruncate(fd, n * row_stride(row_bytes))
        yield tier, mmap.mmap(fd, n * row_stride(row_bytes))
