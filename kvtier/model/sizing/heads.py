"""KV heads and their widths, in the spellings configs use."""

from __future__ import annotations

from kvtier.errors import ModelConfigError
from kvtier.model.sizing.fields import MAX_HEADS, Fields, checked_count, shown

DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")  # where encoder and decoder share one flat config
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers", *DECODER_LAYERS)
WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim", "embed_dim")
QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_query_heads", "num_heads")
DECODER_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_attention_groups", "kv_n_heads",
            "decoder_key_value_heads", "num_query_groups")  # fmt: skip
HEAD_WIDTH = ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head", "d_kv", "dim_head", "head_size")
PER_LAYER_KV_HEADS = ("num_key_value_heads_per_layer", "num_kv_heads_per_layer")


def query_heads(fields: Fields) -> int:
    """Query heads of an attention layer."""
    own = fields.maybe_count(*DECODER_HEADS, at_most=MAX_HEADS)
    fields.excuse(QUERY_HEADS)  # beside a decoder's own figure, they are the encoder's
    return fields.count(*QUERY_HEADS, at_most=MAX_HEADS) if own is None else own


def kv_heads(fields: Fields, index: int) -> int:
    """KV heads of layer `index`: its own figure, or the model's, or one per query head when the config names none."""
    per_layer = _per_layer_heads(fields, index)
    if per_layer is not None:
        return per_layer
    heads = query_heads(fields)
    found = _shared_heads(fields)
    if found is None:
        return heads
    if found > heads or heads % found:
        name = next((key for key in KV_HEADS if fields.value(key) is not None), KV_HEADS[0])
        raise ModelConfigError(f"{fields.name(name)} = {found} does not divide {heads} query heads")
    return found


def head_dims(fields: Fields) -> tuple[int, int]:
    """Widths of a key and of a value. They differ only where the config gives values a width of their own."""
    if fields.peek("use_mla") is False:  # zeros stand for nothing there (DeepSeek-VL2)
        fields = fields.overlaid({key: None for key in ("head_dim", "v_head_dim") if fields.peek(key) == 0})
    key_dim = fields.maybe_count(*HEAD_WIDTH)
    if key_dim is None:
        width, heads = fields.count(*WIDTH), query_heads(fields)
        if width % heads:
            raise ModelConfigError(
                f"{fields.name('head_dim')} is missing and {heads} heads do not divide the hidden size {width}"
            )
        key_dim = width // heads
    return key_dim, fields.maybe_count("v_head_dim") or key_dim


def uses_latent(fields: Fields) -> bool:
    """Whether full attention caches a latent. Some configs carry the dimensions of MLA and switch it off."""
    return fields.active("kv_lora_rank") and fields.flag("use_mla", default=True)


def _per_layer_heads(fields: Fields, index: int) -> int | None:
    for key in (*PER_LAYER_KV_HEADS, *KV_HEADS):
        if isinstance(fields.value(key), list):
            items = fields.items(key) or []
            if index >= len(items):
                raise ModelConfigError(f"{fields.name(key)} has {len(items)} entries, too few for layer {index}")
            fields.excuse(QUERY_HEADS)
            return checked_count(items[index], f"{fields.name(key)}[{index}]", at_most=MAX_HEADS)
    return None


def _shared_heads(fields: Fields) -> int | None:
    """The model-wide figure. Multi-query flags outrank it, as Falcon and GPT-BigCode define them."""
    named = fields.maybe_count(*KV_HEADS, at_most=MAX_HEADS)
    grouped_anyway = fields.flag("new_decoder_architecture")
    if fields.value("multi_query") is not None and not grouped_anyway:
        return 1 if fields.flag("multi_query") else None
    if fields.value("multi_query_attention") is not None:  # ChatGLM
        groups = fields.maybe_count("multi_query_group_num", at_most=MAX_HEADS)
        return groups if fields.flag("multi_query_attention") else None
    if fields.active("attn_config"):  # DBRX, MPT
        nested = fields.section("attn_config")
        inner = nested.maybe_count(*KV_HEADS, at_most=MAX_HEADS)
        kind = nested.text("attn_type")
        if kind not in (None, "", "multihead_attention", "multiquery_attention", "grouped_query_attention"):
            raise ModelConfigError(f"{nested.name('attn_type')} = {shown(kind)} is not an attention kvtier knows")
        return 1 if kind == "multiquery_attention" else inner if inner is not None else named
    return named
