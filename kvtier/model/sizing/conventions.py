"""What a config may leave out because its family's reference class fills it in.

The size is always computed from fields. A model type only supplies fields that published configs of that family omit,
so that both spellings of the same model, sparse and complete, are interpreted by the same readers. Every value here is
the default of the family's reference configuration class; what was taken from here is reported as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.model.sizing.fields import MAX_LAYERS, checked_count
from kvtier.model.sizing.heads import LAYERS

Convention = Callable[[Mapping[str, object]], dict[str, object]]

FULL, SLIDING = "full_attention", "sliding_attention"

# Fields omitted as they are.
_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
               "sliding_window_pattern": 6},
    "gemma3n": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
                "sliding_window_pattern": 5, "num_kv_shared_layers": 15},
    "gemma4_unified": {"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "sliding_window_pattern": 6},
    "gemma4": {"head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "sliding_window_pattern": 6},
    "vaultgemma": {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window_pattern": 4},
    "olmo3": {"sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2},
    "llama4": {"head_dim": 128, "num_key_value_heads": 8, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "mistral": {"num_key_value_heads": 8},
    "ministral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "starcoder2": {"num_key_value_heads": 2},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen2_vl": {"use_sliding_window": False},
    "qwen2_5_vl": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {"full_attention_interval": 4, "head_dim": 256},
    "qwen3_5": {"full_attention_interval": 4, "head_dim": 256},
    "qwen3_5_moe": {"full_attention_interval": 4, "head_dim": 256},
    "smollm3": {"use_sliding_window": False},
    "gpt_bigcode": {"multi_query": True},
    "recurrent_gemma": {"attention_window_size": 2048, "conv1d_width": 4,
                        "block_types": ["recurrent", "recurrent", "attention"]},
    "zamba": {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2},
    "gpt_neo": {"window_size": 256},
    "longcat_flash": {"attention_sublayers": 2},
}  # fmt: skip

_PLAN_FIELDS = frozenset(
    ["sliding_window_pattern", "full_attention_interval", "no_rope_layer_interval", "use_sliding_window", "block_types"]
)  # not needed by a config that lists its layers

_SLIDERS_TEXT = (
    "mistral ministral mixtral phi3 phi3_v phimoe phi4_multimodal phi4mm starcoder2 moshi kyutai_speech_to_text "
    "voxtral_realtime"
)
_EVERY_LAYER_SLIDES = frozenset(_SLIDERS_TEXT.split())  # when `sliding_window` is set, and no plan says otherwise
_EVERY_LAYER_IS_HYBRID = frozenset(["falcon_h1"])
_FULL_FIRST_OF_FOUR = frozenset(["cwm", "granite_swa", "granitemoe_swa"])

# Types whose models keep nothing between tokens, or memories that are not a KV cache.
_ENCODERS_TEXT = """
    albert bert big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie
    ernie_m esm flaubert fnet funnel ibert layoutlm layoutlmv2 layoutlmv3 longformer luke markuplm
    megatron-bert mobilebert modernbert mpnet mra neobert nezha nomic_bert nystromformer qdqbert realm rembert
    roberta roberta-prelayernorm roc_bert roformer splinter squeezebert tapas visual_bert vit xlm xlm-roberta
    xlm-roberta-xl xmod yoso new gte eurobert clip siglip
"""
ENCODERS_ONLY = frozenset(_ENCODERS_TEXT.split())
NO_KV_CACHE = frozenset(["openai-gpt", "xlnet", "reformer", "transfo-xl", "perceiver"])


def family(model_type: str) -> str:
    """The model type without the suffix of a nested text config: both are one family."""
    return model_type if model_type in _EVERY_LAYER_SLIDES else model_type.removesuffix("_model").removesuffix("_text")


def omitted(model_type: str, raw: Mapping[str, object]) -> dict[str, object]:
    """The fields that the family's reference class would add to `raw`."""
    name = family(model_type)
    added = {key: value for key, value in _DEFAULTS.get(name, {}).items() if raw.get(key) is None}
    if raw.get("per_layer_config") is not None:  # says the same layer by layer
        added.pop("global_head_dim", None)
    if name == "mimo_v2_flash" and raw.get("swa_num_key_value_heads") is None:
        # The reference class doubles the KV heads of sliding layers; only the published config spells it out.
        heads = raw.get("num_key_value_heads")
        added["swa_num_key_value_heads"] = 2 * heads if isinstance(heads, int) else None
    if (
        name == "modernbert-decoder"
        and raw.get("sliding_window") is None
        and isinstance(raw.get("local_attention"), int)
    ):
        added["sliding_window"] = checked_count(raw["local_attention"], "local_attention", at_least=2) // 2
    if all(raw.get(key) is None for key in ("layer_types", "layers_block_type", "no_rope_layers", "_block_types")):
        return {**added, **_layer_plan(name, raw)}
    return {key: value for key, value in added.items() if key not in _PLAN_FIELDS}


def _layer_plan(name: str, raw: Mapping[str, object]) -> dict[str, object]:
    if name in _EVERY_LAYER_SLIDES and raw.get("sliding_window") is not None:
        return {"layer_types": [SLIDING] * _layers(raw)}
    if name in _EVERY_LAYER_IS_HYBRID:
        return {"layer_types": ["hybrid"] * _layers(raw)}
    if name in _FULL_FIRST_OF_FOUR:
        return {"layer_types": [SLIDING if index % 4 else FULL for index in range(_layers(raw))]}
    if name == "mimo_v2_flash" and raw.get("hybrid_layer_pattern") is None:
        return {"layer_types": [SLIDING if index and (index + 1) % 6 else FULL for index in range(_layers(raw))]}
    if name == "modernbert-decoder":
        every = checked_count(
            raw.get("global_attn_every_n_layers", 3), "global_attn_every_n_layers", at_most=MAX_LAYERS
        )
        return {"layer_types": [SLIDING if index % every else FULL for index in range(_layers(raw))]}
    if name == "afmoe":
        return {"sliding_window_pattern": raw.get("global_attn_every_n_layers")}
    if name == "zamba":
        return {"layers_block_type": _zamba_plan(raw)}
    return {}


def _zamba_plan(raw: Mapping[str, object]) -> list[object]:
    """Two plain layers and a hybrid one, then one hybrid layer a period."""
    period = checked_count(raw.get("attn_layer_period", 6), "attn_layer_period", at_most=MAX_LAYERS)
    offset = checked_count(raw.get("attn_layer_offset", 4), "attn_layer_offset", at_least=0, at_most=MAX_LAYERS)
    tail = ["hybrid" if index % period == offset else "mamba" for index in range(_layers(raw) - 3)]
    return ["mamba", "mamba", "hybrid", *tail]


def _layers(raw: Mapping[str, object]) -> int:
    key = next((key for key in LAYERS if raw.get(key) is not None), LAYERS[0])
    return 0 if raw.get(key) is None else checked_count(raw[key], key, at_most=MAX_LAYERS)
