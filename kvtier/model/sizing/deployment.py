"""How a model is spread over ranks, and in which form its cache is kept there."""

from __future__ import annotations

import msgspec

from kvtier.errors import ConfigError
from kvtier.model.sizing.cache import LayerSpec
from kvtier.model.sizing.formats import BF16, KVFormat

_MAX_RANKS = 1 << 16
_MAX_BLOCK_TOKENS = 1 << 20


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Parallelism and layout. `dp_attention`: the `tp` ranks of a stage each attend for their own sequences.

    `page_alignment` rounds each page up to a multiple of so many bytes, for engines and media that pad.
    """

    tp: int = 1
    pp: int = 1
    dp_attention: bool = False
    form: KVFormat = BF16
    block_tokens: int = 16
    model_dtype_bytes: int = 2
    page_alignment: int = 1

    def __post_init__(self) -> None:
        for name, value, most in (
            ("tp", self.tp, _MAX_RANKS),
            ("pp", self.pp, _MAX_RANKS),
            ("block-size", self.block_tokens, _MAX_BLOCK_TOKENS),
            ("model_dtype_bytes", self.model_dtype_bytes, 8),
            ("page_alignment", self.page_alignment, 1 << 30),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name} must be a whole number between 1 and {most}, not {value!r}")

    @property
    def attention_tp(self) -> int:
        """Ranks that share the heads of one sequence."""
        return 1 if self.dp_attention else self.tp

    @property
    def sequence_owners(self) -> int:
        """Groups of ranks that hold sequences independently of each other."""
        return self.tp if self.dp_attention else 1


def pipeline_stages(layers: tuple[LayerSpec, ...], pp: int) -> list[tuple[LayerSpec, ...]]:
    """The layers of each pipeline stage, split as vLLM does: a remainder goes to the stages before the last.

    Draft layers (numbered beyond the model's own) belong to the last stage, where the output is computed.
    """
    if pp > len(layers):
        raise ConfigError(f"pp = {pp} stages for {len(layers)} layers")
    sizes = [len(layers) // pp] * pp
    for back in range(2, len(layers) % pp + 2):
        sizes[-back] += 1
    stages, start = [], 0
    for size in sizes:
        stages.append(layers[start : start + size])
        start += size
    return stages
