"""How busy a GPU or a link is, and what that makes a second of it cost.

A second taken from a server that is busy a share ρ of the time delays everyone else by ρ/(1-ρ) seconds on average
(M/G/1): the price the gate puts on recompute, and on the seconds a load takes from its link.
"""

from __future__ import annotations

import math

TIME_CONSTANT_S = 60.0
HIGHEST_SHARE = 0.9
"""Above it the price is held: the formula goes to infinity, the estimate does not."""


class BusyMeter:
    """Exponentially weighted share of the time a server was busy. Not thread-safe; times come from the caller."""

    __slots__ = ("_at_s", "_share", "_time_constant_s")

    def __init__(self, now: float, time_constant_s: float = TIME_CONSTANT_S) -> None:
        self._at_s = now
        self._share = 0.0
        self._time_constant_s = time_constant_s

    def note(self, busy_s: float, now: float) -> None:
        """The server was busy for `busy_s` seconds up to about now; what several requests shared is given once."""
        if busy_s > 0:
            self._share = self._decayed(now) - math.expm1(-busy_s / self._time_constant_s)
            self._at_s = max(now, self._at_s)

    def share(self, now: float) -> float:
        """ρ: between 0 and HIGHEST_SHARE."""
        return min(HIGHEST_SHARE, self._decayed(now))

    def price(self, now: float, others: float = math.inf) -> float:
        """e = ρ/(1-ρ): seconds others lose for a second taken now. Never more than there are `others` to lose one:
        ρ/(1-ρ) is how many there are on average, and whoever is alone delays nobody, however busy the server."""
        share = self.share(now)
        return min(share / (1.0 - share), others)

    def _decayed(self, now: float) -> float:
        return self._share * math.exp(-max(0.0, now - self._at_s) / self._time_constant_s)
