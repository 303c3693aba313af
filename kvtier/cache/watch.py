"""Watches for overload: samples the signals of conservative mode, once a second, and counts what came of it."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cache.traffic import Traffic
from kvtier.observe.metrics import Recorder
from kvtier.place.mode import ModeLimits, ModeMachine, Signals

_SAMPLE_S = 1.0


class Watch:
    """The mode of one cache. One control thread."""

    def __init__(
        self, fill: Callable[[], float], traffic: Traffic, recorder: Recorder, limits: ModeLimits | None = None
    ) -> None:
        """`fill`: the share of memory that is promised and cannot be evicted."""
        self.machine = ModeMachine(limits)
        self._fill = fill
        self._traffic = traffic
        self._recorder = recorder
        self._next_s = 0.0
        self._counted_s = 0.0

    @property
    def conservative(self) -> bool:
        """Whether only what must be done is done."""
        return self.machine.conservative

    def signals(self, now: float) -> Signals:
        """What is seen now."""
        return Signals(self._traffic.busiest_link(), self._traffic.load_waits.value(now), self._fill())

    def tick(self, now: float) -> None:
        """Called every step; samples when it is time."""
        if now < self._next_s:
            return
        self._next_s = now + _SAMPLE_S
        before = self.machine.entries
        self.machine.sample(self.signals(now), now)
        if self.machine.entries > before:
            self._recorder.add("kvtier_conservative_entries", 1, self.machine.reason)
        spent_s = self.machine.seconds(now)
        self._recorder.add("kvtier_conservative_seconds", spent_s - self._counted_s)
        self._counted_s = spent_s
