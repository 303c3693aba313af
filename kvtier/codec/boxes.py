"""A row is worked on in boxes: some layers and heads of K or of V, small enough to stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.codec.form import RowForm

CHUNK_ELEMENTS = 200_000  # 800 KB of float32: most of a core's second-level cache; smaller costs more in calls


class Box(NamedTuple):
    """Layers [layer, layer_end) and heads [head, head_end) of part 0 (K) or 1 (V)."""

    part: int
    layer: int
    layer_end: int
    head: int
    head_end: int
    unit_index: npt.NDArray[np.intp]

    @property
    def units(self) -> int:
        """(layer, head) pairs in the box."""
        return (self.layer_end - self.layer) * (self.head_end - self.head)

    def cut(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The box's part of an array [layers, parts, heads, ...]; a view [layers, heads, ...]."""
        return array[self.layer : self.layer_end, self.part, self.head : self.head_end]

    def cut_view(self, views: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The box's part of a row's `RowForm.views`; a view [layers, heads, ...]."""
        return views[self.part][self.layer : self.layer_end, self.head : self.head_end]


def boxes_of(form: RowForm) -> Iterator[Box]:
    """Cover the row's units by boxes of about CHUNK_ELEMENTS numbers, in unit order within a part."""
    return iter(_boxes(form))


@lru_cache
def _boxes(form: RowForm) -> tuple[Box, ...]:
    unit = form.tokens * form.head_dim
    heads = max(1, min(form.heads, CHUNK_ELEMENTS // unit))
    layers = max(1, CHUNK_ELEMENTS // (unit * form.heads)) if heads == form.heads else 1
    index = np.arange(form.units, dtype=np.intp).reshape(form.layers, form.parts, form.heads)
    boxes = []
    for part in range(form.parts):
        for layer in range(0, form.layers, layers):
            for head in range(0, form.heads, heads):
                layer_end, head_end = min(layer + layers, form.layers), min(head + heads, form.heads)
                mine = index[layer:layer_end, part, head:head_end].ravel()
                boxes.append(Box(part, layer, layer_end, head, head_end, mine))
    return tuple(boxes)
