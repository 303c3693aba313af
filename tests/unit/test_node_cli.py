"""`kvtier replay` of a whole node as a user meets it: rows, sizes, messages; and hardware points as files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.sim.node.hardware import hardware_names, load_hardware

KEYS = [
    "trace",
    "variant",
    "hardware",
    "seed",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "ratio_to_native",
    "hit_share",
    "bytes",
    "speculative_used_share",
    "nvme_written_bytes",
    "usd_per_mtok",
]
WORKLOAD = "workload:agent?sessions=15&hours=0.05"
TEMPLATE = Path(__file__).resolve().parents[2] / "kvtier/sim/node/hardware/template.toml"

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


def test_a_row_for_each_variant_and_seed(kvtier: Run) -> None:
    tiers = "hbm=40GiB,dram=60GiB,nvme=1TiB"
    names = ["native", "kvtier", "kvtier+hints", "engine", "none"]
    code, out, err = kvtier(
        "replay",
        WORKLOAD,
        "--tiers",
        tiers,
        "--hardware",
        "A6",
        "--variant",
        ",".join(names),
        "--seed",
        "1,2",
        "--json",
    )
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["seed"], row["variant"]) for row in rows] == [(seed, name) for seed in (1, 2) for name in names]
    for row in rows:
        assert list(row) == KEYS
        assert list(row["hit_share"]) == ["hbm", "dram", "nvme", "miss"]
        assert sum(row["hit_share"].values()) == pytest.approx(1.0)
        assert list(row["bytes"]) == ["h2d", "d2h", "nvme_read", "nvme_write"]
        assert row["nvme_written_bytes"] == row["bytes"]["nvme_write"]
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
        assert row["usd_per_mtok"] > 0
        assert (row["ratio_to_native"] == 1.0) or row["variant"] != "native"
        assert (row["speculative_used_share"] is not None) == (row["variant"] == "kvtier+hints")
    none = next(row for row in rows if row["variant"] == "none")
    assert none["hit_share"]["miss"] == 1.0
    assert not any(none["bytes"].values())


def test_a_table_and_a_plot(kvtier: Run, tmp_path: Path) -> None:
    plot = tmp_path / "ttft.png"
    code, out, _ = kvtier("replay", WORKLOAD, "--variant", "native,kvtier", "--plot", plot)
    assert code == 0
    assert "kvtier" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_hints_are_said_can_be_set(kvtier: Run) -> None:
    said = "lead_s=2,missing=0.3,false_share=0.2,mistimed=0.5,tools_only=false"
    code, out, _ = kvtier("replay", WORKLOAD, "--variant", "kvtier+hints", "--hints", said, "--load", "2", "--json")
    assert code == 0
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "H100"], "no hardware 'H100'"),
        (["--variant", "magic"], "no variant named 'magic'"),
        (["--tiers", "hbm=1TiB,pool=1TiB"], "no others"),
        (["--tiers", "hbm=1TiB,nvme=1TiB"], "below it dram"),
        (["--tiers", "hbm=1KiB"], "no room for one block"),
        (["--variant", "kvtier", "--hints", "lead=3"], "lead_s"),
        (["--variant", "kvtier", "--hints", "missing=1.5"], "missing"),
        (["--tiers", "hbm=3"], "no request fits"),
    ],
)
def test_one_clear_error(kvtier: Run, arguments: list[str], message: str) -> None:
    code, out, err = kvtier("replay", WORKLOAD, "--json", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_hardware_points_come_with_kvtier_and_from_files(tmp_path: Path) -> None:
    assert hardware_names() == ["A25", "A25-attention", "A6", "B25", "B6"]
    assert all(load_hardware(name).name == name for name in hardware_names())
    mine = tmp_path / "mine.toml"
    mine.write_text(TEMPLATE.read_text())
    assert load_hardware(str(mine)).name == "mine"
    mine.write_text(TEMPLATE.read_text().replace("gpus = 8", "gpus = 0"))
    with pytest.raises(ConfigError, match="gpus"):
        load_hardware(str(mine))
    mine.write_text("name = ")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        load_hardware(str(mine))


def test_late_tokens_are_dearer_where_attention_counts() -> None:
    flat, steep = load_hardware("A25").compute, load_hardware("A25-attention").compute
    assert flat.prefill_s(0, 512) == flat.prefill_s(100_000, 100_512) == pytest.approx(0.0256)
    assert steep.prefill_s(0, 512) == pytest.approx(0.0256, rel=0.01)
    halves = steep.prefill_s(0, 50_000) + steep.prefill_s(50_000, 100_000)
    assert steep.prefill_s(0, 100_000) == pytest.approx(halves)
    assert steep.prefill_s(53_000, 53_001) == pytest.approx(2 / 20_000, rel=0.01)
