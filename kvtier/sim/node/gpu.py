"""The GPU: prefills one prompt at a time, first come first served; decoding is a pin, not a load.

With overlap a prompt may start while its last layers' blocks are still on their way, once what is left to load takes no
longer than its compute. If the compute ends first, the GPU stands still until they are there.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.place.gate import may_start
from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.flight import LATE_S, Flight
from kvtier.sim.node.hardware import Compute


class Gpu:
    """`resident(flight)` says how many blocks of its prompt need no compute, asked when it starts; `on_prefilled` is
    told of its first token, `on_busy` of seconds used."""

    def __init__(self, loop: EventLoop, compute: Compute, block_tokens: int, overlap: bool) -> None:
        self.compute = compute
        self.busy_s = 0.0
        self.stalled_s = 0.0
        self.resident: Callable[[Flight], int]
        self.on_prefilled: Callable[[Flight], None]
        self.on_busy: Callable[[float], None] = lambda seconds: None
        self._loop = loop
        self._block_tokens = block_tokens
        self._overlap = overlap
        self._queue: list[Flight] = []
        self._queued_s = 0.0
        self._current: Flight | None = None
        self._started_s = 0.0
        self._ends_s = 0.0
        self._computed_s = 0.0
        self._wakes_s = float("inf")

    @property
    def backlog_s(self) -> float:
        """Seconds of prefill before something that joined now."""
        return self._queued_s + (max(0.0, self._ends_s - self._loop.now) if self._current is not None else 0.0)

    def prefill_s(self, blocks: int, prompt_tokens: int) -> float:
        """Seconds to compute a prompt of which so many blocks are there. The last token always is computed."""
        return self.compute.prefill_s(min(blocks * self._block_tokens, prompt_tokens - 1), prompt_tokens)

    def join(self, flight: Flight) -> None:
        """Its turn comes when those before it are done and what it loads is there, or soon will be."""
        flight.compute_s = self.prefill_s(flight.cut, flight.prompt_tokens)
        self._queued_s += flight.compute_s
        self._queue.append(flight)
        self.poke()

    def poke(self) -> None:
        """Something has changed: start whoever may."""
        if self._current is not None:
            return
        now, soonest_s = self._loop.now, float("inf")
        for n, flight in enumerate(self._queue):
            left_s = flight.load_left_s(now)
            if not left_s or (self._overlap and may_start(left_s, flight.compute_s)):
                del self._queue[n]
                self._queued_s -= flight.compute_s
                self._start(flight)
                return
            if self._overlap and left_s > LATE_S:  # what is late tells of itself when it lands
                soonest_s = min(soonest_s, now + max(LATE_S, left_s - flight.compute_s))
        if soonest_s < self._wakes_s:
            self._wakes_s = soonest_s
            self._loop.at(soonest_s, self._wake)

    def loaded(self, flight: Flight) -> None:
        """The last block a flight was waiting for is there."""
        if flight is not self._current:
            self.poke()
        elif flight.stalled:
            self.stalled_s += self._loop.now - self._computed_s
            self._loop.after(flight.compute_s / self.compute.layers, self._finish)

    def _wake(self) -> None:
        self._wakes_s = float("inf")
        self.poke()

    def _start(self, flight: Flight) -> None:
        flight.compute_s = self.prefill_s(self.resident(flight), flight.prompt_tokens)
        flight.started_s = self._started_s = self._loop.now
        flight.load_left_at_start_s = flight.load_left_s(self._loop.now)
        self._current = flight
        self._ends_s = self._loop.now + flight.compute_s
        self._loop.at(self._ends_s, self._computed)

    def _computed(self) -> None:
        flight = self._current
        assert flight is not None
        self._computed_s = self._loop.now
        if flight.loads_left:
            flight.stalled = True
            return
        last_layer_s = flight.loaded_s + flight.compute_s / self.compute.layers
        if flight.loaded_s > flight.started_s and last_layer_s > self._loop.now:
            self._loop.at(last_layer_s, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        flight, self._current = self._current, None
        assert flight is not None
        used_s = self._loop.now - self._started_s
        self.busy_s += used_s
        self.on_busy(used_s)
        self.on_prefilled(flight)
        self.poke()
