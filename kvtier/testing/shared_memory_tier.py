"""The reference shared tier: one dict of rows that any number of tiers look into, each with slots of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.handles import Handles
from kvtier.tiers.meter import Meter
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, TierProbe, TierStats

Medium = dict[tuple[bytes, int], bytes]
"""What is on the medium, by key and group. Whoever removes an entry plays another machine's eviction."""


class SharedMemoryTier:
    """A `SharedTier` as plain as it can be; give several the same `medium`. Safe for disjoint slots from any thread."""

    def __init__(
        self, row_bytes: int, capacity_rows: int, medium: Medium | None = None, *, name: str = "shared_fs"
    ) -> None:
        self.name = name
        self.row_bytes = row_bytes
        self.medium: Medium = medium if medium is not None else {}
        self.asked: list[RowId] = []
        self._handles = Handles(capacity_rows)
        self._meter = Meter()
        self._closed = False

    def reserve(self, n: int) -> Slots | None:
        return None if self._closed else self._handles.table.take(n)

    def release(self, slots: Slots) -> None:
        if not self._closed:
            self._handles.release(slots)

    def recover(self) -> list[RecoveredRow]:
        return []

    def exists(self, rows: Sequence[RowId]) -> list[bool]:
        self.asked += rows
        return [not self._closed and (row.key, row.group) in self.medium for row in rows]

    def adopt(self, slots: Slots, rows: Sequence[RowId]) -> None:
        self._handles.table.require_reserved(slots)
        self._handles.publish(slots, rows)

    def part(self, nonce: bytes) -> None:
        self.medium = {}

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        if self._closed:
            return [RowStatus.CLOSED] * len(rows)
        check_arguments(slots, rows, sources, self.row_bytes)
        self._handles.table.require_reserved(slots)
        for row, source in zip(rows, sources, strict=True):
            self.medium.setdefault((row.key, row.group), bytes(source))
        self._handles.publish(slots, rows)
        self._meter.moved(written_bytes=len(rows) * self.row_bytes)
        return [RowStatus.OK] * len(rows)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        if self._closed:
            return [RowStatus.CLOSED] * len(rows)
        check_arguments(slots, rows, targets, self.row_bytes)
        statuses = []
        for known, row, target in zip(self._handles.speaks_of(slots, rows), rows, targets, strict=True):
            held = self.medium.get((row.key, row.group))
            if known and held is not None:
                np.frombuffer(target, np.uint8)[:] = np.frombuffer(held, np.uint8)
                statuses.append(RowStatus.OK)
            else:
                statuses.append(RowStatus.VANISHED if known else RowStatus.FOREIGN)
        self._meter.moved(read_bytes=self._meter.count_faults(statuses) * self.row_bytes)
        return statuses

    def probe(self) -> TierProbe:
        return TierProbe(1e-6, 1e10, 1e-6, 1e10)

    def stats(self) -> TierStats:
        return self._meter.stats(
            capacity_rows=self._handles.table.capacity,
            used_rows=self._handles.table.used,
            cap_bytes=self._handles.table.capacity * self.row_bytes,
            medium_bytes=len(self.medium) * self.row_bytes,
        )

    def close(self) -> None:
        self._closed = True
