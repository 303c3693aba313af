"""The cxl tier: numbered rows in a mapped region, each with a header and a checksum.

Rows are copied and checked in one pass, by pieces that stay in the CPU's cache. A row exists once its header is
written, after its payload; a release wipes the header first. So what a killed process leaves on a devdax device or in a
file is recovered by the next one, from the headers alone, and every payload is still checked when it is read. Memory
of a NUMA node, and everything after a power cut, starts empty: there is nothing to sync.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.codec.checksum import copy_checksummed
from kvtier.errors import ConfigError
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.copy_rate import measure_copies
from kvtier.tiers.cxl.format import SUPERBLOCK_BYTES, Region, least_cap_bytes
from kvtier.tiers.cxl.medium import Medium, find_place
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.meter import Meter
from kvtier.tiers.nvme.format import ROW_HEADER_BYTES, RowHeader, RowSeal, Verdict, layout_fingerprint
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.nvme.recovery import ordered
from kvtier.tiers.populate import Population
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, TierProbe, TierStats
from kvtier.tiers.slots import SlotTable

_CLOSE_WAIT_S = 30.0
_STATUS_OF_VERDICT = {Verdict.CORRUPT: RowStatus.CORRUPT, Verdict.FOREIGN: RowStatus.FOREIGN}


class CxlTier:
    """A `Tier` in mapped memory. See the module docstring for durability, `kvtier.tiers.protocol` for the contract.

    `path` is "auto", "node:N", a devdax device or a file (`kvtier.tiers.cxl.medium`). The first `probe` answers with
    the firmware's figures (HMAT) where there are any: they describe the device at rest, while it is still populated.
    """

    def __init__(
        self,
        path: str,
        key_space_digest: bytes,
        layout_digest: str,
        row_bytes: int,
        cap_bytes: int,
        *,
        name: str = "cxl",
        root: str = "/",
        syscalls: Syscalls | None = None,
    ) -> None:
        """Find, map and recover. Raises ConfigError (path, cap, in use) or TierIOError."""
        self.name = name
        self.row_bytes = row_bytes
        self.cap_bytes = cap_bytes
        self._meter = Meter()
        self._in_flight = InFlight()
        place = find_place(path, root)
        region = Region.within(min(cap_bytes, place.size_bytes) if place.is_device else cap_bytes, row_bytes)
        if region.n_slots < 1:
            raise ConfigError(
                f"cxl_bytes is {cap_bytes}; a row of {row_bytes} bytes needs at least {least_cap_bytes(row_bytes)}"
            )
        self._region = region
        self._hmat = place.hmat
        self._medium = Medium(place, region.total_bytes, region.rows_offset, syscalls=syscalls, fault=self._meter.fault)
        self._seal = RowSeal(key_space_digest, layout_fingerprint(layout_digest), row_bytes)
        self._slots = SlotTable(region.n_slots)
        self._generation = np.zeros(region.n_slots, dtype=np.uint64)
        whole = np.frombuffer(self._medium.view, dtype=np.uint8)
        headers_end = SUPERBLOCK_BYTES + region.n_slots * ROW_HEADER_BYTES
        self._headers = whole[SUPERBLOCK_BYTES:headers_end].reshape(-1, ROW_HEADER_BYTES)
        rows = self._medium.view[region.rows_offset : region.rows_offset + region.n_slots * region.stride_bytes]
        self._rows = np.frombuffer(rows, dtype=np.uint8)
        self._recovered = self._take_over(whole)
        self._next_generation = int(self._generation.max()) + 1
        self._was_recovered = self._generation > 0
        self._generation_lock = threading.Lock()
        self._slots.add(np.flatnonzero(self._was_recovered).astype(np.int32), published=True)
        self._population = Population(
            rows,
            region.stride_bytes,
            region.n_slots,
            fd=-1 if place.is_device else self._medium.fd,
            device=place.is_device,
        )
        self._population.start(self._add, self._meter.fault)

    # ---- control thread

    def reserve(self, n: int) -> Slots | None:
        return None if self._in_flight.closed else self._slots.take(n)

    def release(self, slots: Slots) -> None:
        """See the protocol. Headers are wiped before the slots can be taken again, unless the file is cut off."""
        if self._in_flight.closed:
            return
        self._slots.retire(slots)
        if self._medium.whole:
            self._headers[slots] = 0
        self._generation[slots] = 0
        self._slots.reuse(slots)

    def recover(self) -> list[RecoveredRow]:
        found, self._recovered = self._recovered, []
        return found

    def close(self) -> None:
        """Stop, wait for transfers in flight, unmap, unlock. Rows in a file or on a device stay."""
        if self._in_flight.closed:
            return
        if not self._in_flight.close(_CLOSE_WAIT_S):
            self._meter.fault("close_abandoned")
            return
        self._population.stop()
        self._headers = np.empty((0, ROW_HEADER_BYTES), dtype=np.uint8)
        self._rows = np.empty(0, dtype=np.uint8)
        self._medium.close()

    # ---- any thread

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until all memory is populated; False if it is not by then."""
        return self._population.wait(timeout_s)

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. Raises IntegrityError for slots not reserved, and for keys or buffers of a wrong size."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, sources, self.row_bytes)
            self._slots.require_reserved(slots)
            if not self._medium.whole:
                return self._truncated(len(rows))
            begin_s = time.perf_counter()
            first = self._take_generations(len(rows))
            for i, (slot, row, source) in enumerate(zip(slots.tolist(), rows, sources, strict=True)):
                checksum = copy_checksummed(self._row(slot), np.frombuffer(source, dtype=np.uint8))
                header = self._seal.pack(slot, row, first + i, checksum)
                self._headers[slot] = np.frombuffer(header, dtype=np.uint8)
                self._generation[slot] = first + i
            self._slots.publish(slots)
            self._meter.moved(written_bytes=len(rows) * self.row_bytes, write_s=time.perf_counter() - begin_s)
            return [RowStatus.OK] * len(rows)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. A slot that is not published is FOREIGN. Raises IntegrityError for buffers of a wrong
        size."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, targets, self.row_bytes)
            if not self._medium.whole:
                return self._truncated(len(rows))
            begin_s = time.perf_counter()
            published = self._slots.published(slots).tolist()
            statuses = [
                self._read_row(slot, row, target) if there else RowStatus.FOREIGN
                for slot, row, target, there in zip(slots.tolist(), rows, targets, published, strict=True)
            ]
            self._meter.rows_read(statuses, self.row_bytes, begin_s)
            return statuses

    def probe(self) -> TierProbe:
        """See the protocol. Copies between ordinary memory and room kept for this before the rows."""
        initial, self._hmat = self._hmat, None
        if initial is not None:
            return initial
        with self._in_flight.transfer() as is_open:
            if not is_open or not self._medium.whole:
                return _UNUSABLE
            end = self._region.rows_offset
            scratch = self._medium.view[end - self._region.scratch_bytes : end]
            return measure_copies(np.frombuffer(scratch, dtype=np.uint8))

    def stats(self) -> TierStats:
        return self._meter.stats(
            capacity_rows=self._slots.capacity,
            used_rows=self._slots.used,
            cap_bytes=self.cap_bytes,
            medium_bytes=0 if self._in_flight.closed else self._medium.occupied_bytes(),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the slot table is sound. Control thread, nothing in flight."""
        self._slots.check_integrity()

    # ---- inside

    def _take_over(self, whole: npt.NDArray[np.uint8]) -> list[RecoveredRow]:
        """Rows left by a process before this one, or none and wiped headers if the region is not ours."""
        superblock = self._region.superblock(self._seal.key_space, self._seal.layout)
        held = bytes(whole[:SUPERBLOCK_BYTES])
        if held == superblock:
            return self._recover_headers()
        if held.strip(b"\0"):
            self._meter.fault("region_foreign")
        whole[:SUPERBLOCK_BYTES] = 0  # while headers are wiped, the region is nobody's
        self._headers[:] = 0
        whole[:SUPERBLOCK_BYTES] = np.frombuffer(superblock, dtype=np.uint8)
        return []

    def _recover_headers(self) -> list[RecoveredRow]:
        """Sound headers, in the order they were written; the others are wiped, and counted."""
        found: list[tuple[int, RecoveredRow]] = []
        for slot in np.flatnonzero(self._headers.any(axis=1)).tolist():
            header = RowHeader.parse(bytes(self._headers[slot]))
            if header is None or header.slot != slot or header.generation == 0:
                self._meter.fault("header_corrupt")
                self._headers[slot] = 0
                continue
            self._generation[slot] = header.generation
            found.append((header.generation, RecoveredRow(slot, header.row)))
        found.sort(key=lambda item: item[0])
        rows = [row for _, row in found]
        return ordered([item.row.key for item in rows], [item.row.parent for item in rows], rows)

    def _add(self, first: int, end: int) -> None:
        """A populated chunk: what was not recovered is free."""
        slots = np.arange(first, end, dtype=np.int32)
        self._slots.add(slots[~self._was_recovered[first:end]])

    def _take_generations(self, n: int) -> int:
        with self._generation_lock:
            first = self._next_generation
            self._next_generation += n
        return first

    def _row(self, slot: int) -> npt.NDArray[np.uint8]:
        start = slot * self._region.stride_bytes
        return self._rows[start : start + self.row_bytes]

    def _read_row(self, slot: int, row: RowId, target: memoryview) -> RowStatus:
        header, generation = bytes(self._headers[slot]), int(self._generation[slot])
        verdict, promised = self._seal.check(header, slot, row, generation)
        if verdict is not Verdict.OK:
            return _STATUS_OF_VERDICT[verdict]
        found = copy_checksummed(np.frombuffer(target, dtype=np.uint8), self._row(slot))
        return RowStatus.OK if found == promised else RowStatus.CORRUPT

    def _truncated(self, n: int) -> list[RowStatus]:
        self._meter.fault("medium_truncated")
        self._meter.fault(RowStatus.IO_ERROR.value, n)
        return [RowStatus.IO_ERROR] * n


_UNUSABLE = TierProbe(float("inf"), 1.0, float("inf"), 1.0)
