"""`kvtier bench tiers`: its form, its arithmetic, and the promises about decisions that it measures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.bench.control import LOOKUP_KEYS, index_bytes_per_block, prefix_lookup
from kvtier.bench.hardware import hardware_file
from kvtier.bench.turns import Line, Turn, Workers, compare
from kvtier.cli.main import app
from kvtier.errors import ConfigError
from kvtier.sim.node.hardware import load_hardware
from tests.pool_rig import needs_mooncake, running_pool

KEYS = {"tier", "op", "block_bytes", "depth", "bytes_per_s", "limit", "limit_bytes_per_s", "ratio", "p99_s"}
SMALL = ["--block", "64KiB", "--total", "4MiB", "--seconds", "0.05", "--rounds", "3", "--depth", "2"]


def test_one_json_object_a_line_and_nothing_left_behind(tmp_path: Path) -> None:
    out = tmp_path / "measured.toml"
    drive = tmp_path / "drive"
    drive.mkdir()
    done = CliRunner().invoke(app, ["bench", "tiers", "--json", "--path", str(drive), *SMALL, "--out", str(out)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    *measured, index = lines
    assert all(set(line) == KEYS for line in measured)
    assert [(line["tier"], line["op"]) for line in measured] == [
        ("dram", "reserve+release"),
        ("index", "lookup"),
        *((tier, op) for tier in ("dram", "checksum", "cxl") for op in ("write", "read")),
        *(("nvme", op) for op in ("write", "read") for _ in range(2 if shutil.which("fio") else 1)),
    ]
    assert all(line["bytes_per_s"] > 0 and line["limit_bytes_per_s"] > 0 and line["ratio"] > 0 for line in measured)
    assert all(line["block_bytes"] == 65536 and line["p99_s"] > 0 for line in measured[2:])
    assert index["bytes"] > 32
    assert list(drive.iterdir()) == []
    point = load_hardware(str(out))
    assert point.links.nvme_read.bytes_per_s == measured[-1]["bytes_per_s"]
    assert point.links.d2h.bytes_per_s == measured[2]["bytes_per_s"]


@needs_mooncake
def test_a_running_pool_is_measured_beside_its_own_client() -> None:
    with running_pool(2, 256 << 20) as pool:
        done = CliRunner().invoke(
            app, ["bench", "tiers", "--json", *SMALL, "--only", "control", "--pool", pool.address]
        )
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tier":"pool"')]
    assert [(line["op"], line["limit"]) for line in lines] == [
        ("write", "mooncake client"),
        ("read", "mooncake client"),
    ]
    assert all(set(line) == KEYS and line["ratio"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "gpu"], "--only names gpu; choose from control, memory, nvme"),
        (["--block", "1"], "--block is 1; it must be between 512 bytes and --total"),
        (["--path", "/no/such/folder", "--only", "nvme"], "--path '/no/such/folder' cannot be used"),
        (["--only", "control", "--out", "/tmp/never-written"], "a hardware file needs memory and nvme"),
        (["--cxl", "/no/such/file", "--only", "memory"], "is neither a devdax device nor node:N"),
        (["--out", "/no/such/folder/x.toml"], "--out '/no/such/folder/x.toml' cannot be written"),
    ],
)
def test_what_cannot_be_measured_says_what_to_change(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["bench", "tiers", *SMALL, *arguments])
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)


def _rates(*rates: float) -> Iterator[Turn]:
    return (Turn(rate, [1 / rate]) for rate in rates)


def test_ratios_are_of_one_round_and_the_first_of_each_side_is_not_counted() -> None:
    ours, theirs = _rates(9e9, 10, 30, 80), _rates(1, 10, 60, 100)
    line = compare("dram", "write", 64, 2, "memcpy", (lambda: next(ours), lambda: next(theirs)), 3)
    assert (line.bytes_per_s, line.limit_bytes_per_s, line.ratio) == (30, 60, 0.8)
    assert line.p99_s == pytest.approx(0.1, rel=0.02)


def test_every_block_is_moved_once_a_pass_by_as_many_threads_as_asked() -> None:
    workers = Workers(10, 100, 3, 4, 0.02)
    seen: list[tuple[int, int]] = []

    def move(first: int, end: int) -> None:
        seen.append((first, end))
        time.sleep(0.005)

    prepared: list[int] = []
    turn = workers.side(move, lambda: prepared.append(1))()
    workers.close()
    assert sorted(set(seen)) == [(0, 4), (4, 8), (8, 10)]
    assert all(seen.count(call) == len(prepared) for call in seen)
    assert len(turn.call_s) == len(seen)
    assert 1000 / 0.015 < turn.bytes_per_s < 1000 / 0.005


def test_a_hardware_file_says_what_was_measured() -> None:
    def line(tier: str, op: str, rate: int) -> Line:
        return Line(
            tier=tier, op=op, block_bytes=1, depth=1, bytes_per_s=rate, limit="", limit_bytes_per_s=1, ratio=1, p99_s=0
        )

    lines = [line(t, op, r) for t, op, r in (("dram", "read", 5), ("dram", "write", 4), ("nvme", "read", 3))]
    with pytest.raises(ConfigError):
        hardware_file(lines, "mine")
    told = tomllib.loads(hardware_file([*lines, line("nvme", "write", 2)], "mine"))
    links = told["links"]
    assert told["name"] == "mine"
    assert {name: link["bytes_per_s"] for name, link in links.items()} == {
        "h2d": 5,
        "d2h": 4,
        "nvme_read": 3,
        "nvme_write": 2,
    }


def test_a_lookup_of_8192_keys_takes_a_millisecond_at_most() -> None:
    lookup = prefix_lookup(LOOKUP_KEYS)
    best = float("inf")
    for _ in range(50):
        begin_s = time.process_time()
        lookup()
        best = min(best, time.process_time() - begin_s)
    assert best <= 1e-3


# Strict seccomp: the kernel kills the thread at any system call but read, write and exit.
NO_CALLS = """
import ctypes, gc, os
from kvtier.bench.control import LOOKUP_KEYS, prefix_lookup
lookup = prefix_lookup(LOOKUP_KEYS)
for _ in range(20):
    lookup()
gc.disable()
if ctypes.CDLL(None).prctl(22, 1, 0, 0, 0) != 0:
    os.write(1, b"none")
    os._exit(0)
os.write(1, b"in")
%s
os.write(1, b"out")
while True:
    pass
"""


@pytest.mark.parametrize(("step", "says"), [("lookup()", b"inout"), ("os.getppid()", b"in")])
def test_a_lookup_makes_no_system_call(step: str, says: bytes) -> None:
    """The second case shows that the trap works."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # threads would outlive the one that is killed
    command = [sys.executable, "-c", NO_CALLS % step]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        heard = os.read(process.stdout.fileno(), 5)
        if heard == b"none":
            pytest.skip("this kernel has no strict seccomp")
        while len(heard) < len(b"inout") and (more := os.read(process.stdout.fileno(), 5)):
            heard += more
        process.kill()
    assert heard == says


def test_the_index_takes_well_under_a_hundred_bytes_a_block() -> None:
    assert 32 < index_bytes_per_block() < 100
