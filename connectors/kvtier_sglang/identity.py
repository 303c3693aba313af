"""Who the bytes belong to: SGLang's page keys name tokens, adapter and salt; everything else is said here."""

from __future__ import annotations

from typing import Any

import msgspec

from kvtier.cache.weights import weights_fingerprint
from kvtier.config import CacheConfig
from kvtier.model.keys import KeySpace
from kvtier.model.layout import GroupLayout, Layout
from kvtier_sglang.compat import keys_name_tenants, server_settings
from kvtier_sglang.pages import HostPages


def layout_of(pool: Any, pages: HostPages) -> Layout:
    """The arrangement of one row, from the host pool itself."""
    layers = tuple(str(int(getattr(pool, "start_layer", 0) or 0) + i) for i in range(int(pool.layer_num)))
    shape = [
        getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim", "kv_lora_rank", "kv_cache_dim")
    ]
    group = GroupLayout(
        kind=f"{type(pool).__name__}/{pages.layout}/{shape}/{'staged' if pages.staged else 'direct'}",
        block_tokens=pages.page_tokens,
        page_bytes=max(1, sum(pages.piece_bytes) // len(layers)),
        layers=layers,
    )
    return Layout(engine="sglang", dtype=str(pool.dtype), groups=(group,) * pages.groups, row_bytes=pages.row_bytes)


def key_space_of(storage_config: Any, layout: Layout, config: CacheConfig) -> KeySpace:
    """Everything that must match for a page to be reusable.

    A latent page (MLA) is the same on every tensor-parallel rank, so those ranks share a key space; all others differ.
    """

    def field(name: str, default: Any = 0) -> Any:
        value = getattr(storage_config, name, None)
        return default if value is None else value

    settings = server_settings()
    name = str(field("model_name", ""))
    ranks = [] if field("is_mla_model", False) else [f"tp{field('tp_rank')}/{field('tp_size', 1)}"]
    ranks += [f"{axis}{field(f'{axis}_rank')}/{field(f'{axis}_size', 1)}" for axis in ("pp", "attn_cp", "dcp")]
    ranks.append(f"lcm{field('tp_lcm_size')}/{int(bool(field('should_split_heads')))}")
    scheme = "tokens, adapter, salt" if keys_name_tenants() else "tokens"
    return KeySpace(
        weights=config.weights_fingerprint
        or weights_fingerprint(getattr(settings, "model_path", None) or name, getattr(settings, "revision", None)),
        kv_dtype=f"{layout.dtype} {getattr(settings, 'kv_cache_dtype', '')}",
        block_tokens=layout.groups[0].block_tokens,
        layout=layout.digest,
        # Pools that pack pages their own way say so by a tag after the model's name.
        scale_layout=name.removeprefix(str(getattr(settings, "served_model_name", None) or name)),
        position_encoding=str(getattr(settings, "json_model_override_args", "")),
        parallel_layout=" ".join(ranks),
        # The page hash is over token ids, so the tokenizer does not matter; speculative decoding changes the hash.
        hash_scheme=f"sglang sha256 of {scheme} {getattr(settings, 'speculative_algorithm', None) or ''}",
        epoch=config.epoch,
    )


def updated_weights(space: KeySpace, version: str) -> KeySpace:
    """The key space after the weights were changed under a running server (sglang#26792)."""
    return msgspec.structs.replace(space, weights=f"{space.weights}+{version}")
