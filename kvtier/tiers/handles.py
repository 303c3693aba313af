"""Slots of a shared tier: numbers by which one process speaks of rows that belong to everyone.

A slot holds no bytes. It says that this process knows of a row: it wrote it, or found that another one did. Releasing a
slot forgets the row and leaves it on the medium, which has an order of eviction of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvtier.tiers.inflight import InFlight
from kvtier.tiers.objects import ObjectSeal
from kvtier.tiers.protocol import RecoveredRow, RowId, Slots
from kvtier.tiers.slots import SlotTable


class Handles:
    """Which row each slot speaks of. Thread-safe for disjoint slots."""

    def __init__(self, capacity: int) -> None:
        self.table = SlotTable(capacity)
        self.table.add(np.arange(capacity, dtype=np.int32))
        self._rows: dict[int, RowId] = {}
        self._lock = threading.Lock()

    def publish(self, slots: Slots, rows: Sequence[RowId]) -> None:
        """Reserved slots speak of `rows` from now on."""
        with self._lock:
            self._rows.update(zip(slots.tolist(), rows, strict=True))
        self.table.publish(slots)

    def release(self, slots: Slots) -> None:
        """Free slots. Raises IntegrityError, and nothing changed, if one is free or named twice."""
        # Retired first: a slot must not be taken again while it still speaks of the old row.
        self.table.retire(slots)
        with self._lock:
            for slot in slots.tolist():
                self._rows.pop(slot, None)
        self.table.reuse(slots)

    def speaks_of(self, slots: Slots, rows: Sequence[RowId]) -> list[bool]:
        """For each slot whether it is published and speaks of this very row."""
        with self._lock:
            return [self._rows.get(slot) == row for slot, row in zip(slots.tolist(), rows, strict=True)]


class HandleTier:
    """The control thread's half of a shared tier, the same whatever the medium is. See SharedTier for the verbs."""

    row_bytes: int
    _identity: tuple[bytes, str]  # digests of the key space and of the layout
    _in_flight: InFlight
    _handles: Handles

    def reserve(self, n: int) -> Slots | None:
        return None if self._in_flight.closed else self._handles.table.take(n)

    def release(self, slots: Slots) -> None:
        """See SharedTier: the rows stay on the medium."""
        if not self._in_flight.closed:
            self._handles.release(slots)

    def recover(self) -> list[RecoveredRow]:
        """Nothing: what is there is found by asking for it."""
        return []

    def adopt(self, slots: Slots, rows: Sequence[RowId]) -> None:
        """See SharedTier. Raises IntegrityError for slots that are not reserved."""
        self._handles.table.require_reserved(slots)
        self._handles.publish(slots, rows)

    def _parted(self, nonce: bytes) -> ObjectSeal:
        """Names under which nobody else looks: what `part` goes on with."""
        key_space, layout = self._identity
        return ObjectSeal(key_space, f"{layout} parted {nonce.hex()}", self.row_bytes)
