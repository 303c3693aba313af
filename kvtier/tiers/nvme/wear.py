"""The write budget: a drive survives so many bytes; what would exceed the day's share is refused.

A token bucket fills at `daily_bytes` a day and holds an hour's worth, so that a burst after a quiet night cannot spend
the night's share at once. What is left of it survives a restart in a small file, or restarting would refill it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable

from kvtier.codec.checksum import checksum64

_DAY_S = 86_400.0
_HOURS = 24
_STATE = struct.Struct("<ddQ")
_SAVES_A_BURST = 16


class WriteBudget:
    """Grants bytes. Thread-safe. `daily_bytes` 0 grants everything and keeps no file.

    `now` is wall time: it must go on counting while no process runs.
    """

    def __init__(self, daily_bytes: int, path: str, now: Callable[[], float] = time.time) -> None:
        self.refused_bytes = 0
        self._rate = daily_bytes / _DAY_S
        self._burst = daily_bytes / _HOURS
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        self._at_s = now()
        self._left = self._restored() if daily_bytes else 0.0
        self._unsaved = 0.0

    def grant(self, n: int, row_bytes: int) -> int:
        """How many of `n` rows of `row_bytes` may be written now; they are taken from the budget."""
        if not self._rate:
            return n
        with self._lock:
            now_s = self._now()
            self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._rate)
            self._at_s = now_s
            granted = min(n, int(self._left // row_bytes))
            self._left -= granted * row_bytes
            self._unsaved += granted * row_bytes
            self.refused_bytes += (n - granted) * row_bytes
            due = self._unsaved * _SAVES_A_BURST >= self._burst
        if due:
            self.save()
        return granted

    def save(self) -> None:
        """Remember what is left. A file that cannot be written costs only that."""
        if not self._rate:
            return
        with self._lock:
            fields = struct.pack("<dd", self._at_s, self._left)
            self._unsaved = 0.0
        temporary = f"{self._path}.{os.getpid()}.tmp"
        with contextlib.suppress(OSError):
            with open(temporary, "wb") as file:
                file.write(fields + struct.pack("<Q", checksum64(fields)))
            os.replace(temporary, self._path)

    def _restored(self) -> float:
        """What is left from before and has come in since; a full hour's worth where nothing is known."""
        try:
            with open(self._path, "rb") as file:
                data = file.read(_STATE.size)
            fields: tuple[float, float, int] = _STATE.unpack(data)
        except (OSError, struct.error):
            return self._burst
        at_s, left, checksum = fields
        if checksum != checksum64(data[:16]) or not 0 <= left <= 1 << 60:
            return self._burst
        return min(self._burst, left + max(0.0, self._at_s - at_s) * self._rate)
