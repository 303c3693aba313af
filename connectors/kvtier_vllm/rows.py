"""Where in a row of vLLM's KV cache the numbers lie: what codecs need to know, taken from vLLM's own specs.

A row is, for each rank, the pages of all layers of a group one after the other, and each page as many blocks as make a
chunk. Inside a block vLLM's layout names the order (L layer, B block, H head, N token, C the channels of K, then V).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvtier.codec.calibration import Calibration, calibration_path, load_calibration, model_fingerprint
from kvtier.codec.form import ELEMENT_BYTES, Packing, RowForm
from kvtier.codec.registry import CodecChoice, needs_calibration
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.tiers.encoding import Encoding, GroupForm, encodings_of
from kvtier_vllm.compat import cpu_attention_kernel

_AXES = {"LBHNC": "lbhtkd", "LBNHC": "lbthkd", "BLHNC": "blhtkd", "BLNHC": "blthkd", "BHLNC": "bhltkd"}
_PACKING: dict[str, Packing] = {"vec": "channels", "vec16": "channels", "amx": "amx"}  # of vLLM's kernels for CPUs


def encodings(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: CacheConfig,
    group_ids: list[int],
    blocks_per_chunk: int,
    ranks: int,
    row_bytes: int,
) -> dict[str, Encoding]:
    """The codecs of the tiers, as configured. `row_bytes` may be padded. Raises ConfigError."""
    below = {tier: name for tier, name in config.codecs.items() if tier != "dram"}
    if not below:
        return {}
    if config.codecs.get("dram", "raw") != "raw":
        raise ConfigError(
            f"codecs names dram and {', '.join(sorted(below))}; tiers below it hold its rows as they are: "
            "name one or the other"
        )
    calibrated = [name for name in below.values() if needs_calibration(CodecChoice(name=name))]
    if calibrated and len(group_ids) > 1:
        raise ConfigError(
            f"codec {calibrated[0]} needs one cache for all layers; this model has {len(group_ids)} groups of layers, "
            "with windows of their own: use zstd or int8"
        )
    forms = {
        column: form_of(vllm_config, kv_cache_config, group_id, blocks_per_chunk, ranks)
        for column, group_id in enumerate(group_ids)
    }
    return encodings_of(
        below,
        config.codec_max_kl,
        forms,
        row_bytes,
        _calibration(vllm_config, config),
        allow_slow=config.allow_slow_codecs,
    )


def check_pages(kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig) -> None:
    """Compare what the engine registers with what `form_of` takes from its specs. Raises ConfigError where kernels work
    on smaller blocks than the cache manager's: tokens of a page then lie in another order."""
    for name, cache in kv_caches.items():
        if cache.shape[0] != kv_cache_config.num_blocks:
            raise ConfigError(
                f"vLLM splits every block of {name} into {cache.shape[0] // kv_cache_config.num_blocks} for its "
                "kernels, so that codecs cannot tell where a token is; lower --block-size to the kernels' own, or "
                "remove codecs"
            )


def memory_form(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: CacheConfig, group_ids: list[int], blocks: int
) -> RowForm | None:
    """The form of one rank's rows if memory keeps them as int8, None if it keeps them as they are. Raises ConfigError
    where that cannot be."""
    name = config.codecs.get("dram", "raw")
    if name == "raw":
        return None
    why = ""
    group = form_of(vllm_config, kv_cache_config, group_ids[0], blocks, 1)
    if name != "int8":
        why = "only int8 is decoded on the way to the device"
    elif len(group_ids) > 1:
        why = "this model has several groups of layers"
    elif not current_platform.is_cuda():
        why = "there is no CUDA device to decode it"
    elif group.refusal or group.form.kind != "kv":
        why = group.refusal or "a latent is not keys and values"
    if why:
        raise ConfigError(f"codecs: {name} for dram is not possible: {why}; remove dram from codecs")
    return group.form


def form_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group_id: int, blocks_per_chunk: int, ranks: int
) -> GroupForm:
    """The form of one group's rows. What vLLM packs in a way we cannot read is opaque, with the reason."""
    group = kv_cache_config.kv_cache_groups[group_id]
    spec, layers = group.kv_cache_spec, len(group.layer_names)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return _opaque(spec.page_size_bytes * blocks_per_chunk, ranks, "its layers have caches of different kinds")
    page_bytes, tokens = spec.page_size_bytes, spec.block_size * blocks_per_chunk
    share_bytes = page_bytes * layers * blocks_per_chunk
    dtype = str(getattr(spec, "dtype", "")).removeprefix("torch.")
    layout = vllm_config.cache_config.kv_cache_layout or ""
    if not isinstance(spec, AttentionSpec) or dtype not in ELEMENT_BYTES:
        return _opaque(share_bytes, ranks, f"the cache holds {dtype or 'no'} numbers, not {', '.join(ELEMENT_BYTES)}")
    if spec.page_size_bytes != spec.unpadded_page_size_bytes or spec.tokens_per_state != 1:
        return _opaque(share_bytes, ranks, "vLLM pads or compresses the pages of this model")
    sizes: dict[str, Any] = {"tokens": tokens, "dtype": dtype, "blocks": blocks_per_chunk, "layers": layers}
    if isinstance(spec, MLAAttentionSpec):
        axes = "lbhtkd" if blocks_per_chunk > 1 else "lhtkd"
        form = RowForm(kind="mla", heads=1, head_dim=spec.head_size, axes=axes, **sizes)
        return _fitting(form, share_bytes, ranks, 1)
    if layout not in _AXES:
        return _opaque(share_bytes, ranks, f"vLLM lays its cache out as {layout or 'nothing known'}")
    if spec.head_size_v != spec.head_size:
        return _opaque(share_bytes, ranks, "keys and values have different sizes")
    axes = _AXES[layout]
    packing: Packing = ""
    if current_platform.is_cpu():
        kernel = cpu_attention_kernel(spec.dtype, spec.block_size, spec.head_size)
        if kernel not in _PACKING:
            return _opaque(share_bytes, ranks, f"vLLM's CPU kernel {kernel!r} packs it in an order of its own")
        axes, packing = axes.replace("htkd", "hktd"), _PACKING[kernel]
    axes = axes if blocks_per_chunk > 1 else axes.replace("b", "")
    form = RowForm(heads=spec.num_kv_heads, head_dim=spec.head_size, axes=axes, packing=packing, **sizes)
    heads = vllm_config.model_config.get_total_num_kv_heads()
    return _fitting(form, share_bytes, ranks, max(1, ranks // heads))


def _fitting(form: RowForm, share_bytes: int, ranks: int, replicas: int) -> GroupForm:
    if form.row_bytes != share_bytes:
        return _opaque(
            share_bytes, ranks, f"its pages have {share_bytes} bytes, not the {form.row_bytes} of plain ones"
        )
    return GroupForm(form, ranks, replicas)


def _opaque(share_bytes: int, ranks: int, why: str) -> GroupForm:
    return GroupForm(RowForm(kind="opaque", opaque_bytes=share_bytes), ranks, 1, why)


def _calibration(vllm_config: VllmConfig, config: CacheConfig) -> Callable[[], Calibration]:
    """Reads the calibration when a codec asks for it."""

    def read() -> Calibration:
        fingerprint = model_fingerprint(_folder(vllm_config))
        path = Path(config.calibration) if config.calibration else calibration_path(fingerprint)
        if not path.exists():
            raise ConfigError(
                f"there is no calibration of this model at {path}: run kvtier calibrate "
                f"{vllm_config.model_config.model}, or name the file with the option calibration"
            )
        return load_calibration(path, fingerprint)

    return read


def _folder(vllm_config: VllmConfig) -> Path:
    """The folder of the model's files. Raises ConfigError if they are not on this machine."""
    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"the files of {model.model} are not found here ({error}); a codec that needs a calibration compares it "
            "with them: serve the model from a local folder"
        ) from error
