"""The nvme tier against fio, and against raw preadv in threads, at the same block size and depth on a file as large.

Both, because either can be the slower limit: on the virtual drive of the development machine fio reads at less than
half the rate of preadv into memory with huge pages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from kvtier.bench.rows import Bytes, Moves, warm_rows
from kvtier.bench.turns import Line, Side, Turn, Workers, compare
from kvtier.errors import ConfigError
from kvtier.tiers.addresses import row_stride
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme.format import Geometry
from kvtier.tiers.nvme.io import BLOCK

_FIO_TIMEOUT_S = 120


def bench_nvme(path: str, block_bytes: int, depth: int, rounds: int, turn_s: float, total_bytes: int) -> Iterator[Line]:
    """Lines for reads and writes of one block a call, `depth` calls at a time. Raises ConfigError for a path that
    cannot be used. Everything made under `path` is removed again."""
    n = max(2 * depth, total_bytes // block_bytes)
    workers = Workers(n, block_bytes, depth, 1, turn_s)
    buffers = warm_rows(n, block_bytes)
    try:
        scratch = tempfile.TemporaryDirectory(dir=path, prefix="kvtier-bench-")
    except OSError as error:
        raise ConfigError(f"--path {path!r} cannot be used ({error.strerror}); name a folder on the drive") from error
    with scratch as folder:
        raw = os.path.join(folder, "raw")
        _fill(raw, buffers)
        cap = n * (Geometry.of(block_bytes).slot_bytes + 1024) + (64 << 20)
        tier = NvmeTier(folder, b"\1" * 32, "benchmark", block_bytes, cap)
        try:
            moves = Moves(tier, buffers, workers)
            has_fio = shutil.which("fio") is not None
            for op, ours in (("write", moves.writing), ("read", moves.reading)):
                side = ours()
                side()  # every block of the slab has been written once before anything is measured
                limits = [(f"raw p{op}v", _raw(raw, op, workers, buffers))]
                if has_fio:
                    limits.insert(0, (f"fio {op}", _fio(raw, op, workers)))
                for limit, theirs in limits:
                    yield compare("nvme", op, block_bytes, depth, limit, (side, theirs), rounds)
        finally:
            tier.close()
            workers.close()


def _fill(raw: str, buffers: list[Bytes]) -> None:
    """A file as large as the rows, written once."""
    with open(raw, "wb") as file:
        for row in buffers:
            file.write(row.data)
            file.write(bytes(row_stride(len(row)) - len(row)))
        file.flush()
        os.fsync(file.fileno())


def _fio(raw: str, op: str, workers: Workers) -> Side:
    """fio with whichever of io_uring and threads is faster here: the first turn, which does not count, finds out."""
    engine = ""

    def turn() -> Turn:
        nonlocal engine
        if not engine:
            engine = max(("io_uring", "psync"), key=lambda each: _fio_rate(raw, op, workers, each))
        return Turn(_fio_rate(raw, op, workers, engine))

    return turn


def _fio_rate(raw: str, op: str, workers: Workers, engine: str) -> float:
    """Bytes a second; 0 for io_uring where the kernel or a sandbox refuses it. Raises ConfigError."""
    block = workers.block_bytes // BLOCK * BLOCK or BLOCK
    share = os.path.getsize(raw) // workers.depth // block * block
    command = [
        *("fio", "--output-format=json", "--name=limit", f"--filename={raw}", f"--rw={op}", "--direct=1"),
        *(f"--bs={block}", f"--ioengine={engine}", f"--runtime={max(1, round(workers.turn_s))}", "--time_based"),
        *("--overwrite=1", "--allow_file_create=0", "--thread", "--group_reporting"),
    ]
    if engine == "io_uring":
        command.append(f"--iodepth={workers.depth}")
    else:  # each thread in a part of the file of its own
        command += [f"--numjobs={workers.depth}", f"--size={share}", f"--offset_increment={share}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FIO_TIMEOUT_S, check=False)
    if done.returncode != 0 and engine == "io_uring":
        return 0.0
    if done.returncode != 0:
        raise ConfigError(f"fio failed on {raw!r}: {(done.stderr or done.stdout).strip()[:200]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][op]["bw_bytes"])


def _raw(raw: str, op: str, workers: Workers, buffers: list[Bytes]) -> Side:
    """`depth` threads of one direct preadv or pwritev a block."""
    try:
        fd = os.open(raw, os.O_RDWR | os.O_DIRECT)
    except OSError:  # a file system without direct I/O
        fd = os.open(raw, os.O_RDWR)
    stride = row_stride(workers.block_bytes)
    size = workers.block_bytes // BLOCK * BLOCK or BLOCK
    call = os.preadv if op == "read" else os.pwritev

    def move(first: int, end: int) -> None:
        for i in range(first, end):
            call(fd, [buffers[i].data[:size]], i * stride)

    return workers.side(move)
