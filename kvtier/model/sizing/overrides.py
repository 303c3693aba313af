"""Layers that differ from the model's common figures one by one (pruned and heterogeneous models)."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.errors import ModelConfigError
from kvtier.model.sizing import plan
from kvtier.model.sizing.fields import MAX_HEADS, Fields, checked_count, checked_length, shown
from kvtier.model.sizing.heads import query_heads

_BLOCK_FIELDS = frozenset(["n_heads_in_group", "num_key_value_heads", "no_op", "replace_with_linear"])


def layer_overrides(fields: Fields, layers: int) -> dict[int, dict[str, object]]:
    """Field values each layer replaces, from `per_layer_config` (transformers) or `block_configs` (Nemotron-NAS)."""
    found: dict[int, dict[str, object]] = {}
    if fields.active("per_layer_config"):
        for key, values in fields.section("per_layer_config").raw_items():
            name = fields.name(f"per_layer_config.{key}")
            if not key.isdigit() or int(key) >= layers:
                raise ModelConfigError(f"{name} is not the number of one of {layers} layers")
            if not isinstance(values, Mapping):
                raise ModelConfigError(f"{name} must be an object, not {shown(values)}")
            found[int(key)] = {str(field): value for field, value in values.items()}
    for index, block in enumerate(_blocks(fields) or []):
        heads = _block_heads(fields, block, index)
        if heads is not None:
            found.setdefault(index, {})["num_key_value_heads"] = heads
    return found


def plan_of_blocks(fields: Fields) -> list[str] | None:
    """The layer plan of a model described block by block, or None when it is not."""
    blocks = _blocks(fields)
    if blocks is None:
        return None
    layers = plan.layer_count(fields)
    checked_length(blocks, fields.name("block_configs"), layers)
    return [
        plan.NOTHING if block.get("no_op") is True or block.get("replace_with_linear") is True else plan.FULL
        for block in blocks
    ]


def _blocks(fields: Fields) -> list[Mapping[str, object]] | None:
    items = fields.items("block_configs")
    if not items:
        return None
    blocks = []
    for index, item in enumerate(items):
        attention = item.get("attention") if isinstance(item, Mapping) else None
        name = fields.name(f"block_configs[{index}].attention")
        if not isinstance(attention, Mapping):
            raise ModelConfigError(f"{name} must be an object, not {shown(attention)}")
        odd = [key for key, value in attention.items() if key not in _BLOCK_FIELDS and value not in (None, False, 0)]
        if odd:
            raise ModelConfigError(f"cannot interpret {', '.join(f'{name}.{key}' for key in odd)}")
        blocks.append(attention)
    return blocks


def _block_heads(fields: Fields, block: Mapping[str, object], index: int) -> int | None:
    name = fields.name(f"block_configs[{index}].attention")
    if block.get("num_key_value_heads") is not None:
        return checked_count(block["num_key_value_heads"], f"{name}.num_key_value_heads", at_most=MAX_HEADS)
    if block.get("n_heads_in_group") is None:
        return None
    group, heads = (
        checked_count(block["n_heads_in_group"], f"{name}.n_heads_in_group", at_most=MAX_HEADS),
        query_heads(fields),
    )
    if heads % group:
        raise ModelConfigError(f"{name}.n_heads_in_group = {group} does not divide {heads} query heads")
    return heads // group
