"""Conservative mode: when links, queues or room are at their limits, do less.

Two states. NORMAL → CONSERVATIVE when any signal has been above its high mark for a few samples on end; back when all
signals have been below their low marks, without a break, for the dwell time. Between the marks nothing changes: a mode
that flaps would be one more load.

In conservative mode there is no speculation, no prefetch, no migration between tiers; what remains is the eviction that
is needed, and foreground loads with a deadline.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import NamedTuple

import msgspec

from kvtier.errors import ConfigError


class Mode(Enum):
    """What the cache allows itself."""

    NORMAL = "normal"
    CONSERVATIVE = "conservative"


class Signals(NamedTuple):
    """What is watched, now. `link_share`: busy share of the busiest link, foreground reads only. `queue_p99_s`: p99 of
    what foreground loads waited. `fill`: share of memory that is promised to someone and cannot be evicted (a cache is
    always full; what matters is whether room can be made)."""

    link_share: float = 0.0
    queue_p99_s: float = 0.0
    fill: float = 0.0


class ModeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """High marks trip, low marks release."""

    high: Signals = Signals(0.95, 2.5, 0.95)
    low: Signals = Signals(0.7, 1.0, 0.8)
    samples: int = 3
    """Samples on end above a high mark before the mode changes."""
    dwell_s: float = 10.0
    """Time below all low marks before it changes back."""

    def __post_init__(self) -> None:
        for name, low, high in zip(Signals._fields, self.low, self.high, strict=True):
            if not 0 <= low < high:
                raise ConfigError(
                    f"conservative mode: the low mark of {name} ({low}) must be below the high one ({high})"
                )
        if self.samples < 1 or self.dwell_s < 0:
            raise ConfigError("conservative mode: samples must be at least 1 and dwell_s at least 0")


class ModeMachine:
    """The state machine. Not thread-safe; sampled by its owner, about once a second."""

    def __init__(self, limits: ModeLimits | None = None) -> None:
        self.limits = limits or ModeLimits()
        self.mode = Mode.NORMAL
        self.entries = 0
        self.reason = ""
        """The signal that tripped it last."""
        self._above = dict.fromkeys(Signals._fields, 0)
        self._calm_since_s: float | None = None
        self._entered_s = 0.0
        self._seconds = 0.0

    @property
    def conservative(self) -> bool:
        """Whether to do only what must be done."""
        return self.mode is Mode.CONSERVATIVE

    def seconds(self, now: float) -> float:
        """Time spent in conservative mode, up to now."""
        return self._seconds + (now - self._entered_s if self.conservative else 0.0)

    def sample(self, signals: Signals, now: float) -> Mode:
        """Take in what is seen now; returns the mode that holds from here on."""
        limits = self.limits
        if self.mode is Mode.NORMAL:
            for name, value, high in zip(Signals._fields, signals, limits.high, strict=True):
                self._above[name] = self._above[name] + 1 if value > high else 0
            tripped = [name for name, count in self._above.items() if count >= limits.samples]
            if tripped:
                self._enter(tripped[0], now)
            return self.mode
        calm = all(value < low for value, low in zip(signals, limits.low, strict=True))
        if not calm:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now
        if self._calm_since_s is not None and now - self._calm_since_s >= limits.dwell_s:
            self._leave(now)
        return self.mode

    def _enter(self, reason: str, now: float) -> None:
        self.mode, self.reason, self._entered_s, self._calm_since_s = Mode.CONSERVATIVE, reason, now, None
        self.entries += 1

    def _leave(self, now: float) -> None:
        self._seconds += now - self._entered_s
        self.mode, self._calm_since_s = Mode.NORMAL, None
        self._above = dict.fromkeys(Signals._fields, 0)


class RecentTail:
    """A high quantile of what was seen in the last seconds. Bounded. Not thread-safe."""

    def __init__(self, span_s: float = 10.0, most: int = 512, share: float = 0.99) -> None:
        self._span_s = span_s
        self._share = share
        self._seen: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, value: float, now: float) -> None:
        """One observation."""
        self._seen.append((now, value))

    def value(self, now: float) -> float:
        """The quantile, 0 if nothing was seen lately."""
        while self._seen and self._seen[0][0] < now - self._span_s:
            self._seen.popleft()
        if not self._seen:
            return 0.0
        ordered = sorted(value for _, value in self._seen)
        return ordered[min(len(ordered) - 1, math.ceil(self._share * len(ordered)) - 1)]
