"""From a layer's role to the families that keep something for it, keyed by what the config says, never by its name."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.errors import ModelConfigError
from kvtier.model.sizing import chunked, cross, full, latent, plan, recurrent, sliding
from kvtier.model.sizing.cache import CacheSpec
from kvtier.model.sizing.fields import Fields
from kvtier.model.sizing.heads import uses_latent

Reader = Callable[[Fields, int], tuple[CacheSpec, ...]]


def read_layer(role: str, fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """The caches of layer `index`, whose role in the plan is `role`."""
    return _READERS[role](fields, index)


def _attention(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """Attention to everything: latent where the config has a latent rank, K and V otherwise."""
    if uses_latent(fields):
        return latent.read(fields, index)
    if fields.peek("use_mla") is False:
        fields.excuse(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim"))
    return full.read(fields, index)


def _indexed(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    if not fields.active("kv_lora_rank") or not fields.active("index_head_dim"):
        raise ModelConfigError(
            f"layer {index} attends to tokens an indexer picks, but {fields.name('kv_lora_rank')} or "
            f"{fields.name('index_head_dim')} is missing: a combination kvtier does not know"
        )
    return latent.read(fields, index)


def _windowed(reader: Reader, what: str) -> Reader:
    def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
        if uses_latent(fields):
            raise ModelConfigError(
                f"{fields.name('kv_lora_rank')} with a {what} layer ({index}) is a combination kvtier does not know"
            )
        return reader(fields, index)

    return read


def _both(first: Reader, second: Reader) -> Reader:
    return lambda fields, index: first(fields, index) + second(fields, index)


def _picked_blocks(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    return (*full.read(fields, index), latent.read_block_index(fields))


_sliding = _windowed(sliding.read, "sliding")

_READERS: dict[str, Reader] = {
    plan.FULL: _attention,
    plan.SLIDING: _sliding,
    plan.CHUNKED: _windowed(chunked.read, "chunked"),
    plan.RECURRENT: recurrent.read,
    plan.HYBRID: _both(_attention, recurrent.read),
    plan.HYBRID_SLIDING: _both(_sliding, recurrent.read),
    plan.CROSS: cross.read,
    plan.INDEXED: _indexed,
    plan.SPARSE: _picked_blocks,
    plan.NOTHING: lambda fields, index: (),
}
