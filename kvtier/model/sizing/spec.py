"""From a config to the ledger's input: what each layer of a model keeps for a sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvtier.errors import ModelConfigError
from kvtier.model.sizing import conventions, cross, mtp, plan, registry, shared, vocabulary
from kvtier.model.sizing.cache import CacheSpec, HeadsCache, LayerSpec
from kvtier.model.sizing.decoder import find_decoder, image_source_tokens
from kvtier.model.sizing.fields import Fields, checked_count, shown
from kvtier.model.sizing.full import FullAttention
from kvtier.model.sizing.heads import KV_HEADS, PER_LAYER_KV_HEADS, QUERY_HEADS, query_heads
from kvtier.model.sizing.known_types import CHECKED_TYPES
from kvtier.model.sizing.latent import LatentAttention
from kvtier.model.sizing.overrides import layer_overrides, plan_of_blocks
from kvtier.model.sizing.recurrent import STATE_DTYPE, RecurrentState

_KV_HEADS_SOURCES = (
    *KV_HEADS,
    *PER_LAYER_KV_HEADS,
    "multi_query",
    "multi_query_attention",
    "attn_config",
    "block_configs",
)
_ENCODER_ARCHITECTURE = re.compile(r"MaskedLM$")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps, layer by layer. `mtp` are draft layers, counted only where speculation uses them."""

    layers: tuple[LayerSpec, ...]
    mtp: tuple[LayerSpec, ...] = ()
    attention: str = ""
    notes: tuple[str, ...] = ()

    def all_layers(self, with_mtp: bool = False) -> tuple[LayerSpec, ...]:
        return self.layers + (self.mtp if with_mtp else ())


def spec_from_config(
    config: Mapping[str, object], *, state_dtype: str | None = None, source_tokens: int | None = None
) -> ModelSpec:
    """Interpret a Hugging Face config (the parsed JSON of config.json, or `hf_config.to_dict()`).

    `state_dtype` overrides the element type of recurrent states; `source_tokens` is the length of an encoder's output
    for cross attention where the config does not fix it. Pure. Raises ModelConfigError with the names of the fields
    that are missing, impossible, or not understood.
    """
    raw, path = find_decoder(config)
    model_type = raw.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise ModelConfigError(f"{path}model_type must be text, not {shown(model_type)}")
    _refuse_encoders(raw, model_type or "", path)
    extra = conventions.omitted(model_type or "", raw)
    extra.update(_from_caller(config, state_dtype, source_tokens))
    fields = Fields(raw, path, extra)

    blocks = plan_of_blocks(fields)
    roles = blocks if blocks is not None else plan.layer_plan(fields)
    layers = _read_layers(fields, roles, _looks_across(config, fields, path))
    drafts = mtp.read(fields, roles)
    unknown = vocabulary.unexplained(fields)
    if unknown:
        raise ModelConfigError(f"cannot interpret {', '.join(unknown)} (model_type {shown(model_type)})")
    notes = _notes(fields, raw, layers, drafts)
    return ModelSpec(layers=layers, mtp=drafts, attention=attention_label(layers, fields), notes=notes)


def attention_label(layers: tuple[LayerSpec, ...], fields: Fields) -> str:
    """Families in the model, joined by +: its attention by number of KV heads (or mla) first, then the others."""
    labels: dict[str, None] = {}
    kinds = [cache for layer in layers for cache in layer.caches]
    for cache in kinds:
        if isinstance(cache, HeadsCache) and cache.kind != "cross":
            heads = _most_query_heads(fields)
            labels["mqa" if cache.heads == 1 and heads > 1 else "mha" if cache.heads >= heads else "gqa"] = None
            break
    for cache in kinds:
        label = cache.family if isinstance(cache, RecurrentState) else cache.kind
        if label != "full":
            labels[label] = None
    if any(isinstance(cache, LatentAttention) for cache in kinds):
        labels = {"mla": None} | {label: None for label in labels if label != "mla"}
    return "+".join(labels) or "none"


def _most_query_heads(fields: Fields) -> int:
    """Query heads for the label; models with a list of them per layer count as many as they have anywhere."""
    lists = [fields.peek(key) for key in QUERY_HEADS]
    counts = [item for found in lists if isinstance(found, list) for item in found if isinstance(item, int)]
    return max(counts) if counts else query_heads(fields)


def _read_layers(fields: Fields, roles: list[str], across: bool) -> tuple[LayerSpec, ...]:
    """One LayerSpec per cache-bearing position. Some models stack several attentions in one layer (LongCat)."""
    overrides = layer_overrides(fields, len(roles))
    sources = shared.sources(fields, roles)
    sublayers = checked_count(fields.value("attention_sublayers") or 1, "attention_sublayers", at_most=8)
    layers = []
    for index, role in enumerate(roles):
        view = fields.overlaid(overrides[index]) if index in overrides else fields
        caches: tuple[CacheSpec, ...]
        if index in sources:
            caches = (shared.SharedCache(source=sources[index]),)
        else:
            caches = registry.read_layer(role, view, index) * sublayers
        if across and role != plan.NOTHING:
            caches += cross.read(view, index)
        layers.append(LayerSpec(index=index, caches=caches))
    return tuple(layers)


def _looks_across(config: Mapping[str, object], fields: Fields, path: str) -> bool:
    """Whether every decoder layer also attends to an encoder."""
    wrapped = path.endswith("decoder.") and any(str(key).endswith("encoder") for key in config)
    return wrapped or fields.flag("is_encoder_decoder") or fields.flag("add_cross_attention")


def _refuse_encoders(raw: Mapping[str, object], model_type: str, path: str) -> None:
    if model_type in conventions.NO_KV_CACHE:
        raise ModelConfigError(f"{path}model_type = {model_type!r} keeps no KV cache that can be sized")
    architectures = raw.get("architectures")
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    encoder = model_type in conventions.ENCODERS_ONLY or any(_ENCODER_ARCHITECTURE.search(name) for name in named)
    if encoder and raw.get("is_decoder") is not True and raw.get("is_encoder_decoder") is not True:
        raise ModelConfigError(
            f"{path}model_type = {model_type!r} is an encoder (is_decoder is not true): it has no KV cache"
        )


def _from_caller(config: Mapping[str, object], state_dtype: str | None, source_tokens: int | None) -> dict[str, object]:
    said: dict[str, object] = {}
    if state_dtype is not None and state_dtype != "auto":
        said[STATE_DTYPE] = state_dtype
    source = source_tokens if source_tokens is not None else image_source_tokens(config)
    if source is not None:
        said[cross.SOURCE_TOKENS] = source
    return said


def _notes(
    fields: Fields,
    raw: Mapping[str, object],
    layers: tuple[LayerSpec, ...],
    drafts: tuple[LayerSpec, ...],
) -> tuple[str, ...]:
    notes = []
    filled = [key for key in fields.taken() if key not in (STATE_DTYPE, cross.SOURCE_TOKENS)]
    if filled:
        notes.append(f"not in the config, taken from the defaults of its family: {', '.join(filled)}")
    kinds = [cache for layer in layers for cache in layer.caches]
    if any(isinstance(cache, cross.CrossAttention) and cache.source_tokens is None for cache in kinds):
        notes.append(
            "the length of the encoder's output is not in the config: taken as long as the sequence (--source-len)"
        )
    if fields.flag("attention_k_eq_v"):
        notes.append("keys and values of the full layers share a projection but are stored apart, as engines do")
    assumed = any(
        tensor.dtype == "float32" for cache in kinds if isinstance(cache, RecurrentState) for tensor in cache.tensors
    )
    if assumed and not fields.active(STATE_DTYPE, "mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        notes.append(
            "the config does not name the type of the recurrent state: fp32, as its reference code (--state-dtype)"
        )
    if drafts:
        notes.append(f"{len(drafts)} MTP layer(s) are not counted; add them with --mtp if speculation uses them")
    model_type = raw.get("model_type")
    if model_type is None or conventions.family(str(model_type)) not in CHECKED_TYPES:
        notes.append(f"model_type {shown(model_type)} is new to kvtier: interpreted by its fields alone")
    if any(isinstance(cache, FullAttention) for cache in kinds) and not fields.active(*_KV_HEADS_SOURCES):
        notes.append(f"no number of KV heads in the config ({KV_HEADS[0]}): one for each query head")
    return tuple(notes)
