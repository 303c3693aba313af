"""`kvtier replay` and `kvtier analyze` as a user meets them: output, exit codes, messages."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtier.cli.main import main
from kvtier.sim.experiment import Capacity, parse_capacities

KEYS = [
    "trace",
    "policy",
    "capacity_blocks",
    "seed",
    "requests",
    "blocks",
    "hit_blocks",
    "hit_rate",
    "gap_share",
    "evicted_blocks",
    "policy_us_per_request",
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvtier(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; returns exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty chats of one system prompt, one request a second each, round robin."""
    path = tmp_path / "chats.jsonl"
    lines = [
        {"timestamp": 1000 * (20 * turn + chat), "input_length": 512 * (turn + 2), "output_length": 1, "hash_ids": ids}
        for turn in range(8)
        for chat in range(20)
        for ids in [[0, *(1 + chat * 100 + block for block in range(turn + 1))]]
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_lines_have_exactly_the_documented_keys(kvtier: Run, trace: Path) -> None:
    code, out, err = kvtier(
        *("replay", trace, "--policy", "lru,arc,s3fifo,lfu,ema,belady", "--capacity", "40,50%", "--json")
    )
    assert (code, err) == (0, "")
    found = rows(out)
    assert [list(row) for row in found] == [KEYS] * 12
    assert [(row["policy"], row["capacity_blocks"]) for row in found] == [
        (policy, capacity) for capacity in (40, 80) for policy in ("lru", "arc", "s3fifo", "lfu", "ema", "belady")
    ]
    for row in found:
        assert (row["trace"], row["seed"], row["requests"], row["blocks"]) == ("chats.jsonl", 1, 160, 880)
        assert row["hit_rate"] == row["hit_blocks"] / 880
        assert row["policy_us_per_request"] > 0


def test_gap_share_is_measured_against_lru_and_belady_asked_for_or_not(kvtier: Run, trace: Path) -> None:
    _, out, _ = kvtier("replay", trace, "--policy", "lru,s3fifo,belady", "--capacity", "40", "--json")
    lru, s3fifo, belady = rows(out)
    assert (lru["gap_share"], belady["gap_share"]) == (0.0, 1.0)
    expected = (s3fifo["hit_rate"] - lru["hit_rate"]) / (belady["hit_rate"] - lru["hit_rate"])
    assert s3fifo["gap_share"] == pytest.approx(expected)
    _, out, _ = kvtier("replay", trace, "--policy", "s3fifo", "--capacity", "40", "--json")
    (alone,) = rows(out)
    assert alone["gap_share"] == s3fifo["gap_share"]


def test_gap_share_is_null_where_there_is_nothing_to_close(kvtier: Run, trace: Path) -> None:
    _, out, _ = kvtier("replay", trace, "--policy", "lru,belady", "--capacity", "100000", "--json")
    assert [row["gap_share"] for row in rows(out)] == [None, None]


def test_production_policies_replay_too(kvtier: Run, trace: Path) -> None:
    code, out, _ = kvtier("replay", trace, "--policy", "kvtier", "--capacity", "40", "--json")
    assert code == 0
    assert rows(out)[0]["policy"] == "kvtier"


def test_a_row_for_every_seed(kvtier: Run, trace: Path) -> None:
    arguments = ("--policy", "lru", "--seed", "1,2", "--json")
    _, out, _ = kvtier("replay", "workload:agent?sessions=6", "--capacity", "100", *arguments)
    first, second = rows(out)
    assert (first["seed"], second["seed"]) == (1, 2)
    assert first["hit_blocks"] != second["hit_blocks"]
    _, out, _ = kvtier("replay", trace, "--capacity", "40", *arguments)
    first, second = rows(out)
    assert first["hit_blocks"] == second["hit_blocks"]  # recorded times do not depend on the seed


def test_several_traces_and_equal_capacities_once(kvtier: Run, trace: Path) -> None:
    _, out, _ = kvtier(
        *("replay", trace, "workload:chat?sessions=9", "--policy", "lru", "--capacity", "40,25%,40", "--json")
    )
    assert [row["trace"] for row in rows(out)] == ["chats.jsonl", *["workload:chat?sessions=9"] * 2]


def test_block_tokens(kvtier: Run, trace: Path) -> None:
    _, out, _ = kvtier("replay", trace, "--policy", "lru", "--capacity", "9", "--block-tokens", "1024", "--json")
    assert rows(out)[0]["blocks"] == sum((turn + 2) // 2 for turn in range(8)) * 20


def test_a_table_for_people(kvtier: Run, trace: Path) -> None:
    code, out, err = kvtier("replay", trace, "--policy", "lru,belady", "--capacity", "40")
    assert (code, err) == (0, "")
    for word in ("chats.jsonl", "belady", "hit %", "100.0"):
        assert word in out


def test_a_plot(kvtier: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plot.png"
    code, _, _ = kvtier(
        *("replay", trace, "--policy", "lru,belady", "--capacity", "20,40", "--seed", "1,2", "--plot", target)
    )
    assert code == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_any_work(
    kvtier: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *rest: Any, **named: Any) -> ModuleType:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    code, out, err = kvtier("replay", tmp_path / "missing", "--policy", "lru", "--plot", tmp_path / "p.png")
    assert (code, out) == (2, "")
    assert err == "kvtier: --plot needs matplotlib: pip install 'kvtier[plot]'\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "lru,clock"), "no policy named 'clock'"),
        (("--policy", ","), "no policy given"),
        (("--capacity", "many"), "capacity 'many'"),
        (("--capacity", "0"), "capacity '0'"),
        (("--capacity", "0%"), "capacity '0%'"),
        (("--capacity", "-5"), "capacity '-5'"),
        (("--seed", "x"), "seed 'x'"),
        (("--format", "csv"), "no trace format 'csv'"),
        (("--block-tokens", "100"), "multiple"),
        (("--plot", "/no/such/folder/p.png"), "is no folder"),
        (("--plot", "/"), "it is a folder"),
        (("--load", "2"), "--hints and --load are of a whole node"),
        (("--hints", "lead_s=3"), "--hints and --load are of a whole node"),
        (("--tiers", "hbm=240GiB,dram=1TiB", "--policy", "lru"), "--policy and --capacity are not of a whole node"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    kvtier: Run, trace: Path, arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = kvtier("replay", trace, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("command", ["replay", "analyze"])
def test_wrong_traces_are_one_line_and_exit_code_2(kvtier: Run, tmp_path: Path, command: str) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [1]}\n{"timestamp": 1}\n')
    code, out, err = kvtier(command, broken)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvtier: {broken}:2: ")
    code, _, err = kvtier(command, tmp_path / "missing")
    assert code == 2
    assert "No such file" in err
    code, _, err = kvtier(command, "workload:unheard")
    assert code == 2
    assert "no workload 'unheard'" in err


def test_capacities() -> None:
    assert parse_capacities("256, 5%,0.5%") == [
        Capacity(blocks=256),
        Capacity(footprint_share=0.05),
        Capacity(footprint_share=0.005),
    ]
    assert [each.resolve(1000) for each in parse_capacities("256,5%,0.01%")] == [256, 50, 1]


def test_analyze_json(kvtier: Run, trace: Path) -> None:
    code, out, err = kvtier("analyze", trace, "--tiers", "hbm=40,dram=400", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["requests"], found["conversations"], found["unique_blocks"]) == (160, 20, 161)
    assert found["conversations_inferred"] is True
    assert [tier["tier"] for tier in found["tiers"]] == ["hbm", "dram"]
    assert [target["share"] for target in found["lru_targets"]] == [0.3, 0.6, 0.9]


def test_analyze_tables(kvtier: Run) -> None:
    code, out, _ = kvtier("analyze", "workload:agent?sessions=5", "--tiers", "hbm=1GiB", "--block-bytes", 2**24)
    assert code == 0
    for word in ("tool_use", "stop reason", "conversations", "what each tier adds", "most reused runs"):
        assert word in out


def test_analyze_wrong_tiers(kvtier: Run, trace: Path) -> None:
    code, _, err = kvtier("analyze", trace, "--tiers", "hbm=1GiB")
    assert code == 2
    assert "--block-bytes" in err
