"""Where everything lies in the payload of a block-quantised row, derived from the bits map alone.

    sinks (first block of a prompt only): the row's own words [layers, parts, heads, sinks, d]
    scales and minima: K float16 [L, H, groups, d] twice, V float16 [L, H, t, groups] twice
    base planes, then residual planes: per class of equal bits, [units of the class, t * width / 8, d]

A code of 3, 5, 6 or 8 bits is split into a base (the high 2 or 4 bits) and a residual plane. All base planes come
before all residual planes, so a prefix of the payload, `base_bytes` long, already decodes to a coarser row: the
progressive form. That form is ours, not CacheGen's, and lossier than the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.codec.arithmetic import PLANES, Bytes, Halfs
from kvtier.codec.bits_map import BitsMap
from kvtier.codec.boxes import Box
from kvtier.codec.form import ELEMENT_BYTES, RowForm
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class BitsClass:
    """The units of equal bits: `start` and `count` in class order, offsets of their planes in the payload."""

    bits: int
    start: int
    count: int
    base_offset: int
    base_bytes: int
    residual_offset: int
    residual_bytes: int


@dataclass(frozen=True)
class PayloadPlan:
    """Offsets of a payload. `rank[unit]` is a unit's place in class order; units count [layer, part, head]."""

    sinks: int
    key_groups: int
    value_groups: int
    rank: npt.NDArray[np.intp]
    levels: npt.NDArray[np.float32]
    scales_offset: int
    key_scales: int
    value_scales: int
    classes: tuple[BitsClass, ...]
    base_bytes: int
    payload_bytes: int


def groups_of(length: int, wanted: int) -> int:
    """Into how many equal groups of at most `wanted` a length is split."""
    groups = -(-length // wanted)
    while length % groups:
        groups += 1
    return groups


def plan_payload(form: RowForm, bits: BitsMap, *, sinks: int, key_group: int | None, value_group: int) -> PayloadPlan:
    """Lay out a payload. `key_group` is in tokens, None for per-token keys (then grouped like values).

    Raises ConfigError if the row has no K and V, or a number of tokens that does not fill whole bytes.
    """
    if form.kind != "kv" or form.tokens % 8 or form.head_dim % 8:
        raise ConfigError(
            "block quantisation needs keys and values with a multiple of 8 tokens and channels, "
            f"not {form.kind} with {form.tokens} and {form.head_dim}"
        )
    if bits.shape != (form.layers, form.parts, form.heads):
        raise ConfigError(f"a bits map of shape {bits.shape} does not fit {form.layers} layers of {form.heads} heads")
    flat = bits.ravel()
    order = np.argsort(flat, kind="stable")
    rank = np.empty(flat.size, dtype=np.intp)
    rank[order] = np.arange(flat.size)
    half = form.layers * form.heads
    value_groups = groups_of(form.head_dim, value_group)
    key_groups = value_groups if key_group is None else groups_of(form.tokens, key_group)
    key_scales = half * key_groups * (form.tokens if key_group is None else form.head_dim)
    value_scales = half * form.tokens * value_groups
    scales_offset = sink_bytes(form, sinks)
    offset = scales_offset + 2 * 2 * (key_scales + value_scales)
    unit_elements = form.tokens * form.head_dim
    found = [(int(b), int((flat == b).sum())) for b in np.unique(flat)]
    base_total = sum(n * unit_elements * PLANES[b][0] // 8 for b, n in found)
    base, residual, start = offset, offset + base_total, 0
    classes = []
    for b, n in found:
        base_bytes, residual_bytes = (n * unit_elements * width // 8 for width in PLANES[b])
        classes.append(BitsClass(b, start, n, base, base_bytes, residual, residual_bytes))
        base, residual, start = base + base_bytes, residual + residual_bytes, start + n
    levels = (2.0 ** flat.astype(np.float32) - 1).astype(np.float32)
    sizes = (scales_offset, key_scales, value_scales)
    return PayloadPlan(sinks, key_groups, value_groups, rank, levels, *sizes, tuple(classes), base, residual)


def sink_bytes(form: RowForm, sinks: int) -> int:
    """Bytes the sinks of a row take: they stay as the engine wrote them."""
    return sinks * form.units * form.head_dim * ELEMENT_BYTES[form.dtype]


class Sections:
    """Views into a payload, by its plan. Writable if the payload is."""

    def __init__(self, payload: Bytes, plan: PayloadPlan, form: RowForm) -> None:
        self.payload, self._plan, self._form = payload, plan, form
        units = (form.layers, form.parts, form.heads)
        self.sinks = payload[: plan.scales_offset].view(form.word).reshape(*units, plan.sinks, form.head_dim)
        keys, values = 2 * plan.key_scales, 2 * plan.value_scales
        start = plan.scales_offset
        self._pairs = (
            (self._halfs(start, keys), self._halfs(start + keys, keys)),
            (self._halfs(start + 2 * keys, values), self._halfs(start + 2 * keys + values, values)),
        )

    def scales(self, box: Box) -> tuple[Halfs, Halfs]:
        """Scales and minima of a box's units, [layers, heads, whatever the groups are]."""
        scales, minima = self._pairs[box.part]
        cut = (slice(box.layer, box.layer_end), slice(box.head, box.head_end))
        return scales[cut], minima[cut]

    def base(self, c: BitsClass) -> Bytes:
        """The base plane of a class, flat."""
        return self.payload[c.base_offset : c.base_offset + c.base_bytes]

    def residual(self, c: BitsClass) -> Bytes:
        """The residual plane of a class, flat; empty where its bits have none."""
        return self.payload[c.residual_offset : c.residual_offset + c.residual_bytes]

    def _halfs(self, offset: int, n_bytes: int) -> Halfs:
        flat = self.payload[offset : offset + n_bytes].view(np.float16)
        return flat.reshape(self._form.layers, self._form.heads, -1)
