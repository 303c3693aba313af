"""The nvme tier: one preallocated slab file and its journal per key space, direct I/O, every row verified.

A write goes data first, journal second: a row exists once its publish record is appended. The free record of a release
is appended before the slot is written again (`Frees`). Nothing is synced in between: a killed process loses nothing,
and after a power cut the row header and the checksum, compared at every read, turn what was lost into misses. `close`
syncs.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.errors import ConfigError, IntegrityError
from kvtier.tiers.addresses import round_up
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.meter import Meter
from kvtier.tiers.nvme.batch import open_batch_io
from kvtier.tiers.nvme.format import Entry, Geometry
from kvtier.tiers.nvme.frees import Frees
from kvtier.tiers.nvme.io import BLOCK, Syscalls
from kvtier.tiers.nvme.recovery import parents_first
from kvtier.tiers.nvme.slab import Slab
from kvtier.tiers.nvme.space import WEAR_FILE
from kvtier.tiers.nvme.transfer import Batch, RowTransfer, status_of
from kvtier.tiers.nvme.wear import WriteBudget
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, TierProbe, TierStats
from kvtier.tiers.slots import SlotTable

_CLOSE_WAIT_S = 30.0
_PROBE_S = 0.2


class NvmeTier:
    """A `Tier` on a local disk. See the module docstring for durability and `kvtier.tiers.protocol` for the contract.

    `max_io_bytes` bounds one system call; adjacent slots are joined up to it. Buffers that start on a sector boundary
    are read and written in place, others are copied once.
    """

    def __init__(
        self,
        path: str,
        key_space_digest: bytes,
        layout_digest: str,
        row_bytes: int,
        cap_bytes: int,
        *,
        name: str = "nvme",
        max_io_bytes: int = 8 << 20,
        direct: bool = True,
        backend: str = "threads",
        daily_write_bytes: int = 0,
        syscalls: Syscalls | None = None,
        frees_in_background: bool = True,
    ) -> None:
        """Open or create the slab. `backend` is one of `kvtier.tiers.nvme.batch.BACKENDS`; see `Frees` for the last.

        Raises ConfigError (path, cap, in use) or TierIOError."""
        self.name = name
        self.row_bytes = row_bytes
        self.cap_bytes = cap_bytes
        self._meter = Meter()
        geometry = Geometry.of(row_bytes)
        self._slab = Slab(
            path,
            key_space_digest,
            layout_digest,
            geometry,
            cap_bytes,
            direct=direct,
            syscalls=syscalls if syscalls is not None else Syscalls(),
            fault=self._meter.fault,
        )
        plan = self._slab.plan
        try:
            self._io = open_batch_io(
                self._slab.file, backend, plan.scratch_offset, plan.scratch_bytes, self._meter.fault
            )
        except ConfigError:
            self._slab.close()
            raise
        self._budget = WriteBudget(daily_write_bytes, os.path.join(path, WEAR_FILE))
        self._slot_bytes = geometry.slot_bytes
        self._transfer = RowTransfer(self._slab.file, self._io, geometry, self._slab.seal, max_io_bytes)
        self._journal = self._slab.journal
        self._recovered = self._slab.records
        self._slots = SlotTable(self._slab.plan.n_slots)
        self._slots.add(np.flatnonzero(self._journal.generation > 0).astype(np.int32), published=True)
        self._slots.add(np.flatnonzero(self._journal.generation == 0).astype(np.int32))
        self._next_generation = int(self._journal.generation.max()) + 1
        self._frees = Frees(self._journal, plan.n_slots, self._meter.fault, in_background=frees_in_background)
        self._in_flight = InFlight()
        self._generation_lock = threading.Lock()
        self._probe_lock = threading.Lock()

    @property
    def backend(self) -> str:
        """The back end in use."""
        return self._io.name

    # ---- control thread

    def reserve(self, n: int) -> Slots | None:
        return None if self._in_flight.closed else self._slots.take(n)

    def release(self, slots: Slots) -> None:
        """See the protocol. No I/O: while the journal cannot be written, neither can what is written to these slots."""
        if self._in_flight.closed:
            return
        published = slots[self._slots.published(slots)]
        self._slots.retire(slots)
        self._frees.add(published)
        self._slots.reuse(slots)

    def recover(self) -> list[RecoveredRow]:
        records, self._recovered = self._recovered, self._recovered[:0]
        return parents_first(records)

    def close(self) -> None:
        """Stop, wait for transfers in flight, sync, unlock."""
        if self._in_flight.closed:
            return
        if self._in_flight.close(_CLOSE_WAIT_S) and self._frees.close():
            self._io.close()
            self._budget.save()
            self._slab.close()
        else:  # a transfer hangs in the kernel: closing the file now could redirect it to another one
            self._meter.fault("close_abandoned")

    # ---- any thread

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. Rows beyond the write budget are FULL: the last ones, for a tail needs its head. Raises
        IntegrityError for slots not reserved, and for keys or buffers of a wrong size."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, sources, self.row_bytes)
            self._slots.require_reserved(slots)
            begin_s = time.perf_counter()
            n = self._budget.grant(len(rows), self._slot_bytes)
            batch = Batch(slots[:n], rows[:n], sources[:n], self._take_generations(n))
            unsettled = self._frees.settle(batch.slots)
            if unsettled is None:
                statuses = self._publish(batch, self._transfer.write(batch))
            else:
                statuses = [status_of(unsettled)] * n
            self._meter.rows_written(statuses, self.row_bytes, begin_s)
            self._meter.fault("write_budget", len(rows) - n)
            return statuses + [RowStatus.FULL] * (len(rows) - n)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. A slot that is not published is FOREIGN. Raises IntegrityError for buffers of a wrong
        size."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, targets, self.row_bytes)
            begin_s = time.perf_counter()
            statuses = [RowStatus.FOREIGN] * len(rows)
            known = np.flatnonzero(self._slots.published(slots))
            at = known.tolist()
            generations = self._journal.generation[slots[known]].tolist()
            batch = Batch(slots[known], [rows[i] for i in at], [targets[i] for i in at], generations)
            for i, status in zip(at, self._transfer.read(batch), strict=True):
                statuses[i] = status
            self._meter.rows_read(statuses, self.row_bytes, begin_s)
            return statuses

    def probe(self) -> TierProbe:
        """See the protocol. Uses room kept for this at the end of the slab; a medium that fails or a closed tier
        probes as infinitely slow."""
        with self._in_flight.transfer() as is_open, self._probe_lock:
            if not is_open:
                return _UNUSABLE
            size = min(self._slab.plan.scratch_bytes, max(BLOCK, 4 * round_up(self.row_bytes, BLOCK)))
            buffer = memoryview(mmap.mmap(-1, size))
            try:
                write_small_s, write_large_s = self._time(self._slab.file.write, buffer)
                read_small_s, read_large_s = self._time(self._slab.file.read, buffer)
            except OSError:
                self._meter.fault("probe_io_error")
                return _UNUSABLE
        read_rate = size / max(read_large_s - read_small_s, read_large_s / 10)
        write_rate = size / max(write_large_s - write_small_s, write_large_s / 10)
        return TierProbe(read_small_s, read_rate, write_small_s, write_rate)

    def stats(self) -> TierStats:
        return self._meter.stats(
            capacity_rows=self._slots.capacity,
            used_rows=self._slots.used,
            cap_bytes=self.cap_bytes,
            medium_bytes=self._slab.medium_bytes(),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots and journal agree. Control thread, nothing in flight."""
        self._slots.check_integrity()
        every = np.arange(self._slots.capacity, dtype=np.int32)
        journaled = self._journal.generation > 0
        journaled[self._frees.owed] = False
        if not np.array_equal(self._slots.published(every), journaled):
            raise IntegrityError("published slots and the journal's last words differ")

    # ---- inside

    def _take_generations(self, n: int) -> range:
        with self._generation_lock:
            first = self._next_generation
            self._next_generation += n
        return range(first, first + n)

    def _publish(self, batch: Batch, statuses: list[RowStatus]) -> list[RowStatus]:
        """Append the rows that arrived to the journal; if that fails, none of them exists."""
        entries = [
            Entry(int(slot), row, generation)
            for slot, row, generation, status in zip(batch.slots, batch.rows, batch.generations, statuses, strict=True)
            if status is RowStatus.OK
        ]
        if not entries:
            return statuses
        try:
            self._journal.publish(entries)
        except OSError as error:
            failed = status_of(error)
            return [failed if status is RowStatus.OK else status for status in statuses]
        self._slots.publish(np.array([entry.slot for entry in entries], dtype=np.int32))
        return statuses

    def _time(self, call: Callable[[int, list[memoryview]], None], buffer: memoryview) -> tuple[float, float]:
        """Fastest seconds for one block and for the whole buffer at the scratch of the slab."""
        offset = self._slab.plan.scratch_offset
        deadline_s = time.perf_counter() + _PROBE_S / 2
        fastest = [float("inf"), float("inf")]
        while True:
            for k, length in enumerate((BLOCK, buffer.nbytes)):
                begin_s = time.perf_counter()
                call(offset, [buffer[:length]])
                fastest[k] = min(fastest[k], time.perf_counter() - begin_s)
            if time.perf_counter() + 2 * fastest[1] > deadline_s:
                return fastest[0], fastest[1]


_UNUSABLE = TierProbe(float("inf"), 1.0, float("inf"), 1.0)
