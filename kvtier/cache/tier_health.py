"""How one tier is doing: what it costs now, whether it may be asked, and which of its rows are better left alone.

Every finished transfer is noted here, once: it keeps the cost curves of both directions current, it is a good or a bad
outcome for the breaker, and it counts. A tier that answers, but far slower than when it was probed, is as bad as one
that fails. A row that could not be read is not asked for again for a while, however well the tier does otherwise.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cache.cost import CostCurve
from kvtier.clock import Clock
from kvtier.model.keys import KEY_BYTES, key_at
from kvtier.observe.metrics import Recorder
from kvtier.tiers.health import Breaker, BreakerLimits, BreakerState
from kvtier.tiers.protocol import RowId, RowStatus, TierProbe

_GAUGE = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_UNPROBED = TierProbe(0.0, 1e9, 0.0, 1e9)
ON_TRIAL = TierProbe(0.01, 1e8, 0.01, 1e8)
"""What a tier is taken to cost that could not be measured, until it has been used."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
_MOST_ROWS = 10_000
_KEY_WORDS = KEY_BYTES // 8

Calls = Sequence[tuple[int, float]]
"""(bytes, seconds) of calls into a tier."""


class NegativeCache:
    """Rows that failed lately, and until when they are left alone: twice as long every time. Bounded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: OrderedDict[tuple[bytes, int], tuple[float, float]] = OrderedDict()
        self._heads: npt.NDArray[np.uint64] | None = None  # first words of all keys, sorted; None: made when asked for

    def __len__(self) -> int:
        return len(self._rows)

    def failed(self, key: bytes, group: int) -> None:
        """The row could not be read."""
        _, pause_s = self._rows.pop((key, group), (0.0, _FIRST_PAUSE_S / 2))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._rows[key, group] = (self._clock.now() + pause_s, pause_s)
        self._heads = None
        if len(self._rows) > _MOST_ROWS:
            self._rows.popitem(last=False)

    def worked(self, key: bytes, group: int) -> None:
        """The row was read, or written anew."""
        if self._rows.pop((key, group), None) is not None:
            self._heads = None

    def holds(self, key: bytes, group: int) -> bool:
        """Whether the row is to be left alone now."""
        found = self._rows.get((key, group))
        return found is not None and self._clock.now() < found[0]

    def among(self, chain: bytes, blocks: int) -> list[tuple[int, int]]:
        """(block, group) of the rows of a chain's first `blocks` that are to be left alone now."""
        if not self._rows or not blocks:
            return []
        if self._heads is None:
            self._heads = np.unique(np.frombuffer(b"".join(key[:8] for key, _ in self._rows), np.uint64))
        # The first word of a key finds candidates; a prompt of ten thousand blocks is then asked about at once.
        heads = np.frombuffer(chain, np.uint64, blocks * _KEY_WORDS)[::_KEY_WORDS]
        at = np.minimum(np.searchsorted(self._heads, heads), len(self._heads) - 1)
        candidates = np.flatnonzero(self._heads[at] == heads).tolist()
        groups = {group for _, group in self._rows} if candidates else set()
        return [(b, g) for b in candidates for g in sorted(groups) if self.holds(key_at(chain, b), g)]


class TierHealth:
    """See the module docstring. One control thread."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        recorder: Recorder,
        probe: TierProbe | None = None,
        limits: BreakerLimits | None = None,
    ) -> None:
        probe = probe or _UNPROBED
        self.read = CostCurve(probe.read_latency_s, probe.read_bytes_per_s)
        self.write = CostCurve(probe.write_latency_s, probe.write_bytes_per_s)
        self.limits = limits or BreakerLimits()
        self.breaker = Breaker(clock, random.Random(name), self.limits)
        self.failed_rows = NegativeCache(clock)
        self._name = name
        self._recorder = recorder
        self._leave = False
        self._measured = True

    def on_trial(self) -> None:
        """Its cost could not be measured: it is left alone for a moment, then tried with care, and learned from use."""
        self._measured = False
        self._recorder.add("kvtier_faults", 1, self._name, "probe_failed")
        self.breaker.trip("probe_failed")

    def usable(self) -> bool:
        """Whether the breaker lets a transfer through now. A breaker on trial lets one through and waits for its
        outcome; leave that is not used (the gate declines, there is no room) is kept for the next transfer."""
        if self.breaker.state is BreakerState.HALF_OPEN and self._leave:
            return True
        self._leave = self.breaker.allow()
        return self._leave

    def sent(self) -> None:
        """Leave given by `usable` is used."""
        self._leave = False

    def note(
        self,
        rows: Sequence[RowId],
        statuses: Sequence[RowStatus],
        calls: Calls,
        read: bool,
        row_bytes: int,
        seconds: float,
    ) -> None:
        """A transfer ended. `rows` and `statuses` are those the tier was asked for, not what was cancelled before."""
        direction = "read" if read else "write"
        bad = [status for status in statuses if status is not RowStatus.OK]
        self._recorder.add("kvtier_bytes", (len(statuses) - len(bad)) * row_bytes, self._name, direction)
        self._recorder.add("kvtier_seconds", seconds, self._name, direction)
        for status in bad:
            self._recorder.add("kvtier_faults", 1, self._name, status.value)
        if len(self.failed_rows) or (read and bad):
            self._remember(rows, statuses, read)
        if not statuses:
            return
        if RowStatus.IO_ERROR in bad or RowStatus.CLOSED in bad:
            self.breaker.failure(RowStatus.IO_ERROR.value if RowStatus.IO_ERROR in bad else RowStatus.CLOSED.value)
        elif any(self._crawls(n_bytes, took_s, read) for n_bytes, took_s in calls):
            self._recorder.add("kvtier_faults", len(statuses), self._name, "slow")
            self.breaker.failure("slow")
        else:
            self.breaker.success()  # full or damaged it may be, but it answers
        if not bad:
            curve = self.read if read else self.write
            for n_bytes, took_s in calls:
                curve.observe(n_bytes, took_s)

    def asked(self, failure: str = "") -> None:
        """A question about what the tier holds was answered, or not: `failure` says why."""
        if failure:
            self._recorder.add("kvtier_faults", 1, self._name, failure)
            self.breaker.failure(failure)
        else:
            self.breaker.success()

    def stalled(self) -> None:
        """A call has not come back within the deadline: worth as much as several failures."""
        self._recorder.add("kvtier_faults", 1, self._name, "stall")
        self.breaker.trip("stall")

    def gauges(self) -> None:
        """Write the gauges of this tier's health to the recorder."""
        self._recorder.set("kvtier_breaker_state", _GAUGE[self.breaker.state], self._name)
        self._recorder.set("kvtier_failed_rows", len(self.failed_rows), self._name)
        for direction, curve in (("read", self.read), ("write", self.write)):
            self._recorder.set("kvtier_latency_seconds", curve.latency_s, self._name, direction)
            self._recorder.set("kvtier_bandwidth_bytes_per_second", curve.bytes_per_s, self._name, direction)

    def _remember(self, rows: Sequence[RowId], statuses: Sequence[RowStatus], read: bool) -> None:
        for row, status in zip(rows, statuses, strict=True):
            if status is RowStatus.OK:
                self.failed_rows.worked(row.key, row.group)
            elif read and status is RowStatus.IO_ERROR:
                self.failed_rows.failed(row.key, row.group)

    def _crawls(self, n_bytes: int, seconds: float, read: bool) -> bool:
        if not self._measured:
            return False
        expected_s = (self.read if read else self.write).probed_s(n_bytes)
        floor_s = self.limits.slow_floor_s if read else self.limits.slow_write_floor_s
        return seconds > max(floor_s, self.limits.slow_factor * expected_s)
