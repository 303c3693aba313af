"""A tier that fails as told: wraps any tier and injects faults, by script or by seed, always the same way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from kvtier.errors import TierError, TierFullError, TierIOError
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.meter import Meter
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, Tier, TierProbe, TierStats, is_shared


class FaultKind(Enum):
    """What goes wrong with one row, or with one call."""

    EIO = "eio"
    ENOSPC = "enospc"
    SHORT = "short"
    FLIP = "flip"
    DELAY = "delay"
    CLOSED = "closed"


class Fault(NamedTuple):
    """One fault: in the `call`-th call of the verb `op` (counted from 0), at `row` of it (every row if None).

    Write and read: EIO and SHORT become IO_ERROR, ENOSPC becomes FULL (IO_ERROR for reads); nothing of the row is
    moved, or half of it. FLIP changes bit `bit` of the payload: a write publishes a row that no longer matches its
    checksum, a read notices. Both show as CORRUPT when read.

    The other verbs: EIO raises TierIOError, ENOSPC TierFullError (a `reserve` answers None instead). SHORT: a `recover`
    finds the first half of its rows only, the others fail. FLIP: a `recover` names a bit of its first key wrongly, a
    `probe` is wrong by a factor of 2 to the power of `bit` modulo 32; the others have nothing to flip.

    DELAY sleeps `delay_s` before the call (a stall is a long delay). CLOSED closes.
    """

    op: str
    call: int
    kind: FaultKind
    row: int | None = None
    bit: int = 0
    delay_s: float = 0.0


VERBS = ("reserve", "write", "read", "release", "recover", "probe", "exists")
"""What a fault can befall."""


class FaultPlan(Protocol):
    """Says what goes wrong in a call."""

    def faults(self, op: str, call: int, n_rows: int) -> Iterable[Fault]:
        """The faults of the `call`-th `op` (the name of a verb), which is about `n_rows`."""
        ...


class Script:
    """A plan written out."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = list(faults)

    def faults(self, op: str, call: int, n_rows: int) -> list[Fault]:
        return [f for f in self._faults if f.op == op and f.call == call and (f.row is None or f.row < n_rows)]


class Seeded:
    """A plan drawn from a seed: each row of each write, read and question fails with probability `share`, in one of
    `kinds`."""

    def __init__(self, seed: int, share: float, kinds: Sequence[FaultKind] = tuple(FaultKind), delay_s: float = 0.0):
        self._seed = seed
        self._share = share
        self._kinds = [kind for kind in kinds if kind is not FaultKind.CLOSED]
        self._delay_s = delay_s

    def faults(self, op: str, call: int, n_rows: int) -> list[Fault]:
        if op not in ("write", "read", "exists"):
            return []
        draw = random.Random(f"{self._seed}/{op}/{call}")
        return [
            Fault(op, call, draw.choice(self._kinds), row, draw.getrandbits(16), self._delay_s)
            for row in range(n_rows)
            if draw.random() < self._share
        ]


class FaultyTier:
    """`inner`, with the faults of `plan` and every transfer slowed `slowdown` times. `injected` counts what was done.

    Deterministic as long as the order of the calls of one direction is. `sleep` is injectable for virtual clocks.
    """

    def __init__(
        self,
        inner: Tier,
        plan: FaultPlan | None = None,
        *,
        slowdown: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.row_bytes = inner.row_bytes
        self.injected: dict[FaultKind, int] = dict.fromkeys(FaultKind, 0)
        self._plan = plan if plan is not None else Script()
        self._slowdown = slowdown
        self._sleep = sleep
        self._lock = threading.Lock()
        self._calls = dict.fromkeys(VERBS, 0)
        self._rotten: set[int] = set()
        self._meter = Meter()

    def reserve(self, n: int) -> Slots | None:
        fault = self._fails("reserve", n)
        if fault is not None and fault.kind is FaultKind.ENOSPC:
            return None
        _raise(fault)
        return self.inner.reserve(n)

    def release(self, slots: Slots) -> None:
        _raise(self._fails("release", len(slots)))
        self.inner.release(slots)
        self._rotten.difference_update(slots.tolist())

    def recover(self) -> list[RecoveredRow]:
        fault = self._fails("recover", 1)
        if fault is None or fault.kind not in (FaultKind.SHORT, FaultKind.FLIP):
            _raise(fault)
            return self.inner.recover()
        found = self.inner.recover()
        if fault.kind is FaultKind.SHORT:
            return found[: len(found) // 2]
        if found:
            key = bytearray(found[0].row.key)
            key[fault.bit // 8 % len(key)] ^= 1 << fault.bit % 8
            found[0] = found[0]._replace(row=found[0].row._replace(key=bytes(key)))
        return found

    def exists(self, rows: Sequence[RowId]) -> list[bool]:
        """See SharedTier.exists; a script's op "exists" makes it fail as a whole, or late."""
        assert is_shared(self.inner)
        _raise(self._fails("exists", len(rows)))
        return self.inner.exists(rows)

    def adopt(self, slots: Slots, rows: Sequence[RowId]) -> None:
        """See SharedTier.adopt."""
        assert is_shared(self.inner)
        self.inner.adopt(slots, rows)

    def part(self, nonce: bytes) -> None:
        """See SharedTier.part."""
        assert is_shared(self.inner)
        self.inner.part(nonce)

    def probe(self) -> TierProbe:
        fault, slow = self._fails("probe", 1), self._slowdown
        if fault is not None and fault.kind is FaultKind.FLIP:
            slow *= 2.0 ** (fault.bit % 32)
        else:
            _raise(fault)
        probe = self.inner.probe()
        return TierProbe(
            probe.read_latency_s * slow,
            probe.read_bytes_per_s / slow,
            probe.write_latency_s * slow,
            probe.write_bytes_per_s / slow,
        )

    def close(self) -> None:
        self.inner.close()

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        check_arguments(slots, rows, sources, self.row_bytes)
        failing = self._begin("write", len(rows))
        refused = [i for i, f in failing.items() if f.kind is not FaultKind.FLIP]
        moved = [i for i in range(len(rows)) if i not in set(refused)]
        inner = self._timed(
            lambda: self.inner.write(slots[moved], [rows[i] for i in moved], [sources[i] for i in moved])
        )
        statuses = [RowStatus.IO_ERROR] * len(rows)
        for i, status in zip(moved, inner, strict=True):
            statuses[i] = status
            if i in failing and status is RowStatus.OK:
                self._rotten.add(int(slots[i]))
        for i in refused:
            if inner and inner[0] is RowStatus.CLOSED:
                statuses[i] = RowStatus.CLOSED
            elif failing[i].kind is FaultKind.ENOSPC:
                statuses[i] = RowStatus.FULL
            self._meter.fault(statuses[i].value)
        return statuses

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        check_arguments(slots, rows, targets, self.row_bytes)
        failing = self._begin("read", len(rows))
        statuses = self._timed(lambda: self.inner.read(slots, rows, targets))
        for i, status in enumerate(statuses):
            if status is not RowStatus.OK:
                continue
            fault = failing.get(i)
            if fault is not None and fault.kind is not FaultKind.FLIP:
                half = self.row_bytes // 2 if fault.kind is FaultKind.SHORT else 0
                targets[i][half:] = bytes(self.row_bytes - half)
                statuses[i] = RowStatus.IO_ERROR
            elif fault is not None or int(slots[i]) in self._rotten:
                bit = (fault.bit if fault is not None else 0) % (8 * self.row_bytes)
                targets[i][bit // 8] ^= 1 << bit % 8
                statuses[i] = RowStatus.CORRUPT
            if statuses[i] is not RowStatus.OK:
                self._meter.fault(statuses[i].value)
        return statuses

    def stats(self) -> TierStats:
        inner = self.inner.stats()
        own = self._meter.stats(capacity_rows=0, used_rows=0, cap_bytes=0, medium_bytes=0).faults
        faults = {reason: inner.faults.get(reason, 0) + own.get(reason, 0) for reason in {**inner.faults, **own}}
        return msgspec.structs.replace(inner, faults=faults)

    def _fails(self, op: str, n_rows: int) -> Fault | None:
        """What befalls a call as a whole."""
        return next(iter(self._begin(op, n_rows).values()), None)

    def _begin(self, op: str, n_rows: int) -> dict[int, Fault]:
        """Take the next call's faults: sleep or close at once, return what befalls single rows."""
        with self._lock:
            call = self._calls[op]
            self._calls[op] += 1
            planned = list(self._plan.faults(op, call, n_rows))
            failing: dict[int, Fault] = {}
            for fault in planned:
                self.injected[fault.kind] += 1
                if fault.kind not in (FaultKind.DELAY, FaultKind.CLOSED):
                    failing.update(dict.fromkeys(range(n_rows) if fault.row is None else [fault.row], fault))
        for fault in planned:
            if fault.kind is FaultKind.DELAY:
                self._sleep(fault.delay_s)
            elif fault.kind is FaultKind.CLOSED:
                self.inner.close()
        return failing

    def _timed(self, call: Callable[[], list[RowStatus]]) -> list[RowStatus]:
        begin_s = time.perf_counter()
        statuses = call()
        if self._slowdown > 1.0:
            self._sleep((self._slowdown - 1.0) * (time.perf_counter() - begin_s))
        return statuses


def _raise(fault: Fault | None) -> None:
    """Fail as a whole, if there is a fault."""
    if fault is not None:
        error: type[TierError] = TierFullError if fault.kind is FaultKind.ENOSPC else TierIOError
        raise error(f"{fault.op} fails as told ({fault.kind.value})")
