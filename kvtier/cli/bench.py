"""`kvtier bench tiers`: how close each tier comes to what its medium can do on this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvtier.bench.control import bench_control, index_bytes_per_block
from kvtier.bench.disk import bench_nvme
from kvtier.bench.hardware import hardware_file
from kvtier.bench.memory import bench_memory
from kvtier.bench.pool import bench_pool
from kvtier.bench.turns import Line, usable_cpus
from kvtier.cli.progress import StepProgress
from kvtier.config import parse_bytes
from kvtier.errors import ConfigError

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

_TARGETS = {"dram": 0.9, "cxl": 0.9, "nvme": 0.8, "pool": 0.9, "checksum": 0.95, "index": 1.0}
_STEPS = {"control": 3, "memory": 6, "nvme": 4}


@app.callback()
def bench() -> None:
    """Measure this machine."""


@app.command()
def tiers(
    path: Annotated[str, typer.Option(help="A folder on the drive to measure.")] = tempfile.gettempdir(),
    cxl: Annotated[str, typer.Option(help="A devdax device or node:N; empty: a file in /dev/shm stands in.")] = "",
    pool: Annotated[str, typer.Option(help="HOST:PORT of a mooncake_master; empty: the pool is not measured.")] = "",
    block: Annotated[str, typer.Option(help="Bytes of a block.")] = "1MiB",
    depth: Annotated[int, typer.Option(min=1, max=64, help="Calls in flight on the drive.")] = 8,
    threads: Annotated[int, typer.Option(min=0, max=64, help="Threads that copy; 0: one a CPU, two at most.")] = 0,
    rounds: Annotated[int, typer.Option(min=3, max=99, help="Rounds of each comparison; medians are printed.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, max=60, help="Least duration of one side of a round.")] = 1.0,
    total: Annotated[str, typer.Option(help="Bytes moved by one turn; more than the CPU's caches hold.")] = "128MiB",
    only: Annotated[str, typer.Option(help="Some of control,memory,nvme.")] = "control,memory,nvme",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write a hardware file for `kvtier replay --hardware`.")] = None,
) -> None:
    """Print each tier's rate beside the limit of its medium, measured in the same run and in turns with it."""
    block_bytes, total_bytes = parse_bytes("--block", block), parse_bytes("--total", total)
    parts = [part.strip() for part in only.split(",")]
    if unknown := set(parts) - set(_STEPS):
        raise ConfigError(f"--only names {', '.join(sorted(unknown))}; choose from {', '.join(_STEPS)}")
    if not 512 <= block_bytes <= total_bytes:
        raise ConfigError(f"--block is {block_bytes}; it must be between 512 bytes and --total ({total_bytes})")
    if out is not None:
        _check_out(out, parts)
    copiers = threads or min(2, usable_cpus())

    def lines() -> Iterator[Line]:
        if "control" in parts:
            yield from bench_control(block_bytes, rounds)
        if "memory" in parts:
            # Copies need no second to settle: many short turns pair better on a machine that does other things too.
            yield from bench_memory(block_bytes, copiers, 5 * rounds, seconds / 10, total_bytes, cxl)
        if "nvme" in parts:
            if shutil.which("fio") is None:
                typer.echo("fio is not installed: the limit of nvme is raw preadv (apt install fio)", err=True)
            yield from bench_nvme(path, block_bytes, depth, rounds, seconds, total_bytes)

        if pool:
            yield from bench_pool(pool, block_bytes, 5 * rounds)

    steps = 2 * bool(pool) + sum(_STEPS[part] for part in parts)
    found: list[Line] = []
    with StepProgress() as progress:
        for line in lines():
            found.append(line)
            progress(f"{line.tier} {line.op}", len(found), steps)
            if as_json:
                typer.echo(msgspec.json.encode(line).decode())
    index_bytes = index_bytes_per_block() if "control" in parts else None
    if as_json and index_bytes is not None:
        typer.echo(msgspec.json.encode({"tier": "index", "op": "bytes_per_block", "bytes": round(index_bytes, 1)}))
    if not as_json:
        _print_table(found, index_bytes)
    if out is not None:
        out.write_text(hardware_file(found, out.stem))


def _check_out(out: Path, parts: list[str]) -> None:
    """Raise ConfigError before minutes of measuring rather than after them."""
    if lacking := {"memory", "nvme"} - set(parts):
        raise ConfigError(f"a hardware file needs memory and nvme; add {', '.join(sorted(lacking))} to --only")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {str(out)!r} cannot be written: name a file in a folder that exists")


def _print_table(lines: list[Line], index_bytes: float | None) -> None:
    table = Table("tier", "op", "block", "depth", "GB/s", "limit", "GB/s", "ratio", "target", "p99 ms")
    for line in lines:
        target = _TARGETS[line.tier] if line.op != "reserve+release" else 1.0
        table.add_row(
            line.tier,
            line.op,
            str(line.block_bytes),
            str(line.depth),
            f"{line.bytes_per_s / 1e9:.2f}",
            line.limit,
            f"{line.limit_bytes_per_s / 1e9:.2f}",
            f"{line.ratio:.3f}",
            f"{'' if line.ratio >= target else 'missed '}{target}",
            f"{line.p99_s * 1e3:.3f}",
        )
    Console().print(table)
    if index_bytes is not None:
        typer.echo(f"The index takes {index_bytes:.0f} bytes a block, in chains of 512.")
