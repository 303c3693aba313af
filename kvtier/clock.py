"""Time as a dependency: production, tests and the simulator differ only in the clock they pass."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds. `now` never goes backwards."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed origin."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. Thread-safe."""

    def now(self) -> float:
        return time.monotonic()


class WallClock:
    """Seconds since the epoch, for what must survive a restart. May step; use only to stamp records."""

    def now(self) -> float:
        return time.time()
