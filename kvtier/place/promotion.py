"""Speculative promotion: bring up what is likely to be back within the window a transfer can serve.

A candidate is worth P(return in the window) / length of the window · seconds saved, per block; it takes the place of
the marginal resident if that exceeds the resident's worth by a margin. P comes from the survival curve of its forecast,
or from the tool chain: P(tool_j | tool_i) for the context that tool's calls have needed. Only returns inside
[need - lead_max, need - lead_min] count: sooner, the transfer would be late; later, bytes would only take up room.

Studies find little in it (docs/placement.md): eviction by worth keeps the likely returners anyway. So it is off by
default, keeps to a byte budget, waits while any demand is queued, and switches itself off while its bytes go unused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.predict.forecast import Forecast
from kvtier.predict.tool_chain import ToolChain


class PromotionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are those of the study."""

    margin: float = 1.3
    """A candidate must be worth so many times what it displaces."""
    lead_min_s: float = 0.5
    lead_max_s: float = 10.0
    share: float = 0.1
    """Share of a link's bandwidth to spend: a tenth keeps most of the gain for half of the bytes."""
    least_use: float = 0.15
    """Share of moved bytes that must be used, or it goes off (agent traces: .2-.4, chat: .01-.04)."""
    trial_bytes: int = 1 << 30
    """Bytes moved before the first verdict, and in every later trial."""
    retry_s: float = 600.0
    """Off for so long before the next trial; doubled each time, up to 16 times."""


class Candidate(NamedTuple):
    """A segment that could be brought up. `saved_s` is per block, what finding it in the faster tier saves."""

    segment_id: int
    blocks: int
    n_bytes: int
    probability: float
    saved_s: float

    def value(self, window_s: float) -> float:
        """Seconds saved per block and second of room."""
        return self.probability / window_s * self.saved_s


class ByteBudget:
    """A token bucket for one tier and direction. Not thread-safe."""

    def __init__(self, bytes_per_s: float, now: float, burst_s: float = 1.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._left = bytes_per_s * burst_s
        self._at_s = now

    def available(self, now: float) -> int:
        """Bytes that may be spent now."""
        self._left = min(self.bytes_per_s * self._burst_s, self._left + (now - self._at_s) * self.bytes_per_s)
        self._at_s = now
        return max(0, int(self._left))

    def take(self, n_bytes: int, now: float) -> bool:
        """Spend bytes; False, and nothing spent, if there are not enough. What is larger than a whole burst may go
        when the bucket is full, and is paid off before anything else goes."""
        full = self.bytes_per_s * self._burst_s
        if self.available(now) < min(n_bytes, int(full)):
            return False
        self._left -= n_bytes
        return True


class UseSwitch:
    """On while enough of what was moved is used; off, with a trial now and then, while it is not."""

    def __init__(self, options: PromotionOptions) -> None:
        self._options = options
        self._open: OrderedDict[int, int] = OrderedDict()  # bytes moved and not yet used, by segment
        self._moved = 0
        self._used = 0
        self._retry_s = options.retry_s
        self._off_until_s: float | None = None
        self.turned_off = 0

    def allows(self, now: float) -> bool:
        """Whether bytes may be moved now."""
        if self._off_until_s is None:
            return True
        if now < self._off_until_s:
            return False
        self._off_until_s, self._moved, self._used = None, 0, 0
        self._open.clear()
        return True

    @property
    def use(self) -> float:
        """Share of the moved bytes that were used, over about the last trials' worth."""
        return self._used / self._moved if self._moved else 0.0

    def moved(self, segment_id: int, n_bytes: int) -> None:
        """Bytes are being brought up for a segment."""
        self._moved += n_bytes
        self._open[segment_id] = self._open.get(segment_id, 0) + n_bytes

    def used(self, segment_id: int) -> None:
        """A request used the segment."""
        self._used += self._open.pop(segment_id, 0)

    def settle(self, now: float) -> None:
        """Judge, once a trial's worth of bytes has moved."""
        if self._off_until_s is not None or self._moved < self._options.trial_bytes:
            return
        if self.use < self._options.least_use:
            self._off_until_s = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, 16 * self._options.retry_s)
            self.turned_off += 1
            return
        self._retry_s = self._options.retry_s
        if self._moved >= 4 * self._options.trial_bytes:
            self._moved //= 2
            self._used //= 2
            while sum(self._open.values()) > self._moved:
                self._open.popitem(last=False)


class Promoter:
    """Chooses what to bring up. Not thread-safe: one control thread."""

    def __init__(self, options: PromotionOptions | None = None) -> None:
        self.options = options or PromotionOptions()
        self.switch = UseSwitch(self.options)

    @property
    def window_s(self) -> float:
        """Length of the window a return must fall into."""
        return self.options.lead_max_s - self.options.lead_min_s

    def plan(
        self, candidates: Iterable[Candidate], marginal_value: float, budget: ByteBudget, now: float, idle: bool
    ) -> list[Candidate]:
        """What to bring up now, most valuable first, within the budget, which is charged.

        `marginal_value` is what the room is worth to the marginal resident, in the unit of `Candidate.value`. Nothing
        goes unless the link is `idle`: no demand is queued and nobody waits for admission.
        """
        self.switch.settle(now)
        if not idle or not self.switch.allows(now):
            return []
        least, window_s = self.options.margin * marginal_value, self.window_s
        worth_it = [(c.value(window_s), c) for c in candidates]
        worth_it = [pair for pair in worth_it if pair[0] > least]
        worth_it.sort(key=lambda pair: (-pair[0], pair[1].segment_id))
        chosen = []
        for _, candidate in worth_it:
            if not budget.take(candidate.n_bytes, now):
                break
            self.switch.moved(candidate.segment_id, candidate.n_bytes)
            chosen.append(candidate)
        return chosen


def returns_in_window(
    forecast: Forecast, segments: npt.NDArray[np.int32], options: PromotionOptions, now: float
) -> npt.NDArray[np.float64]:
    """P(return between lead_min and lead_max from now) of each segment, by its survival curve."""
    late = forecast.return_probability(segments, now, options.lead_max_s)
    soon = forecast.return_probability(segments, now, options.lead_min_s)
    window: npt.NDArray[np.float64] = np.maximum(0.0, late - soon)
    return window


def next_contexts(
    tools: ToolChain, tool: int, contexts: Mapping[str, Sequence[int]], least: float = 0.1
) -> dict[int, float]:
    """P(needed next) of the segments that calls of a tool have used, for every tool likely to follow `tool`.

    `contexts` maps a tool to the segments its calls used (those several sessions share are worth naming).
    """
    needed: dict[int, float] = {}
    for name, probability in tools.next_tools(tool):
        if probability < least:
            break
        for segment_id in contexts.get(name, ()):
            needed[segment_id] = min(1.0, needed.get(segment_id, 0.0) + probability)
    return needed
