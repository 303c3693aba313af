"""Who the bytes belong to: the key space and the layout of a running vLLM, from its own configuration."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.cache.geometry import Geometry
from kvtier.cache.weights import sample, weights_fingerprint
from kvtier.config import CacheConfig
from kvtier.errors import EngineMismatchError
from kvtier.model.keys import KeySpace
from kvtier.model.layout import GroupLayout, Layout

logger = init_logger("vllm.kvtier")


def layout_of(kv_cache_config: KVCacheConfig, row_bytes: int, ranks: int, dtype: str) -> Layout:
    """The layout of one row, from the engine's own KV-cache specs. Raises EngineMismatchError for what we refuse."""
    groups = []
    for group_id in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        kind, window = _kind(spec)
        groups.append(
            GroupLayout(
                kind=kind,
                block_tokens=spec.block_size,
                page_bytes=_page_bytes(spec, len(group.layer_names)),
                layers=tuple(group.layer_names),
                window_tokens=window,
            )
        )
    sizes = {group.block_tokens for group in groups}
    if len(sizes) > 1:
        raise EngineMismatchError(
            f"the KV-cache groups of this model have different block sizes ({sorted(sizes)} tokens); "
            "kvtier needs one size for all groups"
        )
    return Layout(engine="vllm", dtype=dtype, groups=tuple(groups), row_bytes=row_bytes, ranks=ranks)


def geometry_of(layout: Layout, blocks_per_chunk: int) -> Geometry:
    """What the cache needs to know of a layout: block size and which groups are windows, in kvtier's blocks."""
    size = layout.groups[0].block_tokens * blocks_per_chunk
    windows = {
        index: -(-group.window_tokens // size) for index, group in enumerate(layout.groups) if group.window_tokens
    }
    return Geometry(size, len(layout.groups), windows, layout.dtype.removeprefix("torch."))


def key_space_of(vllm_config: VllmConfig, layout: Layout, config: CacheConfig, blocks_per_chunk: int) -> KeySpace:
    """Everything that must match for a block to be reusable. Adapter and tenant salt are in vLLM's block hashes;
    the adapter's path is added per request."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    rope = getattr(model.hf_text_config, "rope_parameters", None) or getattr(model.hf_text_config, "rope_scaling", None)
    return KeySpace(
        weights=config.weights_fingerprint or weights_fingerprint(model.model, model.revision),
        kv_dtype=layout.dtype,
        block_tokens=layout.groups[0].block_tokens * blocks_per_chunk,
        layout=layout.digest,
        tokenizer=f"{model.tokenizer}@{model.tokenizer_revision}",
        scale_layout=str(getattr(cache, "calculate_kv_scales", "")),
        position_encoding=json.dumps(rope, sort_keys=True, default=str),
        parallel_layout=f"tp{parallel.tensor_parallel_size}",
        hash_scheme=f"vllm:{cache.prefix_caching_hash_algo}",
        epoch=config.epoch,
    )


def adapter_fingerprint(lora_request: Any) -> str:
    """Names an adapter by path and content, so that one reloaded under the same name is another (vllm#44950)."""
    if lora_request is None:
        return ""
    digest = hashlib.sha256(f"{lora_request.lora_name}\0{lora_request.lora_path}\0".encode())
    folder = Path(lora_request.lora_path)
    try:
        for path in sorted(folder.glob("adapter_*")) if folder.is_dir() else []:
            digest.update(path.name.encode() + b"\0")
            sample(path, digest)
    except OSError as error:
        # Unreadable now: no other adapter shall be taken for it, so a name that nothing else has.
        logger.warning("kvtier: the adapter %s cannot be read, its blocks are not reused: %s", folder, error)
        digest.update(os.urandom(32))
    return digest.hexdigest()


def _kind(spec: KVCacheSpec) -> tuple[str, int]:
    if isinstance(spec, MambaSpec):
        raise EngineMismatchError(
            "this model has recurrent (Mamba-like) layers, whose state is not a cache of blocks; kvtier does not "
            "support it yet. Serve it without --kv-transfer-config"
        )
    if isinstance(spec, SlidingWindowSpec):
        return "sliding", spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked", spec.attention_chunk_size
    if isinstance(spec, MLAAttentionSpec):
        return "mla", 0
    if isinstance(spec, FullAttentionSpec):
        return "full", 0
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return "uniform", 0
    raise EngineMismatchError(
        f"vLLM reports a KV-cache group of kind {type(spec).__name__}, which kvtier does not know"
    )


def _page_bytes(spec: KVCacheSpec, layers: int) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.page_size_bytes // layers
    return int(spec.page_size_bytes)
