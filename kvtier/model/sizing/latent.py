"""Multi-head latent attention (DeepSeek): one vector per token, the same on every rank; and the keys of its indexer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvtier.errors import ModelConfigError
from kvtier.model.sizing.cache import CacheSpec
from kvtier.model.sizing.fields import MAX_TOKENS, Fields, checked_length, shown
from kvtier.model.sizing.formats import KVFormat

_INDEX_SCALE_GROUP = 128
_INDEX_SCALE_BYTES = 4
_INDEX_FREQUENCY = ("index_topk_freq", "index_skip_topk_offset")


class LatentAttention(CacheSpec, frozen=True):
    """The compressed latent of `rank` values and the rotary part of `rope` values, shared by all heads.

    `sparse`: the layer attends to tokens an indexer picks, which decides the 8-bit layout its kernels read.
    """

    kind: ClassVar[str] = "mla"
    grows: ClassVar[bool] = True
    rank: int
    rope: int
    sparse: bool = False

    def held_tokens(self, tokens: int) -> int:
        return tokens

    def payload_bits(self, form: KVFormat) -> int:
        return form.latent_payload_bits(self.rank, self.rope, self.sparse)

    def row_bytes(self, form: KVFormat, tp: int) -> int:
        return form.latent_bytes(self.rank, self.rope, self.sparse)

    def copies(self, tp: int) -> int:
        return tp


class IndexerKeys(CacheSpec, frozen=True):
    """One key per token by which an indexer finds tokens or blocks, whatever the KV dtype.

    DeepSeek's are fp8 with an fp32 scale per 128 values; `element_bits` = 16 is MiniMax-M3's plain form.
    """

    kind: ClassVar[str] = "indexer"
    grows: ClassVar[bool] = True
    width: int
    element_bits: int = 8

    def held_tokens(self, tokens: int) -> int:
        return tokens

    def payload_bits(self, form: KVFormat) -> int:
        return self.width * self.element_bits

    def row_bytes(self, form: KVFormat, tp: int) -> int:
        scales = -(-self.width // _INDEX_SCALE_GROUP) * _INDEX_SCALE_BYTES if self.element_bits == 8 else 0
        return self.width * self.element_bits // 8 + scales

    def copies(self, tp: int) -> int:
        return tp


def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """An MLA layer. The number of heads and their widths do not matter: they are rebuilt from the latent."""
    rank = fields.count("kv_lora_rank")
    rope = fields.maybe_count("qk_rope_head_dim", at_least=0)
    if rope is None:
        raise ModelConfigError(f"{fields.name('qk_rope_head_dim')} is missing")
    fields.excuse(
        ("num_key_value_heads", "num_attention_heads", "head_dim", "v_head_dim", "qk_nope_head_dim", "qk_head_dim",
         "index_topk_pattern", "indexer_types", *_INDEX_FREQUENCY)
    )  # fmt: skip
    if not fields.active("index_head_dim"):
        return (LatentAttention(rank=rank, rope=rope),)
    latent = LatentAttention(rank=rank, rope=rope, sparse=True)
    if not _runs_indexer(fields, index):
        return (latent,)
    return (latent, IndexerKeys(width=fields.count("index_head_dim")))


def read_block_index(fields: Fields) -> IndexerKeys:
    """The index keys of a layer that attends to picked blocks of ordinary K and V (MiniMax-M3)."""
    width = fields.maybe_count("index_head_dim")
    if width is None:
        width = fields.section("sparse_attention_config").count("sparse_index_dim")
    return IndexerKeys(width=width, element_bits=16)


def _runs_indexer(fields: Fields, index: int) -> bool:
    """Whether layer `index` keeps keys of its own. Some models reuse the tokens picked by an earlier layer."""
    layers = fields.count("num_hidden_layers", at_most=MAX_TOKENS)
    if index >= layers:  # an MTP layer is built like the first layers
        return True
    types = fields.items("indexer_types")
    if types is None and fields.active("index_topk_pattern"):
        pattern = fields.value("index_topk_pattern")
        types = list(pattern) if isinstance(pattern, (str, list)) else [pattern]
    if types is not None:
        checked_length(types, fields.name("indexer_types"), layers)
        return _is_full_indexer(types, index, fields)
    frequency = fields.maybe_count("index_topk_freq", at_least=0) or 1
    offset = fields.maybe_count("index_skip_topk_offset", at_least=0)
    return max(index - (2 if offset is None else offset) + 1, 0) % frequency == 0


def _is_full_indexer(types: Sequence[object], index: int, fields: Fields) -> bool:
    kind = types[index]
    if kind not in ("full", "shared", "F", "S"):
        raise ModelConfigError(f"{fields.name('indexer_types')}[{index}] = {shown(kind)} is not full or shared")
    return kind in ("full", "F")
