"""The nvme tier against fio at the same block size and depth on a file of the same size; without fio, raw preadv."""

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
                limit = f"fio {op}" if has_fio else f"raw p{op}v (fio is not installed)"
                theirs = _fio(raw, op, workers) if has_fio else _raw(raw, op, workers, buffers)
                side()  # every block of the slab has been written once before anything is measured
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
    """fio with io_uring where it can, else with threads of preadv: the best that a process can get."""
    engine = "io_uring"
    block = workers.block_bytes // BLOCK * BLOCK or BLOCK

    def turn() -> Turn:
        nonlocal engine
        command = [
            *("fio", "--output-format=json", "--name=limit", f"--filename={raw}", f"--rw={op}", "--direct=1"),
            *(f"--bs={block}", f"--iodepth={workers.depth}", f"--ioengine={engine}", "--time_based"),
            *(f"--runtime={max(1, round(workers.turn_s))}", "--norandommap", "--overwrite=1", "--allow_file_create=0"),
            *(() if engine == "io_uring" else (f"--numjobs={workers.depth}", "--thread", "--group_reporting")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FIO_TIMEOUT_S, check=False)
        if done.returncode != 0 and engine == "io_uring":  # a kernel, or a sandbox, without io_uring
            engine = "psync"
            return turn()
        if done.returncode != 0:
            raise ConfigError(f"fio failed on {raw!r}: {(done.stderr or done.stdout).strip()[:200]}")
        text = done.stdout
        return Turn(float(json.loads(text[text.index("{") :])["jobs"][0][op]["bw_bytes"]))

    return turn


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
