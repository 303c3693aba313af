"""Conservative mode in the simulator: the signals production samples, fed to the same state machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.place.busy import HIGHEST_SHARE, BusyMeter
from kvtier.place.mode import ModeMachine, RecentTail, Signals
from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.tier import NodeTier

_SAMPLE_S = 1.0
_LINK_TIME_CONSTANT_S = 3.0


class Watch:
    """Samples about once a second while there is traffic. `waited` is what a foreground load waited."""

    def __init__(self, loop: EventLoop, memory: NodeTier, links: Sequence[str]) -> None:
        self.machine = ModeMachine()
        self._loop = loop
        self._memory = memory
        self._recent = {name: BusyMeter(0.0, _LINK_TIME_CONSTANT_S) for name in links}
        self._waits = RecentTail()
        self._next_s = 0.0

    @property
    def conservative(self) -> bool:
        """Whether only what must be done is done. Samples when it is time."""
        now = self._loop.now
        if now >= self._next_s:
            self._next_s = now + _SAMPLE_S
            busiest = max(meter.share(now) for meter in self._recent.values()) / HIGHEST_SHARE
            fill = self._memory.pinned / max(1, self._memory.capacity_rows)
            self.machine.sample(Signals(busiest, self._waits.value(now), fill), now)
        return self.machine.conservative

    def moved(self, link: str, seconds: float) -> None:
        """A link was busy for so long with what somebody waits for."""
        self._recent[link].note(seconds, self._loop.now)

    def waited(self, seconds: float) -> None:
        """A foreground load took so long."""
        self._waits.add(seconds, self._loop.now)
