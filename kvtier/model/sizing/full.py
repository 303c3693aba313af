"""Full attention: every token's K and V for ever. MHA, GQA and MQA differ only in the number of KV heads."""

from __future__ import annotations

from typing import ClassVar

from kvtier.model.sizing.cache import CacheSpec, HeadsCache
from kvtier.model.sizing.fields import Fields
from kvtier.model.sizing.heads import head_dims, kv_heads


class FullAttention(HeadsCache, frozen=True):
    """K and V of every token."""

    kind: ClassVar[str] = "full"
    grows: ClassVar[bool] = True

    def held_tokens(self, tokens: int) -> int:
        return tokens


def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """A full-attention layer. Models that mix window sizes may give their global layers dimensions of their own."""
    heads = kv_heads(fields, index)
    key_dim, value_dim = head_dims(fields)
    # Gemma 4: global layers have wider heads, and fewer of them where K and V come from one projection. K is rotated
    # and V is not, so both are stored although they started out equal.
    key_equals_value = fields.flag("attention_k_eq_v")
    global_heads = fields.maybe_count("num_global_key_value_heads")
    global_dim = fields.maybe_count("global_head_dim")
    if global_dim is not None:
        key_dim = value_dim = global_dim
    if global_heads is not None and key_equals_value:
        heads = global_heads
    return (FullAttention(heads=heads, key_dim=key_dim, value_dim=value_dim),)
