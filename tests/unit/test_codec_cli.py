"""`kvtier calibrate` and `kvtier eval codec` from the outside, on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.cli.main import app  # noqa: E402
from kvtier.codec.calibration import load_calibration  # noqa: E402
from kvtier.errors import ConfigError, ModelConfigError  # noqa: E402
from tests.e2e.models import tiny_llama  # noqa: E402

FIELDS = {
    "codec", "ratio", "bits_per_element", "kl_mean", "kl_ci", "top1_agree", "ppl_ratio", "encode_bytes_per_s",
    "decode_bytes_per_s",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of a token a byte and the calibration made from it."""
    path = tmp_path_factory.mktemp("codec-cli")
    (path / "text").write_text("".join(chr(32 + (i * i + i // 7) % 90) for i in range(600)))
    arguments = ["calibrate", str(tiny_llama()), "--text", str(path / "text"), "-o", str(path / "calibration.json")]
    result = CliRunner().invoke(app, [*arguments, "--method", "loo,local,ema"])
    assert result.exit_code == 0, result.output
    assert "d4" in result.output
    assert "written" in result.output
    return path


def test_a_calibration_has_every_source_and_a_gate_for_every_preset(folder: Path) -> None:
    calibration = load_calibration(folder / "calibration.json")
    assert set(calibration.sensitivity) == {"loo", "local", "ema"}
    assert {"int8", "d6", "d4", "d3", "m4", "d4-local"} <= set(calibration.gates)
    assert calibration.gates["d6"].kl_mean < calibration.gates["d4"].kl_mean < calibration.gates["d3"].kl_mean
    assert (calibration.sensitivities("loo") >= 0).all()
    assert calibration.frequency_tables.shape[-1] == 31


def test_the_ledger_prints_one_object_a_line_and_draws(folder: Path) -> None:
    plot = folder / "ledger.png"
    arguments = [
        "eval", "codec", str(tiny_llama()), "--calibration", str(folder / "calibration.json"), "--text",
        str(folder / "text"), "--prefix-tokens", "256", "--positions", "64", "--codec", "raw,int8,d4,cachegen",
        "--map", "loo,uniform", "--json", "--plot", str(plot),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["codec"], row["map"]) for row in rows] == [
        ("raw", ""), ("int8", ""), ("d4", "uniform"), ("d4", "loo"), ("cachegen", ""),
    ]  # fmt: skip
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["kl_ci"][0] <= row["kl_mean"] <= row["kl_ci"][1]
    assert rows[0]["kl_mean"] < 1e-9
    assert rows[3]["kl_gain"] == pytest.approx(rows[3]["kl_mean"] - rows[2]["kl_mean"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_named(folder: Path) -> None:
    short = folder / "short"
    short.write_text("too short")
    runner = CliRunner()
    result = runner.invoke(app, ["calibrate", str(tiny_llama()), "--text", str(short)])
    assert isinstance(result.exception, ConfigError)
    assert "at least" in str(result.exception)
    result = runner.invoke(app, ["eval", "codec", str(tiny_llama()), "--calibration", str(folder / "absent.json")])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize("command", [["calibrate"], ["eval", "codec"]])
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "it must hold a config.json"),
        ("{}", "Unrecognized model"),
        ("not json", "config.json"),
        ('{"model_type": "llama"}', ": "),
    ],
)
def test_no_model_is_one_clear_error(tmp_path: Path, command: list[str], config: str | None, says: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    done = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert isinstance(done.exception, ModelConfigError)
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)
