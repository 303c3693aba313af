"""Rows to and from a slab: adjacent slots in one vectored transfer, without copies where memory alignment allows."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvtier.codec.checksum import checksum64
from kvtier.tiers.addresses import address_of
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

    def __init__(self, file: DirectFile, geometry: Geometry, seal: RowSeal, max_io_bytes: int) -> None:
        self._file = file
        self._geometry = geometry
        self._seal = seal
        self._most = max(1, min(max_io_bytes // geometry.slot_bytes, IOV_MAX // 2))
        self._pool = BouncePool(self._most * geometry.slot_bytes)

    def offset_of(self, slot: int) -> int:
        """Where a slot starts in the file."""
        return BLOCK + slot * self._geometry.slot_bytes

    def write(self, batch: Batch) -> list[RowStatus]:
        """Write rows and their headers."""
        statuses = [RowStatus.OK] * len(batch.rows)
        for run in adjacent_runs(batch.slots, self._most):
            self._write_run(batch, run, statuses)
        return statuses

    def read(self, batch: Batch) -> list[RowStatus]:
        """Read rows and verify header, then payload."""
        statuses = [RowStatus.OK] * len(batch.rows)
        for run in adjacent_runs(batch.slots, self._most):
            self._read_run(batch, run, statuses)
        return statuses

    def _write_run(self, batch: Batch, run: list[int], statuses: list[RowStatus]) -> None:
        with self._pool.borrow() as scratch:
            vectored = self._vectored(batch, run)
            tails, iovecs = self._arrange(batch, run, scratch, vectored)
            for i, tail in zip(run, tails, strict=True):
                source = batch.buffers[i]
                checksum = checksum64(source)
                header = self._seal.pack(int(batch.slots[i]), batch.rows[i], batch.generations[i], checksum)
                self._fill(tail, source, header, whole=not vectored)
            try:
                self._file.write(self.offset_of(int(batch.slots[run[0]])), iovecs)
                return
            except OSError as error:
                if len(run) == 1:
                    statuses[run[0]] = status_of(error)
                    return
        for i in run:
            self._write_run(batch, [i], statuses)

    def _read_run(self, batch: Batch, run: list[int], statuses: list[RowStatus]) -> None:
        with self._pool.borrow() as scratch:
            vectored = self._vectored(batch, run)
            tails, iovecs = self._arrange(batch, run, scratch, vectored)
            try:
                self._file.read(self.offset_of(int(batch.slots[run[0]])), iovecs)
            except OSError as error:
                if len(run) == 1:
                    statuses[run[0]] = status_of(error)
                    return
            else:
                for i, tail in zip(run, tails, strict=True):
                    statuses[i] = self._accept(batch, i, tail, whole=not vectored)
                return
        for i in run:
            self._read_run(batch, [i], statuses)

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
