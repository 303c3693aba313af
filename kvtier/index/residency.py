"""What is resident where: for one tier, the slot of every block by segment, and who holds it.

Slots live in one int32 array a segment (blocks x groups, -1 where absent), pins in one array a tier, indexed by slot.
So a lease over a prompt is one vector operation, and splitting a segment moves no pin.

A block may be resident for some groups only: a sliding-window group keeps just the window before a boundary. `extent`
is the number of leading blocks after which nothing is resident; eviction always takes a tail.

One writer: not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError, LeaseError
from kvtier.index.tree import Match, PrefixTree, Segment

Slots = npt.NDArray[np.int32]
ABSENT = -1


class Residency:
    """Residency of one tier. Implements `place.policy.TierView` and `index.tree.TreeListener`.

    A row is one block of one group and occupies one slot of the tier. `capacity_rows` is the tier's size.
    """

    def __init__(
        self, name: str, tree: PrefixTree, capacity_rows: int, groups: int = 1, prefix_closed: bool = True
    ) -> None:
        # False where no group keeps whole prefixes (all layers have sliding windows): holes are normal there.
        self.prefix_closed = prefix_closed
        self.name = name
        self.tree = tree
        self.groups = groups
        self._capacity_rows = capacity_rows
        self._slots: dict[int, Slots] = {}
        self._extent: dict[int, int] = {}
        self._pins = np.zeros(capacity_rows, np.int32)
        self._pinned_rows = 0  # asked for every step, and for every session a hint keeps
        self._leaves: dict[int, Segment] = {}
        self._resident_rows = 0
        tree.listen(self)

    @property
    def capacity_rows(self) -> int:
        """Rows the tier can hold."""
        return self._capacity_rows

    @property
    def resident_rows(self) -> int:
        """Rows published and not dropped."""
        return self._resident_rows

    @property
    def pinned_rows(self) -> int:
        """Rows some lease or copy holds."""
        return self._pinned_rows

    @property
    def pinned_share(self) -> float:
        """Share of the tier that some lease or copy holds."""
        return self._pinned_rows / max(1, self._capacity_rows)

    def extent(self, segment: Segment) -> int:
        """Leading blocks of `segment` after which nothing is resident."""
        return self._extent.get(segment.id, 0)

    def rows(self, segment: Segment, start: int) -> int:
        """Rows held by the blocks of `segment` from offset `start` on."""
        slots = self._slots.get(segment.id)
        return 0 if slots is None else int(np.count_nonzero(slots[start:] != ABSENT))

    def evictable_from(self, segment: Segment) -> int:
        """The smallest offset from which on no row is pinned (`extent` if the last block is)."""
        slots = self._slots.get(segment.id)
        if slots is None:
            return 0
        held = slots[: self._extent[segment.id]]
        pinned = (self._pins[held] > 0) & (held != ABSENT)
        blocks = np.flatnonzero(pinned.any(axis=1))
        return int(blocks[-1]) + 1 if blocks.size else 0

    def leaves(self) -> Iterable[Segment]:
        """Segments with resident blocks and no resident child. Do not change residency while iterating."""
        return self._leaves.values()

    def recent_leaves(self, most: int) -> list[Segment]:
        """The leaves that became so last, at most so many."""
        return list(islice(reversed(self._leaves.values()), most))

    def slots_of(self, match: Match) -> Slots:
        """Slots of the matched blocks in order: (blocks, groups), -1 where absent. A copy."""
        found = np.full((match.blocks, self.groups), ABSENT, np.int32)
        position = 0
        for segment in match.path:
            n = min(segment.length, match.blocks - position)
            slots = self._slots.get(segment.id)
            if slots is not None:
                found[position : position + n] = slots[:n]
            position += n
        return found

    def publish(self, path: Sequence[Segment], blocks: npt.NDArray[np.intp], group: int, slots: Slots) -> None:
        """Make rows visible: block `blocks[i]` (depth in the path, ascending) of `group` is in `slots[i]`.

        Raises IntegrityError if a row is resident already or a block lies beyond the path.
        """
        done = 0
        for segment in path:
            stop = int(np.searchsorted(blocks, segment.stop))
            if stop > done:
                self._set(segment, blocks[done:stop] - segment.depth, group, slots[done:stop])
                done = stop
        if done < len(blocks):
            raise IntegrityError(f"block {int(blocks[-1])} lies beyond a path of {path[-1].stop if path else 0} blocks")

    def drop(self, segment: Segment, keep: int) -> Slots:
        """Forget the rows of `segment` from offset `keep` on and return their slots. Raises if a child is resident
        or a row is pinned."""
        if any(child.id in self._extent for child in segment.children.values()):
            raise IntegrityError(f"{segment!r} has a resident child in {self.name}; leaves go first")
        slots = self._slots.get(segment.id)
        if slots is None or keep >= self._extent[segment.id]:
            return np.empty(0, np.int32)
        gone: Slots = slots[keep:][slots[keep:] != ABSENT]
        if (self._pins[gone] > 0).any():
            raise IntegrityError(f"{segment!r} holds pinned rows of {self.name} after block {keep}")
        slots[keep:] = ABSENT
        self._resident_rows -= len(gone)
        self._refresh(segment)
        return gone

    def withdraw(self, segment: Segment, offsets: npt.NDArray[np.intp], groups: npt.NDArray[np.intp]) -> None:
        """Forget single rows, wherever they lie: their medium, which is not ours, took them. Rows that are absent are
        ignored. Only where holes are allowed."""
        slots = self._slots.get(segment.id)
        if slots is None:
            return
        self._resident_rows -= int(np.count_nonzero(slots[offsets, groups] != ABSENT))
        slots[offsets, groups] = ABSENT
        self._refresh(segment)

    def held(self, segment: Segment) -> Slots:
        """Slots of the segment's blocks: (length, groups), -1 where absent; empty if nothing is resident. A view."""
        return self._slots.get(segment.id, np.empty((0, self.groups), np.int32))

    def pin(self, slots: Slots) -> None:
        """Hold rows: they stay where they are until unpinned as often as pinned. Slots must be distinct."""
        self._pinned_rows += len(slots) - int(np.count_nonzero(self._pins[slots]))
        self._pins[slots] += 1

    def unpin(self, slots: Slots) -> None:
        """Let go of rows pinned before. Raises LeaseError if one was not."""
        if (self._pins[slots] <= 0).any():
            raise LeaseError(f"a row of {self.name} is let go more often than it was held")
        self._pins[slots] -= 1
        self._pinned_rows -= len(slots) - int(np.count_nonzero(self._pins[slots]))

    def is_pinned(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of `slots` are held."""
        return self._pins[slots] > 0

    def clear(self) -> Slots:
        """Forget every row and return the slots, pinned ones included (their owners still let go of them)."""
        held = [slots[slots != ABSENT] for slots in self._slots.values()]
        self._slots.clear()
        self._extent.clear()
        self._leaves.clear()
        self._resident_rows = 0
        return np.concatenate(held) if held else np.empty(0, np.int32)

    def check_integrity(self) -> None:
        """Raise IntegrityError if any invariant is broken: counts, distinct slots, leaf set, no orphan."""
        rows, all_slots = 0, []
        for segment_id, slots in self._slots.items():
            segment = self.tree.segment(segment_id)
            used = slots[slots != ABSENT]
            occupied = np.flatnonzero((slots != ABSENT).any(axis=1))
            if len(slots) != segment.length or self._extent.get(segment_id) != int(occupied[-1]) + 1:
                raise IntegrityError(f"{segment!r} in {self.name}: extent or length is wrong")
            rows += len(used)
            all_slots.append(used)
            parent = segment.parent or self.tree.root
            if self.prefix_closed and parent is not self.tree.root and self.extent(parent) < parent.length:
                raise IntegrityError(f"{segment!r} is resident in {self.name} without its parent")
            leaf = not any(child.id in self._extent for child in segment.children.values())
            if leaf != (segment_id in self._leaves):
                raise IntegrityError(f"{segment!r} is wrongly {'missing from' if leaf else 'among'} the leaves")
        flat = np.concatenate(all_slots) if all_slots else np.empty(0, np.int32)
        if rows != self._resident_rows or len(np.unique(flat)) != len(flat) or set(self._extent) != set(self._slots):
            raise IntegrityError(f"{self.name} counts {self._resident_rows} rows, holds {rows}")
        if (self._pins < 0).any() or np.count_nonzero(self._pins) != self._pinned_rows:
            raise IntegrityError(f"{self.name} has a negative pin, or counts pins wrongly")

    # --- TreeListener -------------------------------------------------------------------------------------------

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        slots = self._slots.get(segment.id)
        if slots is not None:
            room = np.full((segment.length - old_length, self.groups), ABSENT, np.int32)
            self._slots[segment.id] = np.concatenate([slots, room])

    def on_split(self, head: Segment, tail: Segment) -> None:
        slots = self._slots.pop(tail.id, None)
        if slots is None:
            return
        self._leaves.pop(tail.id, None)
        del self._extent[tail.id]
        self._slots[head.id], self._slots[tail.id] = slots[: head.length].copy(), slots[head.length :].copy()
        self._refresh(tail)
        self._refresh(head)

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        slots = self._slots.get(segment.id)
        if slots is not None:
            if (slots[segment.length :] != ABSENT).any():
                raise IntegrityError(f"{segment!r} was shortened while {self.name} held its tail")
            self._slots[segment.id] = slots[: segment.length].copy()

    def on_remove(self, segment: Segment) -> None:
        if segment.id in self._slots:
            raise IntegrityError(f"{segment!r} was removed while {self.name} held it")

    # --- internals ----------------------------------------------------------------------------------------------

    def _set(self, segment: Segment, offsets: npt.NDArray[np.intp], group: int, new: Slots) -> None:
        slots = self._slots.get(segment.id)
        if slots is None:
            slots = self._slots[segment.id] = np.full((segment.length, self.groups), ABSENT, np.int32)
        if (slots[offsets, group] != ABSENT).any():
            raise IntegrityError(f"a block of {segment!r} is resident in {self.name} already")
        slots[offsets, group] = new
        self._resident_rows += len(new)
        self._refresh(segment)

    def _refresh(self, segment: Segment) -> None:
        """Recompute extent and leaf status of `segment`, and the leaf status of its parent."""
        slots = self._slots[segment.id]
        occupied = np.flatnonzero((slots != ABSENT).any(axis=1))
        if occupied.size:
            self._extent[segment.id] = int(occupied[-1]) + 1
        else:
            del self._slots[segment.id]
            self._extent.pop(segment.id, None)
        self._refresh_leaf(segment)
        if segment.parent is not None:
            self._refresh_leaf(segment.parent)

    def _refresh_leaf(self, segment: Segment) -> None:
        if segment.id in self._extent and not any(c.id in self._extent for c in segment.children.values()):
            self._leaves[segment.id] = segment
        else:
            self._leaves.pop(segment.id, None)
