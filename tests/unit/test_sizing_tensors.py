"""Shrunken random models of every class: what is predicted from the config is what transformers' cache tensors weigh.

transformers keeps three things slightly differently from a serving engine, and the comparison says so instead of
hiding it: a full window loses the token that the next query brings, a convolution of kernel k keeps k columns instead
of k - 1, and index keys stay in 16 bits.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import pytest

from kvtier.model.sizing import LayerSpec, kv_format, spec_from_config
from kvtier.model.sizing.cache import CacheSpec
from kvtier.model.sizing.latent import IndexerKeys
from kvtier.model.sizing.recurrent import RecurrentState, StateTensor
from kvtier.model.sizing.shared import SharedCache

torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")

TOKENS = 23
BF16 = kv_format("bf16")

COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXER = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
S, F, L = "sliding_attention", "full_attention", "linear_attention"

# model type -> what differs from COMMON (None removes), and the classes of cache it must show.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, {"full"}),
    "qwen3": ({}, {"full"}),
    "gpt2": ({"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}, {"full"}),
    "gpt_bigcode": ({"n_embd": 64, "n_layer": 4, "n_head": 4, "multi_query": True}, {"full"}),
    "falcon": ({"head_dim": None, "multi_query": True, "new_decoder_architecture": False}, {"full"}),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 128}, {"full"}),
    "mistral": ({"sliding_window": 9}, {"sliding"}),
    "qwen2": ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, {"full", "sliding"}),
    "gemma3_text": ({"sliding_window": 9, "num_hidden_layers": 7}, {"full", "sliding"}),
    "gemma4_text": (
        {"sliding_window": 40, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "hidden_size_per_layer_input": 0, "num_hidden_layers": 6}, {"full", "sliding"},
    ),
    "gemma3n_text": (
        {"sliding_window": 9, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
         "vocab_size_per_layer_input": 128, "num_hidden_layers": 6, "layer_types": [S, F] * 3},
        {"full", "sliding", "shared"},
    ),
    "gpt_oss": ({**EXPERTS, "sliding_window": 9}, {"full", "sliding"}),
    "mimo_v2_flash": (
        {"sliding_window": 9, "v_head_dim": 8, "num_hidden_layers": 7, "n_routed_experts": 4, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, {"full", "sliding"},
    ),
    "llama4_text": (
        {"attention_chunk_size": 12, "num_local_experts": 2, "intermediate_size_mlp": 64}, {"full", "chunked"},
    ),
    "deepseek_v3": ({**LATENT, "head_dim": None}, {"mla"}),
    "deepseek_v32": ({**LATENT, **INDEXER, "head_dim": None}, {"mla", "indexer"}),
    "glm_moe_dsa": (
        {**LATENT, **INDEXER, "head_dim": None, "indexer_types": ["full", "shared", "full", "shared"]},
        {"mla", "indexer"},
    ),
    "minimax_m3_vl_text": (
        {"num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 32,
         "shared_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16,
         "layer_types": [F, "minimax_m3_sparse", "minimax_m3_sparse", F]}, {"full", "indexer"},
    ),
    "mamba": ({"state_size": 16, "num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None,
               "head_dim": None}, {"recurrent"}),
    "mamba2": ({"num_heads": 8, "n_groups": 2, "state_size": 16, "num_attention_heads": None,
                "num_key_value_heads": None, "intermediate_size": None}, {"recurrent"}),
    "jamba": (
        {"mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2, "head_dim": None,
         "use_mamba_kernels": False}, {"full", "recurrent"},
    ),
    "bamba": ({**MAMBA2, "attn_layer_indices": [1], "head_dim": None}, {"full", "recurrent"}),
    "falcon_h1": ({**MAMBA2, "mamba_d_ssm": 128}, {"full", "recurrent"}),
    "nemotron_h": (
        {"layer_types": [L, "moe", F, "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
         "ssm_state_size": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False}, {"full", "recurrent"},
    ),
    "zamba2": (
        {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8,
         "hybrid_layer_ids": [1, 3], "num_key_value_heads": 4, "head_dim": None}, {"full", "recurrent"},
    ),
    "qwen3_next": ({**DELTA, **EXPERTS, "num_experts_per_tok": 2, "num_experts": 16,
                    "shared_expert_intermediate_size": 32}, {"full", "recurrent"}),
    "qwen3_5_text": (DELTA, {"full", "recurrent"}),
    "olmo_hybrid": ({**DELTA, "linear_num_key_heads": 4, "num_key_value_heads": 4}, {"full", "recurrent"}),
    "kimi_linear": (
        {**LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 16, "head_dim": None,
         "num_experts_per_tok": 2, "q_lora_rank": None, "layer_types": [L, L, F, L]}, {"mla", "recurrent"},
    ),
    "lfm2": ({"layer_types": ["conv", F, "conv", F], "block_auto_adjust_ff_dim": False}, {"full", "recurrent"}),
    "minimax": ({"num_local_experts": 2, "num_experts_per_tok": 2}, {"full", "recurrent"}),
}  # fmt: skip


# One model of each class always; the others where ten more seconds do not matter.
CORE = {"llama", "qwen3", "deepseek_v3", "gpt_oss", "gemma3_text", "llama4_text", "qwen3_next", "mamba2"}
CASES = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("model_type", CASES)
def test_predicted_bytes_equal_the_tensors(model_type: str) -> None:
    changes, kinds = MODELS[model_type]
    config = _config(model_type, changes)
    cache = _run(config)
    spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)))

    assert {one.kind for layer in spec.layers for one in layer.caches} == kinds
    found = _layer_bytes(cache)
    expected = [_as_transformers_keeps(layer, _kernel(found, layer)) for layer in spec.layers]
    sharing = [layer for layer in spec.layers if any(isinstance(one, SharedCache) for one in layer.caches)]
    assert [sum(layer.values()) for layer in found] == expected[: len(expected) - len(sharing)]
    assert sum(expected[len(expected) - len(sharing) :]) == 0
    assert sum(expected) > 0


def test_cross_attention_of_an_encoder_decoder() -> None:
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=1, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=30, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16).eval()
    features = torch.zeros(1, 8, 60, dtype=torch.bfloat16)
    with torch.no_grad():
        out = model(input_features=features, decoder_input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=True)
    spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)))
    kept = out.past_key_values
    own, across = _layer_bytes(kept.self_attention_cache), _layer_bytes(kept.cross_attention_cache)
    predicted = [sum(one.held_tokens(TOKENS) * one.row_bytes(BF16, 1) for one in layer.caches) for layer in spec.layers]
    assert [sum(a.values()) + sum(b.values()) for a, b in zip(own, across, strict=True)] == predicted


def _config(model_type: str, changes: dict[str, Any]) -> Any:
    known = transformers.CONFIG_MAPPING[model_type]
    fields = {**COMMON, **changes}
    if "n_embd" in changes or "d_model" in changes:
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            fields.pop(key)
    return known(**{key: value for key, value in fields.items() if value is not None})


def _run(config: Any) -> Any:
    """The cache after one forward pass over TOKENS tokens, in bfloat16."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        out = model(input_ids=torch.randint(5, 100, (1, TOKENS)), use_cache=True)
    kept = getattr(out, "past_key_values", None)
    del model
    gc.collect()
    return kept if kept is not None else out.cache_params


def _layer_bytes(cache: Any) -> list[dict[str, int]]:
    """Bytes of every tensor of every layer, by attribute, and the columns of its convolution under "columns"."""
    layers = []
    for index, layer in enumerate(cache.layers):
        found: dict[str, int] = {}
        for name, value in vars(layer).items():
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for tensor in values:
                if isinstance(tensor, torch.Tensor) and not name.startswith("_"):
                    found[name] = found.get(name, 0) + tensor.nbytes
        linear = getattr(cache, "linear_cache", [])  # MiniMax keeps its states beside the layers
        if index < len(linear) and isinstance(linear[index], torch.Tensor):
            found["linear_cache"] = linear[index].nbytes
        layers.append(found)
    if hasattr(cache, "linear_cache"):
        layers += [{"linear_cache": state.nbytes} for state in cache.linear_cache[len(layers) :]]
    return layers


def _kernel(found: list[dict[str, int]], layer: LayerSpec) -> int | None:
    """The columns transformers keeps of a layer's convolution: one more than the engines' k - 1."""
    return None if layer.index >= len(found) or "conv_states" not in found[layer.index] else 1


def _as_transformers_keeps(layer: LayerSpec, extra_columns: int | None) -> int:
    return sum(_cache_bytes(cache, extra_columns) for cache in layer.caches)


def _cache_bytes(cache: CacheSpec, extra_columns: int | None) -> int:
    if isinstance(cache, RecurrentState):
        tensors = [_with_columns(tensor, cache, extra_columns or 0) for tensor in cache.tensors]
        return msgspec.structs.replace(cache, tensors=tuple(tensors)).state_bytes(2, 1)
    if isinstance(cache, IndexerKeys):
        return TOKENS * cache.width * 2
    bound = getattr(cache, "window", None) or getattr(cache, "chunk", None)
    held = cache.held_tokens(TOKENS)
    if bound is not None and bound <= TOKENS:
        held -= 1
    return held * cache.row_bytes(BF16, 1)


def _with_columns(tensor: StateTensor, cache: RecurrentState, extra: int) -> StateTensor:
    """The convolution's part of a state with `extra` more columns; kernels here are 4, and 3 for LFM2."""
    if not tensor.name.startswith("conv"):
        return tensor
    columns = 2 if cache.family == "short_conv" else 3
    return msgspec.structs.replace(tensor, unit_elements=tensor.unit_elements // columns * (columns + extra))
