"""What the shared tiers cost beside what they stand on: the pool beside Mooncake's own client, shared_fs beside files.

    python -m benchmarks.shared_tiers [--json]

One JSON object a line: `{"tier", "op", "block_bytes", "rows", "bytes_per_s", "limit", "limit_bytes_per_s", "ratio"}`.
Both sides of a ratio are measured in turns in one process, batch by batch, on warmed buffers; the figure is the median
batch.
The pool runs on loopback over TCP: a master, two owners and this process on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtier.testing.rows import chain_rows
from kvtier.tiers.addresses import address_of
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import MooncakeClient, PoolOptions
from kvtier.tiers.protocol import RowStatus
from kvtier.tiers.shared_fs import SharedFsTier
from tests.pool_rig import MIB, running_pool

ROWS = 8
ROUNDS = 15
Line = dict[str, str | int | float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--path", default="", help="folder for shared_fs (default: a temporary one)")
    options = parser.parse_args()
    for row_bytes in (MIB // 4, MIB, 4 * MIB):
        for line in (*pool_lines(row_bytes), *file_lines(row_bytes, options.path)):
            print(json.dumps(line), flush=True)


def pool_lines(row_bytes: int) -> Iterator[Line]:
    """The tier and the bare client put and get batches of the same size, in turns."""
    with running_pool(2, 1024 * MIB, "-default_kv_lease_ttl=500") as pool:
        tier = PoolTier(PoolOptions(master=pool.address, host="127.0.0.1"), os.urandom(32), "bench", row_bytes)
        client = tier._client
        assert isinstance(client, MooncakeClient)
        buffers = _buffers(row_bytes)
        pointers, sizes = [[address_of(buffer)] for buffer in buffers], [[row_bytes]] * ROWS
        times: dict[str, list[float]] = {"tier put": [], "tier get": [], "client put": [], "client get": []}
        for round_ in range(ROUNDS):
            rows, names = chain_rows(ROWS, round_), [f"bare-{round_}-{i}" for i in range(ROWS)]
            slots = tier.reserve(ROWS)
            assert slots is not None
            _timed(times["tier put"], lambda s=slots, r=rows: _all_ok(tier.write(s, r, buffers)))
            _timed(times["client put"], lambda n=names: client.put(n, pointers, sizes) == [0] * ROWS)
            _timed(times["tier get"], lambda s=slots, r=rows: _all_ok(tier.read(s, r, buffers)))
            _timed(times["client get"], lambda n=names: client.get(n, pointers, sizes) == [row_bytes] * ROWS)
            for name in (*names, *(tier._seal.name(row) for row in rows)):
                client.remove(name)
        for op, verb in (("write", "put"), ("read", "get")):
            yield _line("pool", op, row_bytes, times[f"tier {verb}"], "mooncake client", times[f"client {verb}"])
        tier.close()


def file_lines(row_bytes: int, path: str) -> Iterator[Line]:
    """The tier, and files of the same size written (synced) and read with the same flags by hand."""
    with tempfile.TemporaryDirectory(dir=path or None) as folder:
        tier = SharedFsTier(folder, b"\1" * 32, "bench", row_bytes, 4096 * MIB)
        buffers = _buffers(row_bytes)
        times: dict[str, list[float]] = {"tier w": [], "tier r": [], "files w": [], "files r": [], "exists": []}
        for round_ in range(ROUNDS):
            rows, slots = chain_rows(ROWS, round_), tier.reserve(ROWS)
            assert slots is not None
            paths = [Path(folder) / f"bare-{round_}-{i}" for i in range(ROWS)]
            _timed(times["tier w"], lambda s=slots, r=rows: _all_ok(tier.write(s, r, buffers)))
            _timed(times["files w"], lambda p=paths: _write_files(p, buffers))
            _timed(times["tier r"], lambda s=slots, r=rows: _all_ok(tier.read(s, r, buffers)))
            _timed(times["files r"], lambda p=paths: _read_files(p, buffers))
            _timed(times["exists"], lambda r=rows: all(tier.exists(r)))
        yield _line("shared_fs", "write", row_bytes, times["tier w"], "files", times["files w"])
        yield _line("shared_fs", "read", row_bytes, times["tier r"], "files", times["files r"])
        yield {
            "tier": "shared_fs",
            "op": "exists",
            "block_bytes": row_bytes,
            "rows": ROWS,
            "seconds_per_row": statistics.median(times["exists"]) / ROWS,
        }
        tier.close()


def _buffers(row_bytes: int) -> list[memoryview]:
    memory = np.random.default_rng(0).integers(0, 256, (ROWS, row_bytes + 4096), np.uint8)
    views = []
    for row in memory:
        start = -address_of(row) % 4096
        views.append(memoryview(row)[start : start + row_bytes])
    return views


def _timed(times: list[float], action: Callable[[], bool]) -> None:
    begin_s = time.perf_counter()
    if not action():
        raise SystemExit("a transfer failed: these figures would be worth nothing")
    times.append(time.perf_counter() - begin_s)


def _all_ok(statuses: list[RowStatus]) -> bool:
    return all(status is RowStatus.OK for status in statuses)


def _write_files(paths: list[Path], buffers: list[memoryview]) -> bool:
    for path, buffer in zip(paths, buffers, strict=True):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        ok = os.write(fd, buffer) == buffer.nbytes
        os.fdatasync(fd)
        os.close(fd)
        if not ok:
            return False
    return True


def _read_files(paths: list[Path], buffers: list[memoryview]) -> bool:
    for path, buffer in zip(paths, buffers, strict=True):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        ok = os.readv(fd, [buffer]) == buffer.nbytes
        os.close(fd)
        if not ok:
            return False
    return True


def _line(tier: str, op: str, row_bytes: int, mine: list[float], limit: str, theirs: list[float]) -> Line:
    rate, bound = (ROWS * row_bytes / statistics.median(times[2:]) for times in (mine, theirs))
    return {
        "tier": tier,
        "op": op,
        "block_bytes": row_bytes,
        "rows": ROWS,
        "bytes_per_s": round(rate),
        "limit": limit,
        "limit_bytes_per_s": round(bound),
        "ratio": round(rate / bound, 3),
    }


if __name__ == "__main__":
    main()
