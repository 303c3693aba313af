"""A circuit breaker for one tier: a tier that fails or crawls is left alone for a while, then tried with care.

Closed: transfers run, and their last outcomes are watched. Too many bad ones open it. Open: nothing is sent, so a dead
peer costs nobody its timeout (Mooncake#2039). Half-open, after a jittered back-off that doubles with every relapse
(Mooncake#3299): one trial at a time; enough good ones close it, a bad one opens it again.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from enum import Enum

import msgspec

from kvtier.clock import Clock


class BreakerState(Enum):
    """Whether transfers are let through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a breaker acts. Errors are bad outcomes, and so are calls that took `slow_factor` times what the tier's
    probed curve says and more than `slow_floor_s`, writes `slow_write_floor_s`: less is what a busy machine does to
    anything, and to what is synced most. Nobody waits for a write; that it is slow says less about reads.

    `bad` bad outcomes among the last `window` open it. It stays open for `first_pause_s`, doubled on every relapse up
    to `longest_pause_s`, each time shortened by up to half at random. `trials` good outcomes in a row close it. A trial
    whose outcome is not reported within `trial_s` counts as lost, and another is let through.
    """

    window: int = 20
    bad: int = 5
    slow_factor: float = 20.0
    slow_floor_s: float = 0.05
    slow_write_floor_s: float = 0.5
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
    trials: int = 2
    trial_s: float = 30.0


class Breaker:
    """See the module docstring. Thread-safe; all time comes from `clock`, all chance from `draw`."""

    def __init__(self, clock: Clock, draw: random.Random, limits: BreakerLimits | None = None) -> None:
        self.opened = 0
        self.last_reason = ""
        self._clock = clock
        self._draw = draw
        self._limits = limits if limits is not None else BreakerLimits()
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._outcomes: deque[bool] = deque(maxlen=self._limits.window)
        self._pause_s = self._limits.first_pause_s
        self._retry_at_s = 0.0
        self._trial_ends_s: float | None = None
        self._good_trials = 0

    @property
    def state(self) -> BreakerState:
        """The state now. Open turns half-open when `allow` is asked after the pause."""
        return self._state

    def allow(self) -> bool:
        """Whether one transfer may start now. If it may, its outcome must be reported by `success` or `failure`."""
        with self._lock:
            now_s = self._clock.now()
            if self._state is BreakerState.CLOSED:
                return True
            if self._state is BreakerState.OPEN:
                if now_s < self._retry_at_s:
                    return False
                self._state = BreakerState.HALF_OPEN
                self._good_trials = 0
                self._trial_ends_s = None
            if self._trial_ends_s is not None and now_s < self._trial_ends_s:
                return False
            self._trial_ends_s = now_s + self._limits.trial_s
            return True

    def success(self) -> None:
        """A transfer ended well."""
        self._report(bad=False, reason="")

    def failure(self, reason: str) -> None:
        """A transfer ended badly."""
        self._report(bad=True, reason=reason)

    def trip(self, reason: str) -> None:
        """Open at once: what happened says more than one bad outcome."""
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._pause_s = min(2 * self._pause_s, self._limits.longest_pause_s)
            if self._state is not BreakerState.OPEN:
                self._open(reason)

    def _report(self, *, bad: bool, reason: str) -> None:
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._outcomes.append(bad)
                if bad and sum(self._outcomes) >= self._limits.bad:
                    self._open(reason)
            elif self._state is BreakerState.HALF_OPEN:
                self._trial_ends_s = None
                if bad:
                    self._pause_s = min(2 * self._pause_s, self._limits.longest_pause_s)
                    self._open(reason)
                else:
                    self._good_trials += 1
                    if self._good_trials >= self._limits.trials:
                        self._state = BreakerState.CLOSED
                        self._pause_s = self._limits.first_pause_s
            # Open: the outcome of a transfer that began before. It says nothing new.

    def _open(self, reason: str) -> None:
        self._state = BreakerState.OPEN
        self._outcomes.clear()
        self._retry_at_s = self._clock.now() + self._pause_s * self._draw.uniform(0.5, 1.0)
        self.last_reason = reason
        self.opened += 1
