"""The storage level's extra configuration: ours, checked strictly, beside the keys that are SGLang's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.tiers.open import configured_tiers

# Read by SGLang itself: how to find this class, and how it prefetches. Some versions hand them on, some do not.
_ENGINE_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)

# A storage level sees neither the device, nor the queue, nor requests: these would do nothing, so they are errors.
_VLLM_KEYS = (
    "hbm_policy", "look_ahead", "control", "hint_pin_bytes", "canary_share", "memory_checks",
    "store_generated", "lossy_requests",
)  # fmt: skip

_FOR_HINTS = ("control", "hint_pin_bytes")


def cache_config(extra_config: Mapping[str, Any] | None) -> CacheConfig:
    """The checked configuration. Raises ConfigError saying what to change."""
    given = dict(extra_config or {})
    if not given.get("interface_v1"):
        raise ConfigError(
            'kvtier reads and writes host pages in place: add "interface_v1": 1 to '
            "--hicache-storage-backend-extra-config"
        )
    config = CacheConfig.from_mapping({key: value for key, value in given.items() if key not in _ENGINE_KEYS})
    if config.dram_bytes:
        raise ConfigError(
            "dram_bytes has no meaning under SGLang, whose HiCache owns host memory; remove it and set --hicache-size"
        )
    unset = CacheConfig()
    for key in _VLLM_KEYS:
        if getattr(config, key) != getattr(unset, key):
            instead = "; docs/sglang.md says what to send instead of hints" if key in _FOR_HINTS else ""
            raise ConfigError(f"{key} has no effect under SGLang, only under vLLM; remove it{instead}")
    if not configured_tiers(config):
        raise ConfigError(
            'kvtier has no tier to keep pages in; set nvme_path and nvme_bytes, for example "nvme_path": "/cache", '
            '"nvme_bytes": "500GiB", or shared_fs_path and shared_fs_bytes'
        )
    return config
