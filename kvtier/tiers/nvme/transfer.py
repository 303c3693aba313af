"""Rows to and from a slab: adjacent slots in one vectored transfer, without copies where memory alignment allows."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtier.codec.checksum import checksum64
from kvtier.tiers.addresses import address_of
from kvtier.tiers.nvme.batch import BatchIo, Request
from kvtier.tiers.nvme.format import ROW_HEADER_BYTES, Geometry, RowSeal, Verdict
from kvtier.tiers.nvme.io import BLOCK, IOV_MAX, BouncePool, DirectFile
from kvtier.tiers.protocol import RowId, RowStatus, Slots

_LEAST_VECTORED_BODY_BYTES = 32 << 10
"""Below this, gathering rows by memcpy into one buffer is cheaper than one iovec for each."""

_STATUS_OF_VERDICT = {Verdict.CORRUPT: RowStatus.CORRUPT, Verdict.FOREIGN: RowStatus.FOREIGN}


class Batch(NamedTuple):
    """Rows to move: parallel sequences. `generations[i]` is what slot i's header says or must say."""

    slots: Slots
    rows: Sequence[RowId]
    buffers: Sequence[memoryview]
    generations: Sequence[int]


def status_of(error: OSError) -> RowStatus:
    """How an I/O error is reported."""
    return RowStatus.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else RowStatus.IO_ERROR


def adjacent_runs(slots: Slots, most: int) -> list[list[int]]:
    """Positions in `slots` in ascending order of slot, cut wherever slots are not adjacent or `most` are together."""
    order = np.argsort(slots, kind="stable")
    positions = order.tolist()
    numbers = slots[order].tolist()
    runs: list[list[int]] = []
    for i, position in enumerate(positions):
        if runs and numbers[i] == numbers[i - 1] + 1 and len(runs[-1]) < most:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


class RowTransfer:
    """Moves batches of rows between buffers and one slab file. Thread-safe for disjoint slots. Raises nothing:
    a run that fails is repeated row by row, so that one bad sector costs one row."""

    def __init__(self, file: DirectFile, io: BatchIo, geometry: Geometry, seal: RowSeal, max_io_bytes: int) -> None:
        self._file = file
        self._io = io
        self._geometry = geometry
        self._seal = seal
        self._most = max(1, min(max_io_bytes // geometry.slot_bytes, IOV_MAX // 2))
        self._pool = BouncePool(self._most * geometry.slot_bytes)

    def offset_of(self, slot: int) -> int:
        """Where a slot starts in the file."""
        return BLOCK + slot * self._geometry.slot_bytes

    def write(self, batch: Batch) -> list[RowStatus]:
        """Write rows and their headers."""
        return self._move(batch, write=True)

    def read(self, batch: Batch) -> list[RowStatus]:
        """Read rows and verify header, then payload."""
        return self._move(batch, write=False)

    def _move(self, batch: Batch, *, write: bool) -> list[RowStatus]:
        statuses = [RowStatus.OK] * len(batch.rows)
        runs, depth = adjacent_runs(batch.slots, self._most), self._io.depth
        for start in range(0, len(runs), depth):
            failed = self._move_runs(batch, runs[start : start + depth], statuses, write)
            for i in failed:
                self._move_runs(batch, [[i]], statuses, write)
        return statuses

    def _move_runs(self, batch: Batch, runs: list[list[int]], statuses: list[RowStatus], write: bool) -> list[int]:
        """Move up to `depth` runs at once. Returns the rows of longer runs that failed: they are to be tried alone."""
        alone: list[int] = []
        with contextlib.ExitStack() as stack:
            arranged = []
            for run in runs:
                scratch = stack.enter_context(self._pool.borrow())
                vectored = self._vectored(batch, run)
                tails, iovecs = self._arrange(batch, run, scratch, vectored)
                if write:
                    self._seal_run(batch, run, tails, whole=not vectored)
                arranged.append((run, tails, vectored, Request(self.offset_of(int(batch.slots[run[0]])), iovecs)))
            outcomes = self._io.transfer([request for *_, request in arranged], write=write)
            for (run, tails, vectored, _), error in zip(arranged, outcomes, strict=True):
                if error is not None and len(run) > 1:
                    alone += run
                elif error is not None:
                    statuses[run[0]] = status_of(error)
                elif not write:
                    for i, tail in zip(run, tails, strict=True):
                        statuses[i] = self._accept(batch, i, tail, whole=not vectored)
        return alone

    def _seal_run(self, batch: Batch, run: list[int], tails: list[memoryview], *, whole: bool) -> None:
        for i, tail in zip(run, tails, strict=True):
            source = batch.buffers[i]
            checksum = checksum64(source)
            header = self._seal.pack(int(batch.slots[i]), batch.rows[i], batch.generations[i], checksum)
            self._fill(tail, source, header, whole=whole)

    def _vectored(self, batch: Batch, run: list[int]) -> bool:
        """Whether the bodies can go straight between the file and the caller's buffers."""
        if not self._file.direct:
            return True
        if self._geometry.body_bytes < _LEAST_VECTORED_BODY_BYTES:
            return False
        align = self._file.memory_align
        return all(address_of(batch.buffers[i]) % align == 0 for i in run)

    def _arrange(
        self, batch: Batch, run: list[int], scratch: memoryview, vectored: bool
    ) -> tuple[list[memoryview], list[memoryview]]:
        """Scratch pieces, one a row (its tail, or its whole slot), and the buffers of the transfer."""
        piece = self._geometry.tail_bytes if vectored else self._geometry.slot_bytes
        pieces = [scratch[k * piece : (k + 1) * piece] for k in range(len(run))]
        if not vectored:
            return pieces, [scratch[: len(run) * piece]]
        body = self._geometry.body_bytes
        iovecs = []
        for i, tail in zip(run, pieces, strict=True):
            if body:
                iovecs.append(batch.buffers[i][:body])
            iovecs.append(tail)
        return pieces, iovecs

    def _fill(self, piece: memoryview, source: memoryview, header: bytes, *, whole: bool) -> None:
        """Put what does not come from the caller's buffer into scratch. numpy copies without the GIL."""
        start = 0 if whole else self._geometry.body_bytes
        rest = self._geometry.row_bytes - start
        into = np.frombuffer(piece, dtype=np.uint8)
        if rest:
            np.copyto(into[:rest], np.frombuffer(source, dtype=np.uint8)[start:])
        into[rest:-ROW_HEADER_BYTES] = 0
        piece[-ROW_HEADER_BYTES:] = header

    def _accept(self, batch: Batch, i: int, piece: memoryview, *, whole: bool) -> RowStatus:
        """Verify a row that was read; hand over what passed through scratch."""
        header = bytes(piece[-ROW_HEADER_BYTES:])
        verdict, promised = self._seal.check(header, int(batch.slots[i]), batch.rows[i], batch.generations[i])
        if verdict is not Verdict.OK:
            return _STATUS_OF_VERDICT[verdict]
        target = batch.buffers[i]
        start = 0 if whole else self._geometry.body_bytes
        rest = self._geometry.row_bytes - start
        if rest:
            np.copyto(np.frombuffer(target, dtype=np.uint8)[start:], np.frombuffer(piece, dtype=np.uint8)[:rest])
        return RowStatus.OK if checksum64(target) == promised else RowStatus.CORRUPT
