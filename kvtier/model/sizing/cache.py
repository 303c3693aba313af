"""What a layer keeps for a sequence: the interface every family of attention implements, and one layer of a model."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvtier.errors import ConfigError
from kvtier.model.sizing.formats import KVFormat


class CacheSpec(msgspec.Struct, frozen=True):
    """One cache of one layer: what an engine allocates as one page per block (or one slot per sequence).

    Tokens and bytes are those of a single sequence. `tp` is the number of ranks the heads are shared by. All methods
    are pure; `row_bytes` raises ConfigError when the heads cannot be shared that way.
    """

    kind: ClassVar[str]
    grows: ClassVar[bool] = False  # every further token adds bytes for ever

    def held_tokens(self, tokens: int) -> int:
        """Tokens whose K and V must still be there after `tokens` tokens."""
        return 0

    def peak_blocks(self, tokens: int, block_tokens: int) -> int:
        """Blocks allocated at the worst moment up to `tokens` tokens; never less than `held_tokens` needs."""
        return -(-self.held_tokens(tokens) // block_tokens)

    def payload_bits(self, form: KVFormat) -> int:
        """Bits of one token over all heads: the numbers themselves, without scales."""
        return 0

    def row_bytes(self, form: KVFormat, tp: int) -> int:
        """Bytes of one token on one rank, scales included. With tp = 1, one whole copy."""
        return 0

    def copies(self, tp: int) -> int:
        """How many ranks hold the same bytes."""
        return 1

    def state_bytes(self, model_dtype_bytes: int, tp: int) -> int:
        """Bytes on one rank that do not depend on the number of tokens."""
        return 0


class HeadsCache(CacheSpec, frozen=True):
    """A cache of K and V vectors for a number of KV heads; `value_dim` may differ from `key_dim`."""

    heads: int
    key_dim: int
    value_dim: int

    def payload_bits(self, form: KVFormat) -> int:
        return self.heads * (self.key_dim + self.value_dim) * form.bits

    def row_bytes(self, form: KVFormat, tp: int) -> int:
        held = share(self.heads, tp, "KV heads")
        return held * (form.side_bytes(self.key_dim) + form.side_bytes(self.value_dim))

    def copies(self, tp: int) -> int:
        return max(1, tp // self.heads)


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer of the decoder: its number and its caches (none for a layer without attention or state)."""

    index: int
    caches: tuple[CacheSpec, ...] = ()


def share(units: int, ranks: int, what: str) -> int:
    """Units each of `ranks` holds: an equal part, or one replicated unit when there are fewer than ranks.

    The rule of the engines: they refuse every other split, so it raises here too.
    """
    if units >= ranks:
        if units % ranks:
            raise ConfigError(f"tp = {ranks} does not divide {units} {what}")
        return units // ranks
    if ranks % units:
        raise ConfigError(f"tp = {ranks} is not a multiple of {units} {what}, so they cannot be replicated evenly")
    return 1
