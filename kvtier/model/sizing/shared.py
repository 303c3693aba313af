"""Layers that read another layer's K and V and keep none of their own (Gemma 3n, cross-layer attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvtier.errors import ModelConfigError
from kvtier.model.sizing.cache import CacheSpec
from kvtier.model.sizing.fields import MAX_LAYERS, Fields


class SharedCache(CacheSpec, frozen=True):
    """Nothing of its own: reads the cache of layer `source`."""

    kind: ClassVar[str] = "shared"
    source: int


def sources(fields: Fields, roles: Sequence[str]) -> dict[int, int]:
    """Which layer each sharing layer reads, from what the config says about sharing."""
    found: dict[int, int] = {}
    tail = fields.maybe_count("num_kv_shared_layers", at_least=0, at_most=len(roles)) or 0
    if tail:
        own = len(roles) - tail
        for index in range(own, len(roles)):
            # The last layer of the same kind that has a cache (Gemma 3n).
            found[index] = _last_of_kind(fields, roles[:own], roles[index])
    if fields.flag("use_cla"):  # Hunyuan-Large: each group of `cla_share_factor` layers shares its first one's
        every = fields.count("cla_share_factor", at_most=MAX_LAYERS)
        found.update({index: index - index % every for index in range(len(roles)) if index % every})
    else:
        fields.excuse(("cla_share_factor",))
    return found


def _last_of_kind(fields: Fields, roles: Sequence[str], role: str) -> int:
    for index in reversed(range(len(roles))):
        if roles[index] == role:
            return index
    name = fields.name("num_kv_shared_layers")
    raise ModelConfigError(f"{name} leaves no {role} layer whose cache the shared layers could read")
