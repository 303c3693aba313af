"""Recurrent layers: a state of fixed size instead of a cache that grows. One reader per kind of recurrence.

Shapes follow the engines: a causal convolution of kernel k keeps k - 1 columns. Where the config does not name the type
of the recurrence's state, it is the one that transformers keeps: fp32, except for lightning attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from kvtier.errors import ConfigError, ModelConfigError
from kvtier.model.sizing.cache import CacheSpec, share
from kvtier.model.sizing.fields import MAX_HEADS, Fields, shown
from kvtier.model.sizing.formats import element_bytes
from kvtier.model.sizing.heads import HEAD_WIDTH, QUERY_HEADS, WIDTH, query_heads
from kvtier.model.sizing.vocabulary import unexplained

STATE_DTYPE = "state_dtype"  # how a caller overrides the state's element type
MODEL_DTYPE = "model"
_STATE_DTYPES = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of a state: `units` parts of `unit_elements` elements that tensor parallelism shares out."""

    name: str
    units: int
    unit_elements: int
    dtype: str = MODEL_DTYPE


class RecurrentState(CacheSpec, frozen=True):
    """The state of one layer. `family` says which recurrence; it decides nothing but the label."""

    kind: ClassVar[str] = "recurrent"
    family: str
    tensors: tuple[StateTensor, ...]

    def copies(self, tp: int) -> int:
        return max(max(1, tp // tensor.units) for tensor in self.tensors)

    def state_bytes(self, model_dtype_bytes: int, tp: int) -> int:
        return sum(
            share(tensor.units, tp, f"units of the {self.family} {tensor.name} state")
            * tensor.unit_elements
            * (model_dtype_bytes if tensor.dtype == MODEL_DTYPE else element_bytes(tensor.dtype))
            for tensor in self.tensors
        )


def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """A recurrent layer, of the first kind whose fields the config has."""
    for family, triggers, reader in _FAMILIES:
        if fields.active(*triggers):
            return (RecurrentState(family=family, tensors=reader(fields)),)
    odd = ", ".join(unexplained(fields)) or "no field describes it"
    raise ModelConfigError(f"layer {index} keeps a recurrent state that kvtier cannot size ({odd})")


def is_recurrent(fields: Fields) -> bool:
    """Whether any field that sizes a state is active."""
    return any(fields.active(*triggers) for _, triggers, _ in _FAMILIES)


def state_keys() -> frozenset[str]:
    """Every field a state may be read from, for models whose layer plan has no recurrent layer after all."""
    return _ALL_KEYS


def _state_dtype(fields: Fields, unsaid: str = "float32") -> str:
    """The element type of the recurrence: the caller's, the config's, or what the reference code of the kind uses."""
    for key in (STATE_DTYPE, *_STATE_DTYPES):
        found = fields.text(key)
        if found is not None and found != "auto":
            try:
                element_bytes(found)
            except ConfigError as error:
                raise ModelConfigError(f"{fields.name(key)} = {shown(found)} is not an element type") from error
            return found
    return unsaid


def _conv(channels_units: int, unit_channels: int, kernel: int, name: str = "conv") -> StateTensor:
    return StateTensor(name=name, units=channels_units, unit_elements=unit_channels * (kernel - 1))


def _delta_net(fields: Fields) -> tuple[StateTensor, ...]:
    """Gated DeltaNet: convolution over q, k and v, and one key x value matrix per value head (Qwen3-Next, Qwen3.5)."""
    key_heads = fields.count("linear_num_key_heads", at_most=MAX_HEADS)
    value_heads = fields.count("linear_num_value_heads", at_most=MAX_HEADS)
    key_dim = fields.count("linear_key_head_dim")
    value_dim = fields.count("linear_value_head_dim")
    kernel = fields.count("linear_conv_kernel_dim")
    return (
        _conv(key_heads, 2 * key_dim, kernel, "conv of q and k"),
        _conv(value_heads, value_dim, kernel, "conv of v"),
        StateTensor("delta", value_heads, key_dim * value_dim, _state_dtype(fields)),
    )


def _kimi_delta(fields: Fields) -> tuple[StateTensor, ...]:
    """Kimi Delta Attention: as many key as value heads, in a section of the config or in flat fields."""
    if fields.active("linear_attn_config"):
        inner = fields.section("linear_attn_config")
        heads, width = inner.count("num_heads", at_most=MAX_HEADS), inner.count("head_dim")
        kernel = inner.count("short_conv_kernel_size")
    else:
        heads, width = fields.count("linear_num_heads", at_most=MAX_HEADS), fields.count("linear_head_dim")
        kernel = fields.count("linear_conv_kernel_dim")
    return (_conv(heads, 3 * width, kernel), StateTensor("delta", heads, width * width, _state_dtype(fields)))


def _mamba2(fields: Fields) -> tuple[StateTensor, ...]:
    """Mamba-2: convolution over x, B and C, and one head x state matrix per head."""
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", at_most=MAX_HEADS)
    width = None
    if fields.value("mamba_d_head") != "auto":
        width = fields.maybe_count("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    state = fields.count("mamba_d_state", "ssm_state_size", "state_size")
    kernel = fields.count("mamba_d_conv", "conv_kernel")
    groups = fields.count(*_GROUPS, at_most=MAX_HEADS)
    inner = fields.maybe_count("mamba_d_ssm")
    if width is None:
        width = fields.maybe_count(*HEAD_WIDTH[:1]) if fields.value("mamba_d_state") is None else None
    if width is None:
        inner = inner or _expanded(fields)
        if inner % heads:
            raise ModelConfigError(f"{fields.name('mamba_d_head')} is missing and {heads} heads do not divide {inner}")
        width = inner // heads
    if inner is not None and inner != heads * width:
        raise ModelConfigError(f"{fields.name('mamba_d_ssm')} = {inner} is not {heads} heads of {width}")
    fields.excuse(("mamba_expand", "expand", "attention_hidden_size"))
    return (
        _conv(heads, width, kernel, "conv of x"),
        _conv(groups, 2 * state, kernel, "conv of B and C"),
        StateTensor("ssm", heads, width * state, _state_dtype(fields)),
    )


def _mamba1(fields: Fields) -> tuple[StateTensor, ...]:
    """Mamba: convolution and state over the expanded width."""
    state = fields.count("mamba_d_state", "state_size", "ssm_state_size")
    kernel = fields.count("mamba_d_conv", "conv_kernel")
    standalone = not any(fields.value(key) is not None for key in QUERY_HEADS)
    inner = fields.maybe_count("intermediate_size") if standalone else None  # elsewhere that is the width of the MLP
    inner = inner or _expanded(fields)
    fields.excuse(("mamba_expand", "expand", "n_mamba_heads", "attention_hidden_size"))
    return (_conv(inner, 1, kernel), StateTensor("ssm", inner, state, _state_dtype(fields)))


def _expanded(fields: Fields) -> int:
    return fields.count("mamba_expand", "expand", at_most=1024) * fields.count(*WIDTH)


def _lightning(fields: Fields) -> tuple[StateTensor, ...]:
    """Lightning attention (MiniMax-01): one square matrix per query head."""
    heads = query_heads(fields)
    width = fields.maybe_count(*HEAD_WIDTH)
    if width is None:
        hidden = fields.count(*WIDTH)
        if hidden % heads:
            raise ModelConfigError(f"{fields.name('head_dim')} is missing and {heads} heads do not divide {hidden}")
        width = hidden // heads
    return (StateTensor("kv", heads, width * width, _state_dtype(fields, unsaid=MODEL_DTYPE)),)


def _rg_lru(fields: Fields) -> tuple[StateTensor, ...]:
    """Real-gated linear recurrent unit (RecurrentGemma): one value per channel and a short convolution."""
    width = fields.maybe_count("lru_width") or fields.count(*WIDTH)
    kernel = fields.count("conv1d_width")
    return (_conv(width, 1, kernel), StateTensor("lru", width, 1, _state_dtype(fields)))


def _short_conv(fields: Fields) -> tuple[StateTensor, ...]:
    """Gated short convolution (LFM2): only the columns of the convolution."""
    return (_conv(fields.count(*WIDTH), 1, fields.count("conv_L_cache")),)


def _rwkv(fields: Fields) -> tuple[StateTensor, ...]:
    """RWKV-4: the last input of both mixers, and numerator, denominator and maximum of the weighted sum."""
    hidden = fields.count(*WIDTH)
    inner = fields.count("attention_hidden_size")
    return (StateTensor("shift", hidden, 2), StateTensor("wkv", inner, 3, _state_dtype(fields)))


# What the config must have for each kind, most specific first. The order matters where one kind's fields include
# another's: Mamba-2 adds heads to Mamba's fields.
_FAMILIES: tuple[tuple[str, tuple[str, ...], Callable[[Fields], tuple[StateTensor, ...]]], ...] = (
    ("kda", ("linear_attn_config", "linear_num_heads"), _kimi_delta),
    ("gdn", ("linear_num_value_heads",), _delta_net),
    ("mamba2", ("mamba_n_heads", "mamba_num_heads", "mamba_headdim", *_GROUPS), _mamba2),
    ("mamba1", ("mamba_d_state", "state_size"), _mamba1),
    ("rg_lru", ("lru_width", "conv1d_width"), _rg_lru),
    ("short_conv", ("conv_L_cache",), _short_conv),
    ("lightning", ("attn_type_list", "linear_attn_alpha_factor"), _lightning),
    ("rwkv4", ("attention_hidden_size",), _rwkv),
)

_ALL_KEYS_TEXT = """
    linear_attn_config linear_num_heads linear_head_dim linear_conv_kernel_dim linear_num_key_heads
    linear_num_value_heads linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_num_heads
    n_mamba_heads mamba_d_head mamba_head_dim mamba_headdim mamba_n_groups n_groups mamba_ngroups
    mamba_d_state ssm_state_size state_size mamba_d_conv conv_kernel mamba_d_ssm mamba_expand expand lru_width
    conv1d_width conv_L_cache linear_attn_alpha_factor linear_attn_beta_factor attention_hidden_size
"""
_ALL_KEYS = frozenset(_ALL_KEYS_TEXT.split())
