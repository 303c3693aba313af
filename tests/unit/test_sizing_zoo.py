"""Configs in the spellings of the model hub, none of them in the catalogue: sized right, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import ModelConfigError
from kvtier.model.sizing import Deployment, Ledger, spec_from_config

KV = 2 * 2
S = 8192
EVERY_FOURTH = ["sliding_attention"] * 3 + ["full_attention"]

# config, bytes a token adds, bytes of a sequence of 8,192 tokens
SIZED: dict[str, tuple[dict[str, Any], int, int]] = {
    "gpt-j: n_* names": ({"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "rotary_dim": 64},
        28 * 4096 * KV, 0),
    "bloom: n_embed": ({"model_type": "bloom", "n_layer": 24, "n_embed": 1024, "num_attention_heads": 16},
        24 * 1024 * KV, 0),
    "falcon, first spelling": (
        {"model_type": "RefinedWebModel", "hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True,
         "parallel_attn": True}, 32 * 64 * KV, 0,
    ),
    "falcon, n_head_kv": (
        {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60},
            60 * 8 * 64 * KV, 0,
    ),
    "mpt: attn_config": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
         "attn_config": {"attn_type": "multihead_attention", "attn_pdrop": 0, "attn_impl": "torch", "alibi": True,
                         "clip_qkv": None, "prefix_lm": False}}, 32 * 4096 * KV, 0,
    ),
    "mpt: multi-query": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
         "attn_config": {"attn_type": "multiquery_attention"}}, 32 * 128 * KV, 0,
    ),
    "dbrx: kv_n_heads": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
         "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}}, 40 * 8 * 128 * KV, 0,
    ),
    "chatglm: multi_query_group_num": (
        {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 28, "kv_channels": 128,
         "multi_query_attention": True, "multi_query_group_num": 2, "apply_query_key_layer_scaling": True,
         "attention_softmax_in_fp32": True, "ffn_hidden_size": 13696}, 28 * 2 * 128 * KV, 0,
    ),
    "gpt_bigcode: multi_query by default": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "pad_key_length": True},
            40 * 128 * KV, 0,
    ),
    "openelm: heads per layer": (
        {"model_type": "openelm", "num_transformer_layers": 4, "model_dim": 1280, "head_dim": 64,
         "num_kv_heads": [3, 3, 4, 4], "num_query_heads": [12, 12, 16, 16], "share_input_output_layers": True},
        14 * 64 * KV, 0,
    ),
    "nemotron-nas: blocks": (
        {"model_type": "nemotron-nas", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 3,
         "num_key_value_heads": None,
         "block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": False, "window_length": None}},
                           {"attention": {"n_heads_in_group": None, "no_op": True}},
                           {"attention": {"n_heads_in_group": 16, "replace_with_linear": False}}]},
        (8 + 4) * 128 * KV, 0,
    ),
    "hunyuan: cross-layer attention": (
        {"model_type": "hunyuan", "hidden_size": 6400, "num_attention_heads": 80, "num_key_value_heads": 8,
         "attention_head_dim": 128, "num_hidden_layers": 64, "use_cla": True, "cla_share_factor": 2}, 32 * 4096, 0,
    ),
    "hunyuan: dimensions of MLA, switched off": (
        {"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 32, "use_cla": False, "cla_share_factor": 2, "use_mla": False,
         "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        32 * 4096, 0,
    ),
    "deepseek-vl2: zeros where MLA is off": (
        {"model_type": "deepseek_vl_v2", "vision_config": {"layers": 27},
         "language_config": {"model_type": "deepseek_v2", "hidden_size": 1280, "num_attention_heads": 10,
                             "num_key_value_heads": 10, "num_hidden_layers": 12, "use_mla": False, "kv_lora_rank": None,
                             "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}}, 12 * 1280 * KV, 0,
    ),
    "longcat: two attentions a layer": (
        {"model_type": "longcat_flash", "attention_method": "MLA", "hidden_size": 6144, "num_layers": 28,
         "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}, 2 * 28 * 1152, 0,
    ),
    "internvl: llm_config": (
        {"model_type": "internvl_chat", "vision_config": {"num_hidden_layers": 24},
         "llm_config": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
                        "num_hidden_layers": 24, "use_sliding_window": False, "sliding_window": 32768,
                        "max_window_layers": 21}}, 24 * 2 * 64 * KV, 0,
    ),
    "qwen-omni: thinker_config.text_config": (
        {"model_type": "qwen2_5_omni", "talker_config": {"num_hidden_layers": 24},
         "thinker_config": {"model_type": "qwen2_5_omni_thinker",
                            "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
                                            "num_hidden_layers": 28, "use_sliding_window": False}}},
                                                28 * 4 * 128 * KV, 0,
    ),
    "qwen2-vl: flat beside a vision section": (
        {"model_type": "qwen2_vl", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
         "num_hidden_layers": 80, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 80,
         "vision_config": {"depth": 32, "num_heads": 16}}, 327_680, 0,
    ),
    "qwen 1M: dual chunks keep everything": (
        {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
         "num_hidden_layers": 28, "use_sliding_window": False, "dual_chunk_attention_config": {"chunk_size": 262144}},
        28 * 4 * 128 * KV, 0,
    ),
    "gemma-3-4b: everything usual left out": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
                                                 "num_hidden_layers": 34, "sliding_window": 1024}},
        5 * 4096, 5 * 4096 * S + 29 * 4096 * 1024,
    ),
    "gemma-2: windows alternate by convention": (
        {"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256,
         "num_hidden_layers": 26, "sliding_window": 4096}, 13 * 4096, 13 * 4096 * S + 13 * 4096 * 4096,
    ),
    "gemma-3n: the tail shares": (
        {"model_type": "gemma3n_text", "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 256, "num_hidden_layers": 10, "sliding_window": 512, "num_kv_shared_layers": 5,
         "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2}, 2048, 2048 * S + 4 * 2048 * 512,
    ),
    "exaone-4: letters": (
        {"model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
         "num_hidden_layers": 8, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        2 * 4096, 2 * 4096 * S + 6 * 4096 * 4096,
    ),
    "qwen2 with windows on": (
        {"model_type": "qwen2", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
         "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3},
        3 * 1024 * KV, 3 * 1024 * KV * S + 1024 * KV * 100,
    ),
    "gpt-neo: attention_types": (
        {"model_type": "gpt_neo", "hidden_size": 768, "num_heads": 12, "num_layers": 4, "window_size": 256,
         "attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
        2 * 768 * KV, 2 * 768 * KV * (S + 256),
    ),
    "llama 4: no_rope_layers": (
        {"model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 4, "attention_chunk_size": 4096, "no_rope_layers": [1, 0, 1, 0]},
        2 * 4096, 2 * 4096 * (S + 4096),
    ),
    "smollm3: layers without rope are ordinary": (
        {"model_type": "smollm3", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
         "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}, 4 * 4 * 128 * KV, 0,
    ),
    "step 3.5: a section for the sliding layers": (
        {"model_type": "step3p5", "hidden_size": 4096, "num_attention_heads": 64, "num_attention_groups": 8,
         "head_dim": 128, "num_hidden_layers": 4, "sliding_window": 512, "layer_types": EVERY_FOURTH,
         "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                     "num_attention_groups": 4, "head_dim": 128}},
        4096, 4096 * S + 3 * 2048 * 512,
    ),
    "glm-5.2: shared indexers": (
        {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "num_attention_heads": 64, "kv_lora_rank": 512,
         "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk_pattern": "FSSF"}, 4 * 1152 + 2 * 132, 0,
    ),
    "minimax-m3: blocks picked by an index": (
        {"model_type": "minimax_m3_vl", "text_config": {
            "model_type": "minimax_m3_vl_text", "hidden_size": 6144, "num_attention_heads": 64,
                "num_key_value_heads": 4,
            "head_dim": 128, "num_hidden_layers": 3,
            "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1], "sparse_index_dim": 128,
                                        "sparse_num_index_heads": 4, "sparse_block_size": 128}}},
        3 * 4 * 128 * KV + 2 * 256, 0,
    ),
    "whisper: a decoder of its own depth": (
        {"model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280, "num_hidden_layers": 32,
         "decoder_layers": 2, "decoder_attention_heads": 20, "encoder_layers": 32, "encoder_attention_heads": 20,
         "max_source_positions": 1500}, 2 * 1280 * KV, 2 * 1280 * KV * (S + 1500),
    ),
    "mllama: cross layers see the image only": (
        {"model_type": "mllama", "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
         "text_config": {"model_type": "mllama_text_model", "hidden_size": 4096, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "num_hidden_layers": 5, "cross_attention_layers": [3]}},
        4 * 4096, 4 * 4096 * S + 4096 * 4 * (40 * 40 + 1),
    ),
    "minimax-01: lightning attention": (
        {"model_type": "minimax_text_01", "attn_type_list": [0, 0, 1], "head_dim": 128, "hidden_size": 6144,
         "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 3, "rotary_dim": 64,
         "layernorm_linear_attention_alpha": 3.5}, 4096, 4096 * S + 2 * 64 * 128 * 128 * 2,
    ),
    "recurrentgemma: a cycle, windows only": (
        {"model_type": "recurrent_gemma", "hidden_size": 2560, "num_attention_heads": 10, "num_key_value_heads": 1,
         "head_dim": 256, "num_hidden_layers": 5, "lru_width": 2560, "attention_window_size": 2048, "conv1d_width": 4,
         "_block_types": ["recurrent", "recurrent", "attention"]},
        1024, 1024 * 2048 + 4 * (2560 * 3 * 2 + 2560 * 4),
    ),
    "lfm2: short convolutions": (
        {"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_heads": 32,
         "num_hidden_layers": 3, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "full_attn_idxs": [1]},
        8 * 64 * KV, 8 * 64 * KV * S + 2 * 2048 * 2 * 2,
    ),
    "falcon-mamba: expand is not the width": (
        {"model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "expand": 16, "conv_kernel": 4,
         "state_size": 16, "num_hidden_layers": 2, "time_step_rank": 256}, 0, 2 * (8192 * 3 * 2 + 8192 * 16 * 4),
    ),
    "bamba: attention at indices": (
        {"model_type": "bamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_hidden_layers": 3, "attn_layer_indices": [2], "mamba_n_heads": 128, "mamba_d_head": "auto",
         "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
        4096, 4096 * S + 2 * ((8192 + 256) * 3 * 2 + 8192 * 128 * 4),
    ),
    "falcon-h1: both at once": (
        {"model_type": "falcon_h1", "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 128, "num_hidden_layers": 2, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64,
         "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4, "attn_layer_indices": None},
        2 * 2 * 128 * KV, 2 * (2 * 128 * KV * S + (3072 + 512) * 3 * 2 + 3072 * 256 * 4),
    ),
    "granite hybrid: bf16 state by its own word": (
        {"model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 48, "mamba_d_head": 64,
         "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_ssm_dtype": "bfloat16"},
        4 * 128 * KV, 4 * 128 * KV * S + (3072 + 256) * 3 * 2 + 3072 * 128 * 2,
    ),
    "rwkv-4": (
        {"model_type": "rwkv", "hidden_size": 1024, "attention_hidden_size": 1024, "num_hidden_layers": 3,
         "rescale_every": 6}, 0, 3 * (1024 * 2 * 2 + 1024 * 3 * 4),
    ),
    "a type nobody knows, plainly uniform": (
        {"model_type": "acme-1", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24,
         "num_key_value_heads": 4}, 24 * 4 * 128 * KV, 0,
    ),
}  # fmt: skip

UNIFORM = {"model_type": "acme", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 4}

# config, words that the one-line error must contain
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({}, ("num_hidden_layers",)),
    "unknown window": ({**UNIFORM, "sliding_window": 512}, ("sliding_window",)),
    "unknown hybrid": ({**UNIFORM, "mamba_d_state": 16}, ("mamba_d_state",)),
    "unknown compression": ({**UNIFORM, "kv_compression_ratio": 4}, ("kv_compression_ratio",)),
    "unknown memory": ({**UNIFORM, "num_memory_tokens": 128}, ("num_memory_tokens",)),
    "unknown recurrence": ({**UNIFORM, "use_linear_attention": True}, ("use_linear_attention",)),
    "unknown layer list": ({**UNIFORM, "layer_types": ["full_attention", "hyena", "full_attention", "hyena"]},
        ("layer_types[1]", "hyena")),
    "block-sparse": ({**UNIFORM, "blocksparse_block_size": 64, "dense_attention_every_n_layers": 2},
                     ("blocksparse_block_size", "dense_attention_every_n_layers")),
    "compressed (DeepSeek-V4)": ({**UNIFORM, "model_type": "deepseek_v4", "compress_ratios": [0, 4, 4, 128]},
        ("compress_ratios",)),
    "layer groups (Ling)": ({**UNIFORM, "layer_group_size": 5}, ("layer_group_size",)),
    "rwkv-6": ({"model_type": "rwkv6", "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64,
        "head_size": 64,
                "head_size_divisor": 8}, ("head_size_divisor",)),
    "gated linear attention": ({"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2, "attn_mode": "chunk"},
        ("attn_mode",)),
    "an encoder": ({**UNIFORM, "model_type": "bert"}, ("encoder",)),
    "an encoder by its architecture": ({**UNIFORM, "architectures": ["AcmeForMaskedLM"]}, ("encoder",)),
    "latent without its rope": ({**UNIFORM, "kv_lora_rank": 512}, ("qk_rope_head_dim",)),
    "latent and sliding": ({**UNIFORM, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "sliding_window": 8,
                            "layer_types": ["sliding_attention"] * 4}, ("kv_lora_rank", "sliding")),
    "sliding without a window": ({**UNIFORM, "layer_types": ["sliding_attention"] * 4}, ("sliding_window",)),
    "recurrent without dimensions": ({**UNIFORM, "layer_types": ["mamba"] * 4, "d_conv": 4}, ("d_conv",)),
    "window inside a NAS block": ({**UNIFORM, "block_configs": [{"attention": {"n_heads_in_group": 4,
        "window_length": 9}}] * 4},
                                  ("block_configs[0].attention.window_length",)),
    "an attention MPT does not have": ({"d_model": 64, "n_heads": 4, "n_layers": 2,
        "attn_config": {"attn_type": "odd"}},
                                       ("attn_config.attn_type",)),
    "both sides in a window": ({**UNIFORM, "sliding_window": 512, "sliding_window_pattern": 6,
                                "use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
}  # fmt: skip

DAMAGED = [
    ("num_hidden_layers", 0), ("num_hidden_layers", -3), ("num_hidden_layers", 10**9), ("num_hidden_layers", "32"),
    ("num_hidden_layers", True), ("num_hidden_layers", 32.5), ("num_hidden_layers", float("nan")),
    ("num_hidden_layers", [32]), ("num_hidden_layers", {"n": 32}), ("num_attention_heads", 0), ("num_attention_heads",
        "x"),
    ("num_key_value_heads", 0), ("num_key_value_heads", 3), ("num_key_value_heads", 64), ("num_key_value_heads", -8),
    ("head_dim", 0), ("head_dim", 10**12), ("head_dim", "128"), ("head_dim", float("inf")), ("hidden_size", None),
    ("layer_types", "full_attention"), ("layer_types", ["full_attention"] * 3), ("layer_types", [1, 2, 3, 4]),
    ("sliding_window", "wide"), ("num_nextn_predict_layers", -1), ("num_nextn_predict_layers", 10**6),
    ("num_kv_shared_layers", 4), ("num_kv_shared_layers", "all"), ("per_layer_config", {"9": {"head_dim": 8}}),
    ("per_layer_config", {"0": 3}), ("attn_config", [1]), ("model_type", 7), ("use_cla", "yes"), ("block_configs",
        [{}] * 4),
    ("kv_lora_rank", "512"), ("hybrid_override_pattern", "MM*"), ("hybrid_override_pattern", "MMXX"),
    ("attn_type_list", [0, 1, 2, 1]), ("full_attn_idxs", [4]), ("linear_attn_config", {"full_attn_layers": [0],
        "kda_layers": []}),
    ("mamba_ssm_dtype", "float7"),
]  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_sized(name: str) -> None:
    config, token, sequence = SIZED[name]
    ledger = Ledger(spec_from_config(config), Deployment())
    assert ledger.bytes_per_token() == token
    assert ledger.sequence_bytes(S) == (sequence or token * S)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_the_name_of_the_field(name: str) -> None:
    config, words = REFUSED[name]
    with pytest.raises(ModelConfigError) as caught:
        spec_from_config(config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("field", "value"), DAMAGED, ids=lambda value: str(value)[:30])
def test_damaged_values_are_named(field: str, value: object) -> None:
    base = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 4, "num_key_value_heads": 8}
    if field == "mamba_ssm_dtype":
        base |= {"layer_types": ["mamba"] * 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}  # type: ignore[dict-item]
    if field == "sliding_window":
        base |= {"sliding_window_pattern": 2}
    with pytest.raises(ModelConfigError, match=field.replace("[", r"\[")):
        spec_from_config({**base, field: value})


def test_a_field_that_switches_a_feature_off_explains_itself() -> None:
    for off in (None, False, 0, -1, [], {}, ""):
        spec_from_config({**UNIFORM, "sliding_window": off, "mamba_d_state": off, "kv_compression": off})


def test_names_that_only_sound_like_structure_are_ignored() -> None:
    harmless = {
        "attention_bias": True, "attn_implementation": "flash", "use_lm_head": True, "fuse_cross_entropy": True,
        "keys_to_ignore_at_inference": ["past_key_values"], "context_window": 8192, "layer_norm_eps": 1e-5,
        "moe_layer_freq": 2, "vision_feature_layer": -2, "shared_expert_intermediate_size": 64, "attn_pdrop": 0.1,
        "quantization_config": {"linear": True}, "freeze_layers": [1], "use_memory_efficient_attention": True,
    }  # fmt: skip
    assert spec_from_config({**UNIFORM, **harmless}).layers == spec_from_config(UNIFORM).layers


def test_defaults_taken_from_the_family_are_reported() -> None:
    config, _, _ = SIZED["gemma-3-4b: everything usual left out"]
    notes = spec_from_config(config).notes
    assert "head_dim, num_attention_heads, num_key_value_heads, sliding_window_pattern" in " ".join(notes)


def test_a_complete_config_takes_nothing_from_its_family() -> None:
    config = {"model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "head_dim": 16,
              "num_key_value_heads": 2, "sliding_window": 8, "layer_types": ["sliding_attention",
                  "full_attention"]}  # fmt: skip
    assert spec_from_config(config).notes == ()


def test_per_layer_config_replaces_fields_of_single_layers() -> None:
    """The form transformers writes for Gemma 4 after loading it."""
    config = {"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
        "head_dim": 16,
              "num_key_value_heads": 4, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
              "attention_k_eq_v": True, "per_layer_config": {"1": {"head_dim": 32,
                  "num_key_value_heads": 1}}}  # fmt: skip
    ledger = Ledger(spec_from_config(config), Deployment())
    assert ledger.bytes_per_token() == 1 * 32 * KV
    assert ledger.sequence_bytes(100) == 1 * 32 * KV * 100 + 4 * 16 * KV * 32


def test_an_encoder_length_that_is_not_fixed_is_said_or_assumed() -> None:
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 6}
    layer = 6 * 8 * 64 * KV
    assumed = spec_from_config(t5)
    assert Ledger(assumed, Deployment()).sequence_bytes(100) == layer * (100 + 100)
    assert any("--source-len" in note for note in assumed.notes)
    said = spec_from_config(t5, source_tokens=7)
    assert Ledger(said, Deployment()).sequence_bytes(100) == layer * (100 + 7)
    assert not any("--source-len" in note for note in said.notes)


def test_the_callers_state_dtype_outranks_the_configs() -> None:
    config, _, _ = SIZED["granite hybrid: bf16 state by its own word"]
    half = Ledger(spec_from_config(config), Deployment()).state_bytes()
    full = Ledger(spec_from_config(config, state_dtype="float32"), Deployment()).state_bytes()
    assert full - half == 3072 * 128 * 2
