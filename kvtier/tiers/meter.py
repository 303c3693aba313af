"""Counters every tier keeps: bytes and seconds by direction, faults by reason."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvtier.tiers.protocol import RowStatus, TierStats


class Meter:
    """Thread-safe counters behind `Tier.stats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: Counter[str] = Counter()
        self._read_bytes = 0
        self._written_bytes = 0
        self._read_s = 0.0
        self._write_s = 0.0

    def fault(self, reason: str, count: int = 1) -> None:
        """Count faults under `reason`."""
        if count:
            with self._lock:
                self._faults[reason] += count

    def count_faults(self, statuses: Sequence[RowStatus]) -> int:
        """Count every row that did not end well under its status; return how many did."""
        moved = 0
        for status in statuses:
            if status is RowStatus.OK:
                moved += 1
            else:
                self.fault(status.value)
        return moved

    def moved(self, *, read_bytes: int = 0, read_s: float = 0.0, written_bytes: int = 0, write_s: float = 0.0) -> None:
        """Count a transfer: payload bytes that arrived, and the wall seconds it took."""
        with self._lock:
            self._read_bytes += read_bytes
            self._read_s += read_s
            self._written_bytes += written_bytes
            self._write_s += write_s

    def rows_read(self, statuses: Sequence[RowStatus], row_bytes: int, begin_s: float) -> None:
        """Count a read that began at `begin_s` (perf_counter) and ends now: what arrived, and what did not."""
        moved = self.count_faults(statuses)
        self.moved(read_bytes=moved * row_bytes, read_s=time.perf_counter() - begin_s)

    def rows_written(self, statuses: Sequence[RowStatus], row_bytes: int, begin_s: float) -> None:
        """Count a write in the same way."""
        moved = self.count_faults(statuses)
        self.moved(written_bytes=moved * row_bytes, write_s=time.perf_counter() - begin_s)

    def stats(self, *, capacity_rows: int, used_rows: int, cap_bytes: int, medium_bytes: int) -> TierStats:
        """The counters as `TierStats`, with the sizes given."""
        with self._lock:
            return TierStats(
                capacity_rows=capacity_rows,
                used_rows=used_rows,
                cap_bytes=cap_bytes,
                medium_bytes=medium_bytes,
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
                read_s=self._read_s,
                write_s=self._write_s,
                faults=dict(self._faults),
            )
