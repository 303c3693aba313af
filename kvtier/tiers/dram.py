"""The dram tier: numbered rows over one buffer, its own or the engine's.

Rows are addressed in place (`row`), so an engine's worker or the mover may fill one directly: a `write` whose source is
the row itself copies nothing, it records the checksum and publishes. All copies and checksums run without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.codec.checksum import checksum64, copy_bytes, copy_checksummed
from kvtier.errors import ConfigError
from kvtier.tiers.addresses import address_of
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.copy_rate import measure_copies
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.memory import HostSlab
from kvtier.tiers.meter import Meter
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, TierProbe, TierStats
from kvtier.tiers.slots import SlotTable

_PROBE_BYTES = 4 << 20
_CLOSE_WAIT_S = 30.0


class DramTier:
    """A `Tier` in host memory. Build one with `own` or `over`. See `kvtier.tiers.protocol` for the contract.

    What a row holds is remembered as a 64-bit tag, and with `checksums` its xxh3 as another: 16 bytes a row.
    Nothing survives a restart.
    """

    def __init__(
        self, view: memoryview, n_rows: int, stride_bytes: int, row_bytes: int, *, name: str, checksums: bool
    ) -> None:
        self.name = name
        self.row_bytes = row_bytes
        self.stride_bytes = stride_bytes
        self.checksums = checksums
        self._view = view
        self._bytes = np.frombuffer(view, dtype=np.uint8)
        self._base = address_of(view)
        self._slots = SlotTable(n_rows)
        self._tags = np.zeros(n_rows, dtype=np.uint64)
        self._sums = np.zeros(n_rows if checksums else 0, dtype=np.uint64)
        self._meter = Meter()
        self._slab: HostSlab | None = None
        self._in_flight = InFlight()

    @classmethod
    def own(
        cls,
        row_bytes: int,
        cap_bytes: int,
        *,
        name: str = "dram",
        checksums: bool = True,
        shared_path: str | None = None,
        numa_nodes: Sequence[int] = (),
        chunk_bytes: int | None = None,
        first_chunk_bytes: int | None = None,
    ) -> DramTier:
        """A tier on a slab of its own; rows join the free list as their memory is populated in the background, on
        `numa_nodes` where there is room (none: wherever the kernel puts it).

        Raises ConfigError if the cap holds no row or the memory is not there.
        """
        given = {"chunk_bytes": chunk_bytes, "first_chunk_bytes": first_chunk_bytes}
        chunks = {key: value for key, value in given.items() if value is not None}
        slab = HostSlab(row_bytes, cap_bytes, shared_path=shared_path, numa_nodes=numa_nodes, **chunks)
        tier = cls(slab.view, slab.n_rows, slab.stride_bytes, row_bytes, name=name, checksums=checksums)
        tier._slab = slab
        slab.populate(tier._add, tier._meter.fault)
        return tier

    @classmethod
    def over(
        cls,
        buffer: memoryview | npt.NDArray[np.uint8],
        row_bytes: int,
        n_rows: int,
        stride_bytes: int,
        *,
        name: str = "dram",
        checksums: bool = True,
    ) -> DramTier:
        """A tier on memory the engine owns: row i is the first `row_bytes` bytes at i x `stride_bytes`.

        `buffer` is writable and contiguous. Raises ConfigError if the rows do not fit it.
        """
        view = np.frombuffer(buffer, dtype=np.uint8).data
        if view.readonly or not 0 < row_bytes <= stride_bytes or n_rows < 1 or n_rows * stride_bytes > view.nbytes:
            raise ConfigError(
                f"{n_rows} rows of {row_bytes} bytes, {stride_bytes} apart, do not fit the engine's "
                f"{'read-only ' if view.readonly else ''}region of {view.nbytes} bytes"
            )
        tier = cls(view, n_rows, stride_bytes, row_bytes, name=name, checksums=checksums)
        tier._add(0, n_rows)
        return tier

    def row(self, slot: int) -> memoryview:
        """The bytes of a slot, writable, not copied. The caller holds the slot (reserved, or published and leased)."""
        start = slot * self.stride_bytes
        return self._view[start : start + self.row_bytes]

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until all memory is populated; False if it is not by then."""
        return self._slab is None or self._slab.wait_populated(timeout_s)

    def reserve(self, n: int) -> Slots | None:
        return None if self._in_flight.closed else self._slots.take(n)

    def release(self, slots: Slots) -> None:
        if not self._in_flight.closed:
            self._slots.give_back(slots)

    def recover(self) -> list[RecoveredRow]:
        return []

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. A source that is the row itself is not copied. Raises IntegrityError for slots not
        reserved, and for keys or buffers of a wrong size."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, sources, self.row_bytes)
            self._slots.require_reserved(slots)
            begin_s = time.perf_counter()
            for slot, row, source in zip(slots.tolist(), rows, sources, strict=True):
                self._write_row(slot, row, source)
            self._slots.publish(slots)
            self._meter.moved(written_bytes=len(rows) * self.row_bytes, write_s=time.perf_counter() - begin_s)
            return [RowStatus.OK] * len(rows)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. A target that is the row itself is only verified; a slot not published is FOREIGN."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, targets, self.row_bytes)
            begin_s = time.perf_counter()
            published = self._slots.published(slots).tolist()
            statuses = [
                self._read_row(slot, row, target) if there else RowStatus.FOREIGN
                for slot, row, target, there in zip(slots.tolist(), rows, targets, published, strict=True)
            ]
            self._meter.rows_read(statuses, self.row_bytes, begin_s)
            return statuses

    def probe(self) -> TierProbe:
        """See the protocol: the copy rate of memory outside the rows."""
        return measure_copies(np.ones(_PROBE_BYTES, dtype=np.uint8))

    def stats(self) -> TierStats:
        present = self._slots.present
        return self._meter.stats(
            capacity_rows=self._slots.capacity,
            used_rows=self._slots.used,
            cap_bytes=self._slots.capacity * self.stride_bytes,
            medium_bytes=present * self.stride_bytes,
        )

    def close(self) -> None:
        """Stop. A row someone still holds a view of stays readable; own memory goes back with the last view."""
        if self._in_flight.closed:
            return
        if self._in_flight.close(_CLOSE_WAIT_S) and self._slab is not None:
            self._view = memoryview(b"")
            self._bytes = np.empty(0, dtype=np.uint8)
            self._slab.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the slot table is sound. Control thread, nothing in flight."""
        self._slots.check_integrity()

    def _add(self, first: int, end: int) -> None:
        self._slots.add(np.arange(first, end, dtype=np.int32))

    def _row_array(self, slot: int) -> npt.NDArray[np.uint8]:
        start = slot * self.stride_bytes
        return self._bytes[start : start + self.row_bytes]

    def _write_row(self, slot: int, row: RowId, source: memoryview) -> None:
        held = self._row_array(slot)
        checksum = self._moved(held, np.frombuffer(source, dtype=np.uint8), in_place=self._is_row(source, held))
        if self.checksums:
            self._sums[slot] = checksum
        self._tags[slot] = tag_of(row)

    def _is_row(self, buffer: memoryview, held: npt.NDArray[np.uint8]) -> bool:
        """Whether `buffer` is the row itself. Only a view that came from `row` can be: that is cheap to tell."""
        return buffer.obj is self._view.obj and address_of(buffer) == address_of(held)

    def _read_row(self, slot: int, row: RowId, target: memoryview) -> RowStatus:
        if int(self._tags[slot]) != tag_of(row):
            return RowStatus.FOREIGN
        held = self._row_array(slot)
        found = self._moved(np.frombuffer(target, dtype=np.uint8), held, in_place=self._is_row(target, held))
        if self.checksums and int(self._sums[slot]) != found:
            return RowStatus.CORRUPT
        return RowStatus.OK

    def _moved(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], *, in_place: bool) -> int:
        """Copy unless both are the same row; the checksum of what is there now, or 0 in a tier without them."""
        if in_place:
            return checksum64(target.data) if self.checksums else 0
        if self.checksums:
            return copy_checksummed(target, source)
        copy_bytes(target, source)
        return 0


def tag_of(row: RowId) -> int:
    """64 bits that tell rows apart; a mix-up of slots is found unless two tags collide."""
    return checksum64(row.key + row.parent, seed=row.group + 1)
