"""What a block costs per KV-cache group, and the check that a live engine agrees.

A wrong size is the worst kind of error a cache can make: every copy afterwards moves the wrong bytes. So the figures
from the config and the engine's own page sizes are compared once at start, layer by layer, and any difference stops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvtier.errors import EngineMismatchError
from kvtier.model.layout import GroupLayout
from kvtier.model.sizing.cache import CacheSpec
from kvtier.model.sizing.deployment import Deployment
from kvtier.model.sizing.spec import ModelSpec

MIXED = "uniform"  # vLLM's UniformTypeKVCacheSpecs: one block table, pages of different sizes; page_bytes is their mean


class GroupBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block of one KV-cache group: layers whose caches are alike.

    `page_bytes` is one layer on one rank, `rank_bytes` all layers on one rank. `stored_bytes` is what a tier below the
    GPU keeps: all layers, one copy of every distinct byte, so `copies` identical ranks count once.
    """

    kind: str
    layers: tuple[int, ...]
    page_bytes: int
    rank_bytes: int
    stored_bytes: int
    copies: int


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's groups, sized and agreed. `unsized` names layers that are not the model's own (a draft model's)."""

    blocks: tuple[GroupBlock, ...]
    unsized: tuple[str, ...] = ()


def block_bytes(spec: ModelSpec, deployment: Deployment, with_mtp: bool = False) -> tuple[GroupBlock, ...]:
    """Blocks of `deployment.block_tokens` tokens, one entry for each distinct kind of cache in layer order.

    A recurrent state counts as the page of its layer: one snapshot, whatever the number of tokens. Sharing layers and
    MLP layers keep nothing and appear in no group.
    """
    members: dict[CacheSpec, list[int]] = {}
    for layer in spec.all_layers(with_mtp):
        for cache in layer.caches:
            if _page(cache, deployment) > 0:
                members.setdefault(cache, []).append(layer.index)
    return tuple(_block(cache, indices, deployment) for cache, indices in members.items())


def reconcile(
    spec: ModelSpec,
    groups: Sequence[GroupLayout],
    deployment: Deployment,
    *,
    content_bytes: Mapping[str, int] | None = None,
    layers: Iterable[int] | None = None,
) -> Reconciled:
    """Compare the engine's page sizes with the config's, for one worker.

    `groups` are the engine's KV-cache groups as plain numbers; each brings its own block size, `deployment` the rest.
    `content_bytes` gives, by layer name, the part of a padded page that is used (vLLM's `real_page_size_bytes`): it is
    then compared instead of the page. `layers` are the layer numbers this worker must hold (a pipeline stage); by
    default all of the model. Raises EngineMismatchError with both figures at the first difference, and for a layer
    that the engine does not hold.
    """
    pending = {layer.index: list(layer.caches) for layer in spec.all_layers(with_mtp=True)}
    blocks: list[GroupBlock] = []
    unsized: list[str] = []
    for group in groups:
        sized = msgspec.structs.replace(deployment, block_tokens=group.block_tokens)
        members = [(name, _layer_number(name, len(spec.layers))) for name in group.layers]
        own = [(name, index) for name, index in members if index is not None and index in pending]
        unsized += [name for name, index in members if index is None or index not in pending]
        if group.kind == MIXED:
            blocks += _take_mixed(pending, group, own, sized)
            continue
        matched: dict[CacheSpec, list[int]] = {}
        for name, index in own:
            used = (content_bytes or {}).get(name, group.page_bytes)
            matched.setdefault(_take(pending[index], used, sized, name), []).append(index)
        blocks += [_block(cache, indices, sized, group.page_bytes) for cache, indices in matched.items()]
    _check_complete(spec, pending, layers)
    return Reconciled(blocks=tuple(blocks), unsized=tuple(unsized))


def _take(caches: list[CacheSpec], engine_bytes: int, deployment: Deployment, name: str) -> CacheSpec:
    """The layer's cache whose page has the engine's size, taken out of what is still to be matched."""
    for cache in caches:
        if _page(cache, deployment) == engine_bytes:
            caches.remove(cache)
            return cache
    ours = " or ".join(f"{_page(cache, deployment)} B ({cache.kind})" for cache in caches) or "nothing"
    raise EngineMismatchError(
        f"layer {name}: the engine's page is {engine_bytes} B for {deployment.block_tokens} tokens, "
        f"the config says {ours}"
    )


def _take_mixed(
    pending: dict[int, list[CacheSpec]], group: GroupLayout, own: Sequence[tuple[str, int]], deployment: Deployment
) -> list[GroupBlock]:
    """A group whose pages differ: everything its layers keep, compared as a whole."""
    matched: dict[CacheSpec, list[int]] = {}
    for index in dict.fromkeys(index for _, index in own):
        for cache in pending[index]:
            matched.setdefault(cache, []).append(index)
        pending[index] = []
    ours = sum(_page(cache, deployment) * len(indices) for cache, indices in matched.items())
    if ours // len(group.layers) != group.page_bytes:
        raise EngineMismatchError(
            f"the group of layer {group.layers[0]}: the engine's pages are {group.page_bytes} B on average for "
            f"{deployment.block_tokens} tokens, the config says {ours // len(group.layers)} B"
        )
    return [_block(cache, indices, deployment) for cache, indices in matched.items()]


def _check_complete(spec: ModelSpec, pending: Mapping[int, list[CacheSpec]], layers: Iterable[int] | None) -> None:
    """Every cache of every expected layer must have been met."""
    expected = [layer.index for layer in spec.layers] if layers is None else list(layers)
    for index in expected:
        missing = [cache.kind for cache in pending.get(index, []) if _holds_something(cache)]
        if missing:
            raise EngineMismatchError(
                f"layer {index}: the config says it keeps a {missing[0]} cache, the engine has none"
            )


def _holds_something(cache: CacheSpec) -> bool:
    return _page(cache, Deployment()) > 0


def _block(
    cache: CacheSpec, indices: Sequence[int], deployment: Deployment, page_bytes: int | None = None
) -> GroupBlock:
    page = _page(cache, deployment) if page_bytes is None else page_bytes
    whole = _page(cache, msgspec.structs.replace(deployment, tp=1))
    return GroupBlock(
        kind=cache.kind,
        layers=tuple(indices),
        page_bytes=page,
        rank_bytes=page * len(indices),
        stored_bytes=whole * len(indices),
        copies=cache.copies(deployment.attention_tp),
    )


def _page(cache: CacheSpec, deployment: Deployment) -> int:
    """A block of tokens, or a state, of one layer on one rank."""
    tp = deployment.attention_tp
    rows = cache.row_bytes(deployment.form, tp) * deployment.block_tokens
    page = rows + cache.state_bytes(deployment.model_dtype_bytes, tp)
    return -(-page // deployment.page_alignment) * deployment.page_alignment


def _layer_number(name: str, layers: int) -> int | None:
    """The layer number in an engine's layer name; draft layers under a module of their own follow the model's."""
    parts = name.split(".")
    number = next((int(part) for part in parts if part.isdigit()), None)
    if number is not None and parts[0] == "mtp" and number < layers:
        return layers + number
    return number
