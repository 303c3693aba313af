"""What the mover carries: transfers, cut into chunks, put together again into calls of a useful size."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cache.seals import Seals
from kvtier.tiers.addresses import round_up
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.protocol import RowId, RowStatus

Slots = npt.NDArray[np.int32]


class Urgency(IntEnum):
    """Order of service."""

    DEMAND = 0
    LOOK_AHEAD = 1
    SPECULATIVE = 2
    STORE = 3


class Carrier(Protocol):
    """What a transfer asks of a tier: see `Tier`."""

    name: str
    row_bytes: int

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]: ...

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]: ...


@dataclass(slots=True, eq=False)
class Transfer:
    """Rows to carry between `tier` (slots there) and memory (one view a row, in the same order).

    `statuses` is filled when it ended; rows that were cancelled before they began are CLOSED and marked in `dropped`.
    `calls` are the calls into the tier that carried it, alone or together with others: (bytes, seconds) each. `seconds`
    is its share of them.
    """

    tier: Carrier
    slots: Slots
    rows: Sequence[RowId]
    views: Sequence[memoryview]
    read: bool
    urgency: Urgency
    tag: object = None
    statuses: list[RowStatus] = field(default_factory=list)
    seconds: float = 0.0
    calls: list[tuple[int, float]] = field(default_factory=list)
    dropped: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    left: int = 0
    # For views that their owner may take back at any time: the tier moves bytes of buffers of ours, and these are
    # touched only while `pages` admits it.
    pages: InFlight | None = None
    # Where the rows are in memory, and what seals them there; rows found damaged there are marked, and not written.
    seals: Seals | None = None
    memory_slots: Slots = field(default_factory=lambda: np.zeros(0, np.int32))
    damaged: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def asked(self) -> tuple[Sequence[RowId], Sequence[RowStatus]]:
        """The rows the tier was asked for, and how they ended."""
        if not self.dropped.any():
            return self.rows, self.statuses
        kept = np.flatnonzero(~self.dropped).tolist()
        return [self.rows[i] for i in kept], [self.statuses[i] for i in kept]


@dataclass(order=True, slots=True)
class Chunk:
    """Rows [start, stop) of a transfer: what may travel in one call."""

    urgency: int
    sequence: int
    transfer: Transfer = field(compare=False)
    start: int = field(compare=False)
    stop: int = field(compare=False)

    @property
    def n_bytes(self) -> int:
        return (self.stop - self.start) * self.transfer.tier.row_bytes


@dataclass(slots=True, eq=False)
class Call:
    """Chunks that go into the tier together: same tier, same direction, same urgency."""

    chunks: list[Chunk]
    began_s: float
    reported: bool = False

    @property
    def read(self) -> bool:
        return self.chunks[0].transfer.read

    @property
    def n_bytes(self) -> int:
        return sum(chunk.n_bytes for chunk in self.chunks)

    def run(self, scratch: Scratch) -> list[RowStatus]:
        """Ask the tier. One status a row, in the order of the chunks; whatever it raises becomes IO_ERROR."""
        first = self.chunks[0].transfer
        parts = [(chunk.transfer, slice(chunk.start, chunk.stop)) for chunk in self.chunks]
        slots = np.concatenate([transfer.slots[part] for transfer, part in parts])
        rows = [row for transfer, part in parts for row in transfer.rows[part]]
        views = [view for transfer, part in parts for view in transfer.views[part]]
        if first.pages is not None:
            views = scratch.rows(len(rows), first.tier.row_bytes)
        if first.read:
            statuses = _ask(first.tier.read, slots, rows, views)
            landed = self._exchange(views, statuses)
            statuses = [s if there else RowStatus.CLOSED for s, there in zip(statuses, landed, strict=True)]
            self._seal(statuses)
            return statuses
        taken = self._exchange(views, None)
        fit = [i for i, (there, intact) in enumerate(zip(taken, self._intact(), strict=True)) if there and intact]
        if len(fit) == len(rows):
            return _ask(first.tier.write, slots, rows, views)
        written = _ask(first.tier.write, slots[fit], [rows[i] for i in fit], [views[i] for i in fit]) if fit else []
        statuses = [RowStatus.CLOSED if not there else RowStatus.CORRUPT for there in taken]
        for i, status in zip(fit, written, strict=True):
            statuses[i] = status
        return statuses

    def _seal(self, statuses: Sequence[RowStatus]) -> None:
        """Rows that arrived in memory verified are sealed."""
        at = 0
        for chunk in self.chunks:
            transfer, n = chunk.transfer, chunk.stop - chunk.start
            if transfer.seals is not None:
                good = [chunk.start + i for i in range(n) if statuses[at + i] is RowStatus.OK]
                transfer.seals.set(transfer.memory_slots[good], [transfer.views[i] for i in good])
            at += n

    def _intact(self) -> list[bool]:
        """Which rows memory still holds as they were sealed; marks those that are not."""
        answers: list[bool] = []
        for chunk in self.chunks:
            transfer, part = chunk.transfer, slice(chunk.start, chunk.stop)
            if transfer.seals is None:
                answers += [True] * (chunk.stop - chunk.start)
                continue
            intact = transfer.seals.intact(transfer.memory_slots[part], transfer.views[part])
            transfer.damaged[part] = [not whole for whole in intact]
            transfer.dropped[part] |= transfer.damaged[part]  # memory's fault: the tier was not asked
            answers += intact
        return answers

    def _exchange(self, views: Sequence[memoryview], statuses: Sequence[RowStatus] | None) -> list[bool]:
        """Copy between our buffers and pages that others own, where those are still ours to touch: out of the pages, or
        into them what has been read well. Says for which rows it was done."""
        done, at = [], 0
        for chunk in self.chunks:
            transfer, n = chunk.transfer, chunk.stop - chunk.start
            if transfer.pages is None:
                done += [True] * n
            else:
                with transfer.pages.transfer() as ours:
                    for i in range(n if ours else 0):
                        page, view = transfer.views[chunk.start + i], views[at + i]
                        if statuses is None:
                            view[:] = page
                        elif statuses[at + i] is RowStatus.OK:
                            page[:] = view
                done += [ours] * n
            at += n
        return done


def _ask(
    verb: Callable[[Slots, Sequence[RowId], Sequence[memoryview]], list[RowStatus]],
    slots: Slots,
    rows: Sequence[RowId],
    views: Sequence[memoryview],
) -> list[RowStatus]:
    try:
        answer = verb(slots, rows, views)
    except Exception:  # noqa: BLE001 - thread boundary: a tier that breaks its contract costs misses, not the engine
        answer = []
    return answer if len(answer) == len(rows) else [RowStatus.IO_ERROR] * len(rows)


class Scratch:
    """Buffers of one I/O thread, page-aligned, as large as its largest call."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def rows(self, n: int, row_bytes: int) -> list[memoryview]:
        """Views for `n` rows, each on a page of its own start."""
        stride = round_up(row_bytes, mmap.PAGESIZE) if row_bytes >= mmap.PAGESIZE else row_bytes
        if self._view.nbytes < n * stride:
            self._view = memoryview(mmap.mmap(-1, n * stride))
        return [self._view[i * stride : i * stride + row_bytes] for i in range(n)]
