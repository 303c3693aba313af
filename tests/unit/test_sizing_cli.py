"""`kvtier size`: what is printed, from where a model may come, and one-line errors with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main as cli
from kvtier.cli.size import parse_bytes
from kvtier.errors import ConfigError
from kvtier.model.catalogue import catalogue
from kvtier.model.sizing import paper

KEYS = [
    "model", "attention", "layers", "bytes_per_token", "bytes_per_token_per_rank", "bytes_per_sequence",
    "bytes_per_block", "state_bytes_per_sequence", "max_tokens", "max_batch", "logical_bytes", "physical_bytes",
    "per_rank_bytes", "notes",
]  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8}  # fmt: skip
GIB = 1 << 30


class Ran:
    """The outcome of one call of the command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def kvtier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvtier", "size", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return Ran(int(caught.value.code or 0), out, err)

    return run


def _write(path: Path, content: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_json_has_the_documented_keys_in_order(kvtier: Any) -> None:
    ran = kvtier("deepseek-v3", "--json")
    assert ran.code == 0
    assert list(ran.objects[0]) == KEYS
    assert ran.objects[0]["max_tokens"] is None
    assert ran.objects[0]["bytes_per_token"] == 70_272


def test_a_folder_a_file_and_a_catalogue_name_agree(kvtier: Any, tmp_path: Path) -> None:
    folder = tmp_path / "Llama-copy"
    _write(folder / "config.json", LLAMA)
    single = _write(tmp_path / "other-name.json", LLAMA)
    ran = kvtier(str(folder), str(folder / "config.json"), single, "META-LLAMA/llama-3.1-8b", "llama-3.1-8b", "--json")
    names = [found.pop("model") for found in ran.objects]
    assert names == ["Llama-copy", "Llama-copy", "other-name", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"]
    assert len({found["bytes_per_sequence"] for found in ran.objects}) == 1


def test_three_figures_that_differ(kvtier: Any) -> None:
    """int8 scales and block rounding separate physical from logical; eight heads on 16 ranks separate per-rank."""
    (found,) = kvtier("llama-3.1-8b", "--kv-dtype", "int8", "--tp", "16", "--seq-len", "1000", "--json").objects
    assert found["logical_bytes"] == 32 * 8 * 2 * 128 * 1000
    assert found["bytes_per_sequence"] == 32 * 8 * 2 * 132 * 1000
    assert found["physical_bytes"] == 32 * 8 * 2 * 132 * 1008
    assert found["per_rank_bytes"] == 32 * 1 * 2 * 132 * 1008
    assert found["bytes_per_block"] == 16 * found["bytes_per_token"]


def test_budget_is_per_rank_and_in_whole_blocks(kvtier: Any) -> None:
    (one,) = kvtier("llama-3.1-8b", "--budget", "60GiB", "--seq-len", "8192", "--json").objects
    assert (one["max_batch"], one["max_tokens"]) == (60, 60 * 8192)
    (two,) = kvtier("llama-3.1-8b", "--budget", "60GiB", "--seq-len", "8192", "--tp", "2", "--json").objects
    assert (two["max_batch"], two["max_tokens"]) == (120, 120 * 8192)


def test_dp_attention_multiplies_sequences_where_tp_replicates(kvtier: Any) -> None:
    arguments = ["deepseek-v3", "--tp", "8", "--budget", "60GiB", "--json"]
    (tp,), (dp,) = kvtier(*arguments).objects, kvtier(*arguments, "--dp-attention").objects
    assert tp["per_rank_bytes"] == dp["per_rank_bytes"] == 70_272 * 32_768
    assert (tp["max_batch"], dp["max_batch"]) == (27, 8 * 27)


def test_pipeline_stages_take_their_own_layers(kvtier: Any) -> None:
    (found,) = kvtier("llama-3.1-405b", "--pp", "4", "--json").objects
    assert found["bytes_per_token"] == 516_096
    assert found["bytes_per_token_per_rank"] == 32 * 4096  # 126 layers: 31, 32, 32, 31


def test_a_bounded_model_has_no_longest_sequence(kvtier: Any) -> None:
    (found,) = kvtier("mistral-7b-v0.1", "--budget", "60GiB", "--json").objects
    assert found["max_tokens"] is None
    assert found["max_batch"] == 60 * GIB // (4096 // 16 + 1) // (32 * 4096 * 16)


def test_several_models_make_one_table_with_whole_figures(kvtier: Any) -> None:
    ran = kvtier("qwen3-235b-a22b", "gpt-oss-120b", "kimi-k3", "--budget", "60GiB")
    assert ran.code == 0
    for name, token in (("Qwen/Qwen3-235B-A22B", "192,512"), ("openai/gpt-oss-120b", "36,864")):
        (row,) = [line for line in ran.out.splitlines() if name in line and token in line]
        assert "…" not in row
    assert "moonshotai/Kimi-K3: " in ran.out


def test_one_model_prints_its_figures_and_notes(kvtier: Any) -> None:
    ran = kvtier("qwen3-next-80b-a3b-instruct", "--budget", "60GiB")
    assert "24,576" in ran.out
    assert "77,266,944" in ran.out
    assert "as much as the KV of 3144 tokens" in " ".join(ran.out.split())


def test_mtp_source_length_and_state_type_are_options(kvtier: Any, tmp_path: Path) -> None:
    (found,) = kvtier("deepseek-v3", "--mtp", "--json").objects
    assert found["bytes_per_token"] == 71_424
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 64, "d_kv": 8, "num_heads": 8, "num_layers": 1}
    arguments = [_write(tmp_path / "t5.json", t5), "--seq-len", "16", "--json"]
    assert kvtier(*arguments, "--source-len", "4").objects[0]["logical_bytes"] == 64 * 4 * (16 + 4)
    (half,) = kvtier("mamba-2.8b-hf", "--state-dtype", "bfloat16", "--json").objects
    assert half["state_bytes_per_sequence"] == 64 * 5120 * (3 + 16) * 2


# --- errors: one line, the field's or option's name, exit code 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"num_hidden_layers": 32,', "line 1"),
        ("", "not valid JSON"),
        ("[1, 2]", "JSON object"),
        ("null", "JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers"),
        ({key: value for key, value in LLAMA.items() if key != "num_attention_heads"}, "num_attention_heads"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**LLAMA, "head_dim": 0}, "head_dim"),
        ('{"num_hidden_layers": NaN}', "num_hidden_layers"),
        ({"text_config": [1]}, "text_config"),
        ({"text_config": {**LLAMA, "num_hidden_layers": "32"}}, "text_config.num_hidden_layers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_config_is_one_line_and_exit_code_2(kvtier: Any, tmp_path: Path, content: Any, word: str) -> None:
    ran = kvtier(_write(tmp_path / "model.json", content))
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert word in ran.err
    assert "model.json" in ran.err


def test_text_that_is_not_utf8_is_refused(kvtier: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "\xff\xfe"}')
    ran = kvtier(str(path))
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "MODEL"),
        (["no-such-model"], "no-such-model"),
        (["qwen3-7b"], "Qwen/Qwen3-8B"),  # a near miss is suggested
        (["/no/such/config.json"], "no such file"),
        (["llama-3.1-8b", "--tp", "3"], "tp = 3"),
        (["llama-3.1-8b", "--tp", "0"], "tp"),
        (["llama-3.1-8b", "--pp", "33"], "pp = 33"),
        (["llama-3.1-8b", "--block-size", "0"], "block-size"),
        (["llama-3.1-8b", "--seq-len", "0"], "seq-len"),
        (["llama-3.1-8b", "--kv-dtype", "int3"], "int3"),
        (["llama-3.1-8b", "--budget", "60 apples"], "budget"),
        (["llama-3.1-8b", "--budget", "-1GiB"], "budget"),
        (["llama-3.1-8b", "--budget", "0"], "budget"),
        (["qwen3-next-80b-a3b-instruct", "--state-dtype", "float7"], "state_dtype"),
        (["whisper-large-v3", "--source-len", "-4"], "source_tokens"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(kvtier: Any, arguments: list[str], word: str) -> None:
    ran = kvtier(*arguments)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert word in ran.err


def test_an_empty_folder_is_named(kvtier: Any, tmp_path: Path) -> None:
    ran = kvtier(str(tmp_path))
    assert ran.code == 2
    assert str(tmp_path / "config.json") in ran.err


@pytest.mark.parametrize(
    ("text", "amount"),
    [("60GiB", 60 * GIB), ("80GB", 80 * 10**9), ("1.5 GiB", 3 * GIB // 2), ("1024", 1024), ("512kib", 512 << 10)],
)
def test_bytes_are_read_with_decimal_and_binary_units(text: str, amount: int) -> None:
    assert parse_bytes(text, "budget") == amount


@pytest.mark.parametrize("text", ["", "GiB", "1e9", "60G", "nan", "1 2GiB", "9999999TiB"])
def test_other_text_is_not_bytes(text: str) -> None:
    with pytest.raises(ConfigError, match="budget"):
        parse_bytes(text, "budget")


# --- the paper's table


def test_all_eight_printed_batch_sizes_follow_from_one_constant_and_one_slip() -> None:
    rows = paper.paper_rows(catalogue())
    for row in rows:
        assert {int(row.mha_exact), round(row.mha_exact)} & set(row.printed_mha)
        assert row.mha_batch in row.printed_mha
        assert row.aware_batch == row.printed_aware
    assert [row.mha_exact for row in rows] == [14.66, 22.35, 42.57, 22.35]
    assert [row.per_rank_batch for row in rows] == [104, 178, 255, 178]


def test_the_constant_is_narrow() -> None:
    """60 GB over 8,192 tokens is the same quotient; 29 GB or 31 GB over 4,096 misses printed values."""
    assert paper.RANK_BUDGET_BYTES / paper.SEQUENCE_TOKENS == 60 * 10**9 / 8192
    rows = paper.paper_rows(catalogue())
    for other in (29, 31):
        off = other / 30
        assert any(int(row.mha_exact * off) not in row.printed_mha for row in rows)


def test_paper_option_prints_the_table_and_json(kvtier: Any) -> None:
    ran = kvtier("--paper")
    assert ran.code == 0
    for value in ("14/15", "14.66", "104", "42.57", "255", "178"):
        assert value in ran.out
    assert [found["model"] for found in kvtier("--paper", "--json").objects] == [row.name for row in paper.PAPER_MODELS]


def test_the_command_is_installed_and_needs_no_engine() -> None:
    """In a process of its own: neither torch nor an engine is imported to size a model."""
    code = (
        "import sys; from kvtier.cli.main import app; "
        "app(['size', 'deepseek-v3', '--json'], standalone_mode=False); "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_per_token"] == 70_272
