"""kv_connector_extra_config: ours, checked strictly, beside the few keys that are vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError

# Set by the connector, or read by vLLM's offloading code itself.
_ENGINE_KEYS = frozenset(
    {"spec_name", "spec_module_path", "blocks_per_chunk", "block_size", "cpu_bytes_to_use", "offload_prompt_only"}
)


def cache_config(extra_config: Mapping[str, Any]) -> CacheConfig:
    """The checked configuration. Raises ConfigError saying what to change."""
    config = CacheConfig.from_mapping({k: v for k, v in extra_config.items() if k not in _ENGINE_KEYS})
    if not config.dram_bytes:
        raise ConfigError('dram_bytes is missing from kv_connector_extra_config; set it, for example "32GiB"')
    return config
