"""How close the dram and nvme tiers come to what the machine can do.

Each figure stands beside its limit, measured in the same run, in turns with it and with warmed buffers: a plain copy of
rows for dram, a loop of O_DIRECT transfers of the same size and as many threads on a file of the same kind for nvme.
The machine may be busy; the ratio of the medians of many short turns is what counts. One JSON object a line.

    python benchmarks/tiers.py [--path DIR] [--rows-mib 1] [--depth 4] [--seconds 4]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from kvtier.codec.checksum import checksum64
from kvtier.tiers.dram import DramTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.protocol import RowId, RowStatus, Tier

TURN_BYTES = 64 << 20
CHUNK_BYTES = 4 << 20


def rows_of(n: int) -> list[RowId]:
    """Identities of a chain of `n` blocks."""
    keys = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(n)]
    return [RowId(key, keys[i - 1] if i else b"", 0) for i, key in enumerate(keys)]


class Turn(NamedTuple):
    """What one turn took. CPU time tells more than wall time on a machine that others use too."""

    bytes_per_s: float
    cpu_s_per_gib: float
    latencies_s: list[float]


class Turns:
    """Runs two ways of moving the same bytes in turns, in chunks shared out over `depth` threads."""

    def __init__(self, n_rows: int, row_bytes: int, depth: int, seconds: float) -> None:
        self.n_rows, self.row_bytes, self.depth, self.seconds = n_rows, row_bytes, depth, seconds
        step = max(1, CHUNK_BYTES // row_bytes)
        self.chunks = [(i, min(n_rows, i + step)) for i in range(0, n_rows, step)]
        self._pool = ThreadPoolExecutor(depth)

    def run(self, move: Callable[[int, int], None]) -> Turn:
        """One turn: all rows, once."""
        latencies: list[float] = []
        lock = threading.Lock()

        def timed(chunk: tuple[int, int]) -> None:
            begin_s = time.perf_counter()
            move(*chunk)
            with lock:
                latencies.append(time.perf_counter() - begin_s)

        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        list(self._pool.map(timed, self.chunks))
        n_bytes = self.n_rows * self.row_bytes
        cpu_s = (time.process_time() - begin_cpu_s) / n_bytes * (1 << 30)
        return Turn(n_bytes / (time.perf_counter() - begin_s), cpu_s, latencies)

    def compare(
        self,
        tier: str,
        op: str,
        limit: str,
        ours: Callable[[], Callable[[int, int], None]],
        theirs: Callable[[int, int], None],
    ) -> None:
        """Print one line: ours against theirs. `ours` prepares a turn and returns what moves a chunk."""
        mine: list[Turn] = []
        bound: list[Turn] = []
        self.run(theirs)
        self.run(ours())
        end_s = time.perf_counter() + self.seconds
        while time.perf_counter() < end_s or len(mine) < 5:
            bound.append(self.run(theirs))
            mine.append(self.run(ours()))
            bound.append(self.run(theirs))
        rate, limit_rate = (statistics.median(t.bytes_per_s for t in turns) for turns in (mine, bound))
        cpu, limit_cpu = (statistics.median(t.cpu_s_per_gib for t in turns) for turns in (mine, bound))
        latencies = [seconds for turn in mine for seconds in turn.latencies_s]
        print(
            json.dumps(
                {
                    "tier": tier,
                    "op": op,
                    "block_bytes": self.row_bytes,
                    "depth": self.depth,
                    "bytes_per_s": round(rate),
                    "limit": limit,
                    "limit_bytes_per_s": round(limit_rate),
                    "ratio": round(rate / limit_rate, 3),
                    "p99_s": round(float(np.quantile(latencies, 0.99)), 6),
                    "cpu_s_per_gib": round(cpu, 4),
                    "limit_cpu_s_per_gib": round(limit_cpu, 4),
                    "turns": len(mine),
                }
            ),
            flush=True,
        )


def aligned(n_rows: int, row_bytes: int) -> tuple[np.ndarray, list[memoryview]]:
    """Page-aligned, touched memory, as one array and as rows."""
    array = np.frombuffer(mmap.mmap(-1, n_rows * row_bytes), dtype=np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, len(array), dtype=np.uint8)
    view = array.data
    return array, [view[i * row_bytes : (i + 1) * row_bytes] for i in range(n_rows)]


def tier_moves(
    tier: Tier, rows: list[RowId], buffers: list[memoryview]
) -> tuple[Callable[[], Callable[[int, int], None]], Callable[[], Callable[[int, int], None]]]:
    """Turns of writes (into fresh slots) and of reads, verified."""
    held: dict[str, np.ndarray] = {}

    def write_turn() -> Callable[[int, int], None]:
        if held:
            tier.release(held["slots"])
        slots = tier.reserve(len(rows))
        assert slots is not None
        held["slots"] = slots

        def move(first: int, end: int) -> None:
            statuses = tier.write(slots[first:end], rows[first:end], buffers[first:end])
            assert statuses == [RowStatus.OK] * (end - first)

        return move

    def read_turn() -> Callable[[int, int], None]:
        slots = held["slots"]

        def move(first: int, end: int) -> None:
            statuses = tier.read(slots[first:end], rows[first:end], buffers[first:end])
            assert statuses == [RowStatus.OK] * (end - first)

        return move

    return write_turn, read_turn


def bench_dram(turns: Turns) -> None:
    """Copies into and out of the dram tier against numpy copies of the same rows."""
    rows = rows_of(turns.n_rows)
    _, buffers = aligned(turns.n_rows, turns.row_bytes)
    target, _ = aligned(turns.n_rows, turns.row_bytes)
    source = np.frombuffer(buffers[0].obj, dtype=np.uint8)

    def copy(first: int, end: int) -> None:
        for i in range(first * turns.row_bytes, end * turns.row_bytes, turns.row_bytes):
            np.copyto(target[i : i + turns.row_bytes], source[i : i + turns.row_bytes])

    for checksums in (False, True):
        tier = DramTier.own(turns.row_bytes, turns.n_rows * (turns.row_bytes + 4096), checksums=checksums)
        tier.wait_ready()
        write_turn, read_turn = tier_moves(tier, rows, buffers)
        label = "copy" if not checksums else "copy, tier with checksums"
        turns.compare("dram", "write", label, write_turn, copy)
        turns.compare("dram", "read", label, read_turn, copy)
        tier.close()


def bench_nvme(turns: Turns, path: str) -> None:
    """The nvme tier against O_DIRECT transfers of whole chunks on a preallocated, fully written file."""
    rows = rows_of(turns.n_rows)
    array, buffers = aligned(turns.n_rows, turns.row_bytes)
    total = len(array)
    with tempfile.TemporaryDirectory(dir=path) as folder:
        fd = os.open(os.path.join(folder, "raw"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, total)
        tier = NvmeTier(folder, b"\1" * 32, "benchmark", turns.row_bytes, 8 * total)
        write_turn, read_turn = tier_moves(tier, rows, buffers)
        for _ in range(2):
            move = write_turn()
            move(0, turns.n_rows)
        scale = turns.row_bytes

        def write(first: int, end: int) -> None:
            assert os.pwrite(fd, array[first * scale : end * scale].data, first * scale) == (end - first) * scale

        def read(first: int, end: int) -> None:
            assert os.preadv(fd, [array[first * scale : end * scale].data], first * scale) == (end - first) * scale

        turns.compare("nvme", "write", "O_DIRECT pwrite", write_turn, write)
        move = write_turn()
        move(0, turns.n_rows)
        turns.compare("nvme", "read", "O_DIRECT preadv", read_turn, read)
        tier.close()
        os.close(fd)


def bench_checksum(turns: Turns) -> None:
    """xxh3 of rows as they lie in memory against copying them."""
    array, buffers = aligned(turns.n_rows, turns.row_bytes)
    target, _ = aligned(turns.n_rows, turns.row_bytes)

    def check(first: int, end: int) -> None:
        for i in range(first, end):
            checksum64(buffers[i])

    def copy(first: int, end: int) -> None:
        scale = turns.row_bytes
        np.copyto(target[first * scale : end * scale], array[first * scale : end * scale])

    turns.compare("checksum", "xxh3", "copy", lambda: check, copy)


def bench_slots(batch: int = 64) -> None:
    """Reserve and release in batches, in seconds a block."""
    row_bytes = 4096
    tier = DramTier.own(row_bytes, 4096 * row_bytes)
    tier.wait_ready()
    best = float("inf")
    for _ in range(20):
        begin_s = time.process_time()
        for _ in range(200):
            slots = tier.reserve(batch)
            assert slots is not None
            tier.release(slots)
        best = min(best, (time.process_time() - begin_s) / (200 * batch))
    print(json.dumps({"tier": "dram", "op": "reserve+release", "batch": batch, "cpu_s_per_block": best}), flush=True)
    tier.close()


def main() -> None:
    """Run all benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--rows-mib", type=float, default=1.0, help="bytes of a row, in MiB")
    parser.add_argument("--depth", type=int, default=4, help="threads")
    parser.add_argument("--seconds", type=float, default=4.0, help="least duration of each comparison")
    options = parser.parse_args()
    row_bytes = int(options.rows_mib * (1 << 20))
    turns = Turns(max(8, TURN_BYTES // row_bytes), row_bytes, options.depth, options.seconds)
    bench_slots()
    bench_checksum(turns)
    bench_dram(turns)
    bench_nvme(turns, options.path)


if __name__ == "__main__":
    main()
