"""The virtual clock and what will happen on it. Equal times keep the order in which they were planned, so a run is the
same in every process."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class EventLoop:
    """Runs actions in order of time. Not thread-safe."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, when_s: float, action: Action) -> None:
        """Plan `action`; a moment already past is now."""
        self._number += 1
        heappush(self._planned, (max(when_s, self.now), self._number, action))

    def after(self, seconds: float, action: Action) -> None:
        """Plan `action` so many seconds from now."""
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Run the next action; False if nothing is planned any more."""
        if not self._planned:
            return False
        self.now, _, action = heappop(self._planned)
        action()
        return True

    def run(self) -> None:
        """Until nothing is planned any more."""
        while self.step():
            pass
