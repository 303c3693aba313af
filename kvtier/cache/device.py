"""The hbm tier: a view on the engine's own pool of device blocks.

The engine allocates, shares and evicts these blocks; kvtier moves none of their bytes. What it adds is a Residency in
the same prefix tree as every other tier, kept in step by the connector (`place`, `gone`, `swap`, `clear`), a policy of
its own that is told of the same requests, and the answer to one question: which blocks should leave next (`next_out`).

A row is one device block. Where several of the engine's blocks make one of kvtier's, each has a column of its own, so
the view holds exactly what the pool holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.clock import Clock
from kvtier.errors import IntegrityError
from kvtier.index.residency import ABSENT, Residency
from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.keys import KEY_BYTES
from kvtier.observe.metrics import Recorder
from kvtier.place.policy import EvictionPolicy, TierView

Slots = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.intp]

NAME = "hbm"
_NOWHERE = -1
_PROTECTED_SHARE = 0.5  # of the pool: what is protected beyond it is ordered like everything else


class DeviceResidency(Residency):
    """Residency of a pool that others hold blocks of: `in_use(block)` asks the pool, and is asked a few times only."""

    def __init__(
        self, tree: PrefixTree, blocks: int, columns: int, in_use: Callable[[int], bool], clock: Clock
    ) -> None:
        super().__init__(NAME, tree, blocks, columns, prefix_closed=False)
        self._in_use = in_use
        self._clock = clock
        self._protected: dict[int, float] = {}

    @property
    def protected_rows(self) -> int:
        """Rows of segments that are protected now."""
        now = self._clock.now()
        live = {i: until for i, until in self._protected.items() if until > now}
        self._protected = live
        return sum(self.rows(self.tree.segment(i), 0) for i in live)

    def protect(self, segment: Segment, until_s: float) -> None:
        """Name no block of `segment` before `until_s`."""
        self._protected[segment.id] = max(until_s, self._protected.get(segment.id, 0.0))

    def evictable_from(self, segment: Segment) -> int:
        """Requests use a path from its beginning, so the blocks in use are found by bisection. Where windows let go of
        their beginning the answer may be too low; whoever moves blocks looks at each of them again."""
        extent = self.extent(segment)
        if self._protected.get(segment.id, 0.0) > self._clock.now():
            return extent
        lowest = 0
        held = self.held(segment)[:extent]
        for column in range(held.shape[1]):
            present = np.flatnonzero(held[:, column] != ABSENT)
            low, high = 0, len(present)
            while low < high:
                middle = (low + high) // 2
                if self._in_use(int(held[present[middle], column])):
                    low = middle + 1
                else:
                    high = middle
            if low:
                lowest = max(lowest, int(present[low - 1]) + 1)
        return lowest

    def on_split(self, head: Segment, tail: Segment) -> None:
        super().on_split(head, tail)
        if tail.id in self._protected:
            self._protected[head.id] = self._protected[tail.id]

    def on_remove(self, segment: Segment) -> None:
        super().on_remove(segment)
        self._protected.pop(segment.id, None)


class DeviceView:
    """What the device holds, and in which order it should leave. One control thread.

    `blocks` is one more than the highest block id, `columns` how many device blocks of all groups make one block of
    kvtier's, `row_bytes` the size of one device block.
    """

    def __init__(
        self,
        tree: PrefixTree,
        blocks: int,
        columns: int,
        row_bytes: int,
        in_use: Callable[[int], bool],
        make_policy: Callable[[TierView], EvictionPolicy],
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self.name = NAME
        self.row_bytes = row_bytes
        self.residency = DeviceResidency(tree, blocks, columns, in_use, clock)
        self.policy = make_policy(self.residency)
        self._tree = tree
        self._clock = clock
        self._recorder = recorder
        self._segment = np.full(blocks, _NOWHERE, np.int32)
        self._offset = np.zeros(blocks, np.int32)
        self._column = np.zeros(blocks, np.int16)
        tree.listen(self)

    # --- what the pool did --------------------------------------------------------------------------------------

    def holds(self, block_id: int) -> bool:
        """Whether a device block stands for a row of the view. A second copy of a row does not."""
        return bool(self._segment[block_id] != _NOWHERE)

    def place(self, chain: bytes, blocks: Blocks, columns: Blocks, ids: Slots) -> None:
        """The pool holds `ids[i]` as block `blocks[i]` (ascending) of `chain`, in column `columns[i]`. Rows that have a
        block already keep it."""
        if not len(ids):
            return
        need = int(blocks[-1]) + 1
        chain = chain[: need * KEY_BYTES]
        match = self._tree.walk(chain)
        if match.blocks < need:
            self._tree.insert(chain)
            match = self._tree.walk(chain)
        if (moved := ids[self._segment[ids] != _NOWHERE]).size:
            self.gone(moved)
        new = self.residency.slots_of(match)[blocks, columns] == ABSENT
        blocks, columns, ids = blocks[new], columns[new], ids[new]
        if not len(ids):
            return
        before = [(segment, self.residency.extent(segment)) for segment in match.path]
        for column in np.unique(columns).tolist():
            mine = columns == column
            self.residency.publish(match.path, blocks[mine], column, ids[mine])
        done = 0
        for segment in match.path:
            stop = int(np.searchsorted(blocks, segment.stop))
            part = slice(done, stop)
            self._segment[ids[part]], self._offset[ids[part]] = segment.id, blocks[part] - segment.depth
            done = stop
        self._column[ids] = columns
        now = self._clock.now()
        for segment, extent in before:
            if self.residency.extent(segment) != extent:
                self.policy.on_resident(segment, extent, now)
        self._recorder.add("kvtier_blocks_stored", len(ids), NAME)

    def gone(self, ids: Slots) -> None:
        """The pool forgot what these blocks hold."""
        ids = ids[self._segment[ids] != _NOWHERE]
        if not len(ids):
            return
        segments, now = self._segment[ids], self._clock.now()
        for i in np.unique(segments).tolist():
            mine = ids[segments == i]
            segment = self._tree.segment(i)
            extent = self.residency.extent(segment)
            self.residency.withdraw(segment, self._offset[mine].astype(np.intp), self._column[mine].astype(np.intp))
            if self.residency.extent(segment) != extent:
                self.policy.on_evicted(segment, extent, now)
        self._segment[ids] = _NOWHERE
        self._recorder.add("kvtier_evictions", len(ids), NAME, "engine")

    def swap(self, old: int, new: int) -> None:
        """Another copy, in block `new`, stands for the row of block `old` from now on."""
        segment = self._tree.segment(int(self._segment[old]))
        self.residency.held(segment)[self._offset[old], self._column[old]] = new
        for array in (self._segment, self._offset, self._column):
            array[new] = array[old]
        self._segment[old] = _NOWHERE

    def clear(self) -> None:
        """The pool forgot everything."""
        now = self._clock.now()
        segments = [self._tree.segment(i) for i in np.unique(self._segment[self._segment != _NOWHERE]).tolist()]
        extents = [self.residency.extent(segment) for segment in segments]
        gone = self.residency.clear()
        self._segment[:] = _NOWHERE
        for segment, extent in zip(segments, extents, strict=True):
            self.policy.on_evicted(segment, extent, now)
        self._recorder.add("kvtier_evictions", len(gone), NAME, "reset")

    # --- what should happen -------------------------------------------------------------------------------------

    def protect(self, segments: Sequence[Segment], until_s: float) -> bool:
        """Let nothing of these segments be named by `next_out` before `until_s`: someone is expected to need them.
        False, and nothing changed, if more than half of the pool would be protected."""
        rows = sum(self.residency.rows(segment, 0) for segment in segments)
        if self.residency.protected_rows + rows > _PROTECTED_SHARE * self.residency.capacity_rows:
            return False
        for segment in segments:
            self.residency.protect(segment, until_s)
        return True

    def next_out(self, rows: int) -> list[int]:
        """Up to `rows` device blocks, or a few more, that should leave first, in order: least worth first, every block
        after those that build on it."""
        ids: list[int] = []
        for victim in self.policy.victims(rows, self._clock.now()):
            held = self.residency.held(victim.segment)[victim.keep :][::-1].ravel()
            ids += held[held != ABSENT].tolist()
        return ids

    def gauges(self) -> None:
        """Write this tier's gauges to the recorder."""
        resident, capacity = self.residency.resident_rows, self.residency.capacity_rows - 1  # one block is never used
        self._recorder.set("kvtier_resident_bytes", resident * self.row_bytes, NAME)
        self._recorder.set("kvtier_capacity_bytes", capacity * self.row_bytes, NAME)
        self._recorder.set("kvtier_medium_bytes", capacity * self.row_bytes, NAME)

    def check_integrity(self) -> None:
        """Raise IntegrityError if the view disagrees with itself."""
        self.residency.check_integrity()
        for i in np.flatnonzero(self._segment != _NOWHERE).tolist():
            segment = self._tree.segment(int(self._segment[i]))
            if self.residency.held(segment)[self._offset[i], self._column[i]] != i:
                raise IntegrityError(f"device block {i} is not where the view says")

    # --- TreeListener -------------------------------------------------------------------------------------------

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._renumber(head, 0)
        self._renumber(tail, head.length)

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        return

    def _renumber(self, segment: Segment, by: int) -> None:
        held = self.residency.held(segment)
        ids = held[held != ABSENT]
        self._segment[ids] = segment.id
        self._offset[ids] -= by
