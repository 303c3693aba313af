"""Published models, to the byte. Every figure is worked out here from the architecture, not by the code under test."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from kvtier.model.catalogue import catalogue
from kvtier.model.sizing import Deployment, Ledger, kv_format, size_model, spec_from_config


class Golden(msgspec.Struct, frozen=True):
    """Expected figures in bf16, one copy: per token, and a sequence of 8,192 and of 131,072 tokens with its states."""

    token: int
    at_8k: int
    at_128k: int
    state: int = 0
    attention: str = ""


def _uniform(token: int, attention: str) -> Golden:
    return Golden(token, token * 8192, token * 131_072, 0, attention)


def _bounded(full_layers: int, row: int, other_layers: int, other_row: int, bound: int, attention: str) -> Golden:
    """`full_layers` keep every token at `row` bytes, `other_layers` at most `bound` tokens at `other_row` bytes."""
    grow = full_layers * row
    at = {s: grow * s + other_layers * other_row * min(s, bound) for s in (8192, 131_072)}
    return Golden(grow or other_layers * other_row, at[8192], at[131_072], 0, attention)


def _hybrid(token: int, layers: int, layer_state: int, attention: str) -> Golden:
    state = layers * layer_state
    return Golden(token, token * 8192 + state, token * 131_072 + state, state, attention)


KV = 2 * 2  # K and V, two bytes each

GOLDEN: dict[str, Golden] = {
    # uniform attention: layers x KV heads x width x 4
    "meta-llama/Llama-2-7b-hf": _uniform(32 * 32 * 128 * KV, "mha"),
    "meta-llama/Llama-3.1-8B": _uniform(131_072, "gqa"),
    "meta-llama/Llama-3.1-70B": _uniform(327_680, "gqa"),
    "meta-llama/Llama-3.1-405B": _uniform(516_096, "gqa"),
    "mistralai/Mixtral-8x7B-v0.1": _uniform(131_072, "gqa"),
    "mistralai/Mixtral-8x22B-v0.1": _uniform(229_376, "gqa"),
    "Qwen/Qwen2.5-72B": _uniform(327_680, "gqa"),
    "Qwen/Qwen3-0.6B": _uniform(114_688, "gqa"),
    "Qwen/Qwen3-8B": _uniform(147_456, "gqa"),
    "Qwen/Qwen3-32B": _uniform(262_144, "gqa"),
    "Qwen/Qwen3-30B-A3B": _uniform(98_304, "gqa"),
    "Qwen/Qwen3-235B-A22B": _uniform(192_512, "gqa"),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _uniform(253_952, "gqa"),
    "zai-org/GLM-4.7": _uniform(376_832, "gqa"),
    "MiniMaxAI/MiniMax-M2.5": _uniform(253_952, "gqa"),
    "tiiuae/falcon-7b": _uniform(32 * 1 * 64 * KV, "mqa"),
    "tiiuae/falcon-40b": _uniform(60 * 8 * 64 * KV, "gqa"),
    "openai-community/gpt2": _uniform(12 * 768 * KV, "mha"),
    "bigscience/bloom": _uniform(70 * 14_336 * KV, "mha"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _uniform(30 * 3 * 64 * KV, "gqa"),
    # latent attention: layers x (512 + 64) x 2, and 132 bytes of index keys
    "deepseek-ai/DeepSeek-V3": _uniform(70_272, "mla"),
    "deepseek-ai/DeepSeek-R1": _uniform(70_272, "mla"),
    "deepseek-ai/DeepSeek-V2-Lite": _uniform(27 * 1152, "mla"),
    "moonshotai/Kimi-K2-Instruct": _uniform(70_272, "mla"),
    "deepseek-ai/DeepSeek-V3.2": _uniform(78_324, "mla+indexer"),
    "zai-org/GLM-5": _uniform(100_152, "mla+indexer"),
    # sliding windows and chunks
    "openai/gpt-oss-120b": _bounded(18, 2048, 18, 2048, 128, "gqa+sliding"),
    "openai/gpt-oss-20b": _bounded(12, 2048, 12, 2048, 128, "gqa+sliding"),
    "google/gemma-2-9b": _bounded(21, 8 * 256 * KV, 21, 8 * 256 * KV, 4096, "gqa+sliding"),
    "google/gemma-3-27b-it": _bounded(10, 8192, 52, 8192, 1024, "gqa+sliding"),
    "google/gemma-4-26B-A4B": _bounded(5, 2 * 512 * KV, 25, 8 * 256 * KV, 1024, "gqa+sliding"),
    "CohereLabs/c4ai-command-r7b-12-2024": _bounded(8, 4096, 24, 4096, 4096, "gqa+sliding"),
    "XiaomiMiMo/MiMo-V2-Flash": _bounded(9, 4 * (192 + 128) * 2, 39, 8 * (192 + 128) * 2, 128, "gqa+sliding"),
    "mistralai/Mistral-7B-v0.1": _bounded(0, 0, 32, 4096, 4096, "gqa+sliding"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _bounded(12, 4096, 36, 4096, 8192, "gqa+chunked"),
    # recurrent and hybrid: a convolution of 3 columns in 2 bytes, and a matrix per head in 4 bytes
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _hybrid(24_576, 36, 8192 * 3 * 2 + 32 * 128 * 128 * 4, "gqa+gdn"),
    "Qwen/Qwen3.5-27B": _hybrid(65_536, 48, 10_240 * 3 * 2 + 48 * 128 * 128 * 4, "gqa+gdn"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _hybrid(
        6_144, 23, (64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4, "gqa+mamba2"
    ),
    "moonshotai/Kimi-K3": _hybrid(27_648, 69, 3 * 96 * 128 * 3 * 2 + 96 * 128 * 128 * 4, "mla+kda"),
    "ai21labs/Jamba-v0.1": _hybrid(4 * 4096, 28, 8192 * 3 * 2 + 8192 * 16 * 4, "gqa+mamba1"),
    "state-spaces/mamba-2.8b-hf": _hybrid(0, 64, 5120 * 3 * 2 + 5120 * 16 * 4, "mamba1"),
    "mistralai/Mamba-Codestral-7B-v0.1": _hybrid(0, 64, (8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4, "mamba2"),
    # encoder-decoder: 1,500 encoder positions, once
    "openai/whisper-large-v3": Golden(
        32 * 1280 * KV, 32 * 1280 * KV * (8192 + 1500), 32 * 1280 * KV * (131_072 + 1500), 0, "mha+cross"
    ),
}

PUBLISHED_MB = {  # figures printed in megabytes elsewhere, as a check on the derivations above
    ("openai/gpt-oss-120b", 8192): 306.7,
    ("openai/gpt-oss-20b", 8192): 204.5,
    ("google/gemma-3-27b-it", 8192): 1107,
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 131_072): 7650,
    ("google/gemma-4-26B-A4B", 8192): 377,
    ("XiaomiMiMo/MiMo-V2-Flash", 131_072): 3045,
}
STATE_MB = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 77.3,
    "Qwen/Qwen3.5-27B": 153.9,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 49.1,
}


def test_the_table_covers_the_catalogue() -> None:
    assert set(GOLDEN) == set(catalogue())
    assert len(GOLDEN) >= 25


@pytest.mark.parametrize("name", GOLDEN)
def test_models_of_the_catalogue(name: str) -> None:
    expected = GOLDEN[name]
    spec = spec_from_config(catalogue()[name])
    short = size_model(name, spec, Deployment(), seq_len=8192)
    long = size_model(name, spec, Deployment(), seq_len=131_072)
    assert short.attention == expected.attention
    assert short.bytes_per_token == expected.token
    assert short.state_bytes_per_sequence == expected.state
    assert short.bytes_per_sequence == expected.at_8k
    assert long.bytes_per_sequence == expected.at_128k


@pytest.mark.parametrize(("name", "tokens"), PUBLISHED_MB)
def test_derivations_agree_with_published_megabytes(name: str, tokens: int) -> None:
    expected = GOLDEN[name].at_8k if tokens == 8192 else GOLDEN[name].at_128k
    assert expected / 1e6 == pytest.approx(PUBLISHED_MB[name, tokens], rel=2e-3)


@pytest.mark.parametrize("name", STATE_MB)
def test_states_agree_with_published_megabytes(name: str) -> None:
    assert GOLDEN[name].state / 1e6 == pytest.approx(STATE_MB[name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "form", "token"),
    [
        ("deepseek-ai/DeepSeek-V3.2", "fp8", 48_068),  # 656 B a row for the sparse kernels
        ("zai-org/GLM-5", "fp8", 61_464),
        ("deepseek-ai/DeepSeek-V3", "fp8", 61 * 576),  # dense kernels read plain fp8
        ("deepseek-ai/DeepSeek-V3", "fp8_ds_mla", 61 * 656),
        ("deepseek-ai/DeepSeek-V3", "int8", 61 * (576 + 8)),
        ("meta-llama/Llama-3.1-8B", "fp8", 65_536),
        ("meta-llama/Llama-3.1-8B", "int8", 32 * 8 * 2 * (128 + 4)),
        ("meta-llama/Llama-3.1-8B", "int4", 32 * 8 * 2 * (64 + 4)),
        ("meta-llama/Llama-3.1-8B", "kivi4", 131_072 * 5 // 16),  # 5.0 bits a number
        ("meta-llama/Llama-3.1-8B", "kivi2", 131_072 * 3 // 16),
    ],
)
def test_quantised_forms(name: str, form: str, token: int) -> None:
    ledger = Ledger(spec_from_config(catalogue()[name]), Deployment(form=kv_format(form)))
    assert ledger.bytes_per_token() == token


def test_mtp_layers_are_counted_only_on_request() -> None:
    spec = spec_from_config(catalogue()["deepseek-ai/DeepSeek-V3"])
    assert Ledger(spec, Deployment(), with_mtp=True).bytes_per_token() == 71_424
    assert any("MTP" in note for note in spec.notes)


def test_a_snapshot_of_qwen3_next_costs_3144_tokens() -> None:
    spec = spec_from_config(catalogue()["Qwen/Qwen3-Next-80B-A3B-Instruct"])
    ledger = Ledger(spec, Deployment())
    assert ledger.state_bytes() // ledger.bytes_per_token() == 3144
    assert ledger.snapshot_bytes_per_token(3144) == pytest.approx(24_576, rel=1e-3)


# --- the full configs, where they lie beside the checkout

SHARED = Path(os.environ.get("KVTIER_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared")) / "configs"
OTHER_NAMES = {"meta-llama/Meta-Llama-3.1": "meta-llama/Llama-3.1"}
FILES = sorted(SHARED.glob("*.json")) if SHARED.is_dir() else []


@pytest.mark.skipif(not FILES, reason="no folder of full model configs beside the checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_full_configs_give_the_same_figures(path: Path) -> None:
    name = path.stem.replace("--", "/")
    for old, current in OTHER_NAMES.items():
        name = name.replace(old, current)
    expected = GOLDEN[name]
    spec = spec_from_config(json.loads(path.read_text()))
    sized = size_model(name, spec, Deployment(), seq_len=131_072)
    assert (sized.bytes_per_token, sized.bytes_per_sequence, sized.state_bytes_per_sequence, sized.attention) == (
        expected.token, expected.at_128k, expected.state, expected.attention,
    )  # fmt: skip
    assert spec.layers == spec_from_config(catalogue()[name]).layers
