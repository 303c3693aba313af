"""Rows that survived a restart and whose place is not known until a prompt names it.

Where every layer has a sliding window only the rows before a boundary are kept, so nothing on the medium says what came
before them. They wait here by key; the first prompt whose chain contains them gives them their place in the tree. The
oldest are given up when their tier needs room.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvtier.cache.level import Level
from kvtier.model.keys import chain_length, key_at


class Orphans:
    """Recovered rows of one level without a place. One control thread."""

    def __init__(self, level: Level, rows: dict[bytes, dict[int, int]]) -> None:
        self._level = level
        self._rows = OrderedDict(rows)
        level.spare, level.adopt = self._give_up, self.adopt

    def adopt(self, chain: bytes) -> None:
        """Publish those rows that `chain` names. Costs a dictionary look-up a block while there are any."""
        if not self._rows:
            return
        found: dict[int, list[tuple[int, int]]] = {}
        for block in range(chain_length(chain)):
            for group, slot in self._rows.pop(key_at(chain, block), {}).items():
                found.setdefault(group, []).append((block, slot))
        for group, places in found.items():
            blocks, slots = zip(*places, strict=True)
            self._level.publish(chain, group, np.array(blocks, np.intp), np.array(slots, np.int32))

    def _give_up(self, rows: int) -> int:
        """Release the oldest, at least `rows` of them if there are so many. Returns how many."""
        freed: list[int] = []
        while self._rows and len(freed) < rows:
            _, groups = self._rows.popitem(last=False)
            freed += groups.values()
        if freed:
            self._level.release(np.array(freed, np.int32))
        return len(freed)
