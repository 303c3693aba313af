"""Transfers in flight, so that a tier can close under them without pulling memory or files away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """Counts transfers running now; once closed lets no more begin. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextmanager
    def transfer(self) -> Iterator[bool]:
        """Run one transfer: gives True and holds off the end of `close`, or gives False if closed already."""
        with self._changed:
            admitted = not self._closed
            self._running += admitted
        try:
            yield admitted
        finally:
            with self._changed:
                self._running -= admitted
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Admit no more transfers and wait for those running; False if some still run after `timeout_s`."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)
