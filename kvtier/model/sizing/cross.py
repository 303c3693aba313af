"""Cross attention: K and V of an encoder's output, written once and read by every decoded token."""

from __future__ import annotations

from typing import ClassVar

from kvtier.model.sizing.cache import CacheSpec, HeadsCache
from kvtier.model.sizing.fields import MAX_TOKENS, Fields
from kvtier.model.sizing.heads import head_dims, kv_heads

SOURCE_TOKENS = "source_tokens"  # how a caller tells the reader the length of the encoder's output


class CrossAttention(HeadsCache, frozen=True):
    """K and V of `source_tokens` encoder positions; None when the config does not fix them and nobody has said."""

    kind: ClassVar[str] = "cross"
    source_tokens: int | None

    def held_tokens(self, tokens: int) -> int:
        """A source of unknown length is taken to be as long as the sequence; the report says so."""
        return tokens if self.source_tokens is None else self.source_tokens


def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """A layer that only looks across (Mllama)."""
    key_dim, value_dim = head_dims(fields)
    heads = kv_heads(fields, index)
    return (CrossAttention(heads=heads, key_dim=key_dim, value_dim=value_dim, source_tokens=source_length(fields)),)


def source_length(fields: Fields) -> int | None:
    """Encoder positions: what the caller said, or what the config fixes."""
    return fields.maybe_count(SOURCE_TOKENS, "max_source_positions", at_most=MAX_TOKENS)
