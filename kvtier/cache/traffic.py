"""What is going on: how busy the GPU and the links are, what waits before whom, and what the gate made of it.

The gate prices by it, conservative mode is entered and left by it, the metrics explain decisions with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvtier.cache.request import CachedRequest
from kvtier.clock import Clock
from kvtier.observe.metrics import Recorder
from kvtier.place.busy import BusyMeter
from kvtier.place.gate import Cut, GpuLoad
from kvtier.place.mode import RecentTail

_MOST_AHEAD = 256
"""So many requests before one are looked at: more would be guesswork, and time on the engine's thread."""
_REMEMBERED = 64


class Decision(NamedTuple):
    """One decision of the gate, for people."""

    request_id: str
    start_token: int
    prompt_tokens: int
    cut: Cut
    gpu_share: float


class Traffic:
    """Meters of one cache. One control thread."""

    def __init__(self, clock: Clock, recorder: Recorder, io_threads: int, levels: Sequence[str]) -> None:
        now = clock.now()
        self._clock = clock
        self._recorder = recorder
        self._io_threads = io_threads
        self._gpu = BusyMeter(now)
        self._links = {name: BusyMeter(now) for name in levels}
        self._recent = {name: BusyMeter(now, 3.0) for name in levels}
        self._waiting: dict[CachedRequest, float] = {}  # recompute seconds of requests not started, in order of arrival
        self._present: int | None = None  # requests; None where the engine does not tell of them
        self.load_waits = RecentTail()
        self.decisions: deque[Decision] = deque(maxlen=_REMEMBERED)

    def arrived(self) -> None:
        """A request came."""
        self._present = (self._present or 0) + 1

    def left(self) -> None:
        """A request ended."""
        self._present = (self._present or 1) - 1

    def _others(self) -> float:
        """Requests beside the one that is decided about."""
        return math.inf if self._present is None else max(0, self._present - 1)

    def prefilled(self, seconds: float) -> None:
        """The GPU computed prompts for so long."""
        self._gpu.note(seconds, self._clock.now())

    def moved(self, name: str, seconds: float) -> None:
        """Somebody waited for a read of `seconds`, summed over I/O threads, from a tier."""
        now, share = self._clock.now(), seconds / self._io_threads
        for meters in (self._links, self._recent):
            meters.setdefault(name, BusyMeter(now)).note(share, now)

    def gpu_share(self) -> float:
        """Share of its time the GPU computes prompts."""
        return self._gpu.share(self._clock.now())

    def link_share(self, name: str) -> float:
        """Share of its time a tier's link is busy with reads somebody waits for."""
        meter = self._links.get(name)
        return meter.share(self._clock.now()) if meter is not None else 0.0

    def link_price(self, name: str) -> float:
        """Seconds others lose for a second of a tier's link; 0 for who is alone."""
        meter = self._links.get(name)
        return meter.price(self._clock.now(), self._others()) if meter is not None else 0.0

    def busiest_link(self) -> float:
        """Share of the busiest link over the last seconds, scaled so that one always busy is 1."""
        now = self._clock.now()
        return max((meter.share(now) / 0.9 for meter in self._recent.values()), default=0.0)

    def waits(self, request: CachedRequest, recompute_s: float) -> None:
        """A request that has not started leaves so much compute to the GPU."""
        self._waiting[request] = recompute_s

    def started(self, request: CachedRequest) -> None:
        """It computes now, or is gone."""
        self._waiting.pop(request, None)

    def gpu_for(self, request: CachedRequest) -> GpuLoad:
        """What this request meets at the GPU: the prefill of those before it, and the price of a second."""
        queue_s = 0.0
        for other, seconds in islice(self._waiting.items(), _MOST_AHEAD):
            if other is request:
                break
            queue_s += seconds
        return GpuLoad(queue_s, self._gpu.price(self._clock.now(), self._others()))

    def gpu_now(self) -> GpuLoad:
        """The same where nothing is known of other requests."""
        return GpuLoad(0.0, self._gpu.price(self._clock.now()))

    def decided(self, request_id: str, start_token: int, prompt_tokens: int, cut: Cut) -> None:
        """Count a decision and what it was expected to cost."""
        add = self._recorder.add
        add("kvtier_gate_decisions", 1, "all" if cut.blocks == cut.found else "part" if cut.blocks else "none")
        for term, seconds in (
            ("load", cut.load_s),
            ("exposed", cut.exposed_s),
            ("recompute", cut.recompute_s),
            ("recompute_without", cut.recompute_all_s),
            ("queue", cut.queue_s),
        ):
            add("kvtier_gate_seconds", seconds, term)
        if cut.recompute_all_s > 0:
            self._recorder.observe("kvtier_effective_hit", max(0.0, cut.effective_hit))
        self.decisions.append(Decision(request_id, start_token, prompt_tokens, cut, self.gpu_share()))

    def gauges(self) -> None:
        """Write the gauges to the recorder."""
        self._recorder.set("kvtier_gpu_busy", self.gpu_share())
        for name in self._links:
            self._recorder.set("kvtier_link_busy", self.link_share(name), name)
