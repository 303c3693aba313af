"""A clock that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """Starts at `start_s` and is advanced by hand. Not thread-safe."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (≥ 0)."""
        if seconds < 0:
            raise ValueError("a clock does not go backwards")
        self._now_s += seconds

    def advance_to(self, at_s: float) -> None:
        """Move forward to `at_s`; a moment already past is ignored."""
        self._now_s = max(self._now_s, at_s)
