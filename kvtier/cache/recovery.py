"""After a restart: the prefix tree rebuilt from what a durable tier still holds.

A row whose head did not survive can never be reached; it is given back. Only where no group keeps whole prefixes do
rows wait for a prompt to name their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from kvtier.cache.attach import Arrival
from kvtier.cache.level import Level
from kvtier.cache.orphans import Orphans
from kvtier.index.tree import PrefixTree

_ROWS_A_TURN, _PAUSE_S = 256, 0.001
_BLOCKS_A_ROW = 64
"""To walk so many blocks of a path costs what a row does: where thousands share a prompt, every leaf is a long path."""


class Rebuild:
    """Rows that came with a tier, on their way into the tree and their level.

    Every `step` belongs to whoever owns the level. Until the last step, what was not published yet goes first when the
    level needs room, and with everything when it is cleared.
    """

    def __init__(self, tree: PrefixTree, level: Level, arrival: Arrival) -> None:
        if arrival.probe is None:
            level.health.on_trial()
        self.level = level
        self.kept = 0
        self._tree = tree
        found = arrival.found
        self._slots, self._children, self._extra = found.slots, found.children, found.extra
        self._stack: list[tuple[bytes, list[bytes]]] = [(key, []) for key in self._children[b""]]
        self._idle_spare = level.spare
        level.spare = self._give_up

    def all(self) -> None:
        """Publish everything now; `kept` says how many rows that were."""
        while self.step(1 << 30):
            pass

    def in_turns(self, lock: AbstractContextManager[object], attached: Callable[[Level], bool]) -> None:
        """Publish a few rows at a time under `lock`, so that the engine waits for none of it; stops if the level is
        detached meanwhile."""
        while True:
            with lock:
                if not attached(self.level) or not self.step(_ROWS_A_TURN):
                    return
            time.sleep(_PAUSE_S)  # whoever waits for the lock has it now

    def step(self, rows: int) -> bool:
        """Publish about `rows` more. False when all is done."""
        while self._stack and self._slots and rows > 0:
            key, head = self._stack.pop()
            chain = [*head, key]
            while len(following := self._children.get(key, [])) == 1:
                key = following[0]
                chain.append(key)
            self._stack.extend((child, chain) for child in following)
            rows -= self._publish(chain) + len(chain) // _BLOCKS_A_ROW
        if self._stack and self._slots:
            return True
        self._finish()
        return False

    def _publish(self, chain: list[bytes]) -> int:
        """Publish what there is of the blocks of a path. Returns how many there were."""
        held = {i: self._slots.pop(key) for i, key in enumerate(chain) if key in self._slots}
        if held:
            packed = b"".join(chain)
            self._tree.insert(packed)
            for group in self.level.group_order:
                blocks = [i for i, groups in held.items() if group in groups]
                if blocks:
                    found = np.array([held[i][group] for i in blocks], np.int32)
                    self.kept += int(self.level.publish(packed, group, np.array(blocks, np.intp), found).sum())
        return len(held)

    def _finish(self) -> None:
        self.level.spare = self._idle_spare
        unplaced, self._slots = self._slots, {}
        if self.level.residency.prefix_closed:
            self._extra += [slot for groups in unplaced.values() for slot in groups.values()]
            unplaced = {}
        if self._extra:
            self.level.release(np.array(self._extra, np.int32))
            self._extra = []
        if unplaced:
            Orphans(self.level, unplaced)
            self.kept += sum(map(len, unplaced.values()))

    def _give_up(self, rows: int) -> int:
        """Release rows that are not published yet, those written last first. Returns how many."""
        freed, self._extra = self._extra, []
        while self._slots and len(freed) < rows:
            freed += self._slots.popitem()[1].values()
        if freed:
            self.level.release(np.array(freed, np.int32))
        return len(freed)
