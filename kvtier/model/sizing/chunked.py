"""Chunked local attention (Llama 4): tokens see only their own chunk, so the cache empties at each chunk boundary."""

from __future__ import annotations

from typing import ClassVar

from kvtier.model.sizing.cache import CacheSpec, HeadsCache
from kvtier.model.sizing.fields import MAX_TOKENS, Fields
from kvtier.model.sizing.heads import head_dims, kv_heads


class ChunkedAttention(HeadsCache, frozen=True):
    """K and V of the current chunk of up to `chunk` tokens. Sized by its fullest moment, as an engine must."""

    kind: ClassVar[str] = "chunked"
    chunk: int

    def held_tokens(self, tokens: int) -> int:
        return min(tokens, self.chunk)

    def peak_blocks(self, tokens: int, block_tokens: int) -> int:
        """Chunks start at multiples of their length, so they need an extra block only if blocks do not divide them."""
        whole = -(-self.chunk // block_tokens)
        return min(-(-tokens // block_tokens), whole if self.chunk % block_tokens == 0 else whole + 1)


def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    key_dim, value_dim = head_dims(fields)
    return (
        ChunkedAttention(
            heads=kv_heads(fields, index),
            key_dim=key_dim,
            value_dim=value_dim,
            chunk=fields.count("attention_chunk_size", at_most=MAX_TOKENS),
        ),
    )
