"""Which part of a node's tiers belongs to one rank of a server."""

from __future__ import annotations

from typing import Any

from kvtier.config import CacheConfig
from kvtier.errors import EngineMismatchError
from kvtier.model.keys import KeySpace
from kvtier.tiers.open import SHARED_TIERS, Share, Site, configured_tiers
from kvtier_sglang.compat import server_settings


def site_of(config: CacheConfig, storage_config: Any, space: KeySpace, layout_digest: str, row_bytes: int) -> Site:
    """What this rank's tiers are opened for: the ranks of a node share its caps evenly. Raises EngineMismatchError."""
    tp_size = int(getattr(storage_config, "tp_size", 1) or 1)
    own = [name for name in configured_tiers(config) if name not in SHARED_TIERS]
    if getattr(storage_config, "is_mla_model", False) and tp_size > 1 and own:
        raise EngineMismatchError(
            "with latent attention (MLA) only the first tensor-parallel rank writes pages, and a tier of one process "
            f"({', '.join(own)}) is not seen by the others; configure shared tiers only (shared_fs_path, pool_master)"
        )
    sizes = [int(getattr(storage_config, f"{name}_size", 1) or 1) for name in ("pp", "attn_cp")]
    settings = server_settings()
    replicas = int(getattr(settings, "dp_size", 1) or 1) if getattr(settings, "enable_dp_attention", False) else 1
    ranks = max(1, tp_size * sizes[0] * sizes[1] * replicas // int(getattr(settings, "nnodes", 1) or 1))
    numbers = [int(getattr(storage_config, f"{name}_rank", 0) or 0) for name in ("dp", "pp", "attn_cp", "tp")]
    share = Share(ranks, "rank-" + "-".join(map(str, numbers))) if ranks > 1 else Share()
    return Site(config, space.digest, layout_digest, row_bytes, share)
