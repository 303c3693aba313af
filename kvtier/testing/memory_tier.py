"""The reference tier: a dict of bytes. What it answers is what every tier must answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.meter import Meter
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, TierProbe, TierStats


class MemoryTier:
    """A `Tier` as plain as it can be, and the oracle for the others. Not fast; safe for disjoint slots from any thread.

    `reopen` gives the tier as it is after a restart: published rows are found again, reserved slots are free.
    """

    def __init__(self, row_bytes: int, capacity_rows: int, *, name: str = "memory") -> None:
        self.name = name
        self.row_bytes = row_bytes
        self.published: dict[int, tuple[RowId, bytes]] = {}
        self._capacity = capacity_rows
        self._free = list(range(capacity_rows - 1, -1, -1))
        self._recovered: list[RecoveredRow] = []
        self._meter = Meter()
        self._closed = False

    def reopen(self) -> MemoryTier:
        """Close this tier and return its successor with the same published rows."""
        self.close()
        after = MemoryTier(self.row_bytes, self._capacity, name=self.name)
        after.published = self.published
        after._free = [slot for slot in after._free if slot not in self.published]
        after._recovered = [RecoveredRow(slot, row) for slot, (row, _) in self.published.items()]
        return after

    def reserve(self, n: int) -> Slots | None:
        if self._closed or n < 0 or n > len(self._free):
            return None
        return np.array([self._free.pop() for _ in range(n)], dtype=np.int32)

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        if self._closed:
            return [RowStatus.CLOSED] * len(rows)
        check_arguments(slots, rows, sources, self.row_bytes)
        wanted = slots.tolist()
        free = set(self._free)
        if len(set(wanted)) < len(wanted) or any(
            slot in free or slot in self.published or not 0 <= slot < self._capacity for slot in wanted
        ):
            raise IntegrityError(f"slots not reserved, or named twice: {wanted[:8]}")
        for slot, row, source in zip(wanted, rows, sources, strict=True):
            self.published[slot] = (row, bytes(source))
        self._meter.moved(written_bytes=len(wanted) * self.row_bytes)
        return [RowStatus.OK] * len(wanted)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        if self._closed:
            return [RowStatus.CLOSED] * len(rows)
        check_arguments(slots, rows, targets, self.row_bytes)
        statuses = []
        for slot, row, target in zip(slots.tolist(), rows, targets, strict=True):
            held = self.published.get(slot)
            if held is None or held[0] != row:
                statuses.append(RowStatus.FOREIGN)
                continue
            target[:] = held[1]
            statuses.append(RowStatus.OK)
        self._meter.moved(read_bytes=self._meter.count_faults(statuses) * self.row_bytes)
        return statuses

    def release(self, slots: Slots) -> None:
        if self._closed:
            return
        wanted = slots.tolist()
        free = set(self._free)
        if len(set(wanted)) < len(wanted) or any(slot in free or not 0 <= slot < self._capacity for slot in wanted):
            raise IntegrityError(f"released slots that are free already or named twice: {wanted[:8]}")
        for slot in sorted(wanted, reverse=True):
            self.published.pop(slot, None)
            self._free.append(slot)

    def recover(self) -> list[RecoveredRow]:
        recovered, self._recovered = self._recovered, []
        return recovered

    def probe(self) -> TierProbe:
        return TierProbe(1e-6, 1e10, 1e-6, 1e10)

    def stats(self) -> TierStats:
        return self._meter.stats(
            capacity_rows=self._capacity,
            used_rows=self._capacity - len(self._free),
            cap_bytes=self._capacity * self.row_bytes,
            medium_bytes=len(self.published) * self.row_bytes,
        )

    def close(self) -> None:
        self._closed = True

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free and published slots are disjoint and within the capacity."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self.published.keys() or not free <= set(range(self._capacity)):
            raise IntegrityError("free list and published slots do not agree")
