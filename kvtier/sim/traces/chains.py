"""From a trace's own ids to prefix-chained block ids.

A block is its content and its whole past: the same content below another prefix is another block. So a block id is
given to each distinct (parent block id, content), dense from 1 (0 is "no parent").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.sim.traces.records import TRACE_KEY_BYTES

IdArray = NDArray[np.uint64]


class ChainBuilder:
    """Names blocks of `group` consecutive ids (or tokens) each; a remainder is dropped. Not thread-safe."""

    def __init__(self, group: int) -> None:
        self._width = group * TRACE_KEY_BYTES
        self._ids: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        """Distinct blocks named so far."""
        return len(self._ids)

    def chain(self, content: IdArray, known: Sequence[int] = ()) -> list[int]:
        """Block ids of `content`. `known` are the ids of its leading blocks, if an earlier chain shares them; only
        the rest is looked up."""
        packed = content.astype("<u8", copy=False).tobytes()
        width = self._width
        chained = list(known)
        parent = chained[-1] if chained else 0
        ids = self._ids
        for start in range(len(chained) * width, len(packed) - width + 1, width):
            parent = ids.setdefault((parent, packed[start : start + width]), len(ids) + 1)
            chained.append(parent)
        return chained


def pack(block_ids: Sequence[int]) -> bytes:
    """The chain a prefix tree takes."""
    return np.array(block_ids, dtype="<u8").tobytes()
