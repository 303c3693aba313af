"""The shared_fs tier: a `SharedTier` over a folder on any POSIX path that machines share."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Sequence

import numpy as np

from kvtier.errors import ConfigError, TierIOError
from kvtier.tiers.addresses import round_up
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.handles import Handles, HandleTier
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.meter import Meter
from kvtier.tiers.nvme.io import BLOCK
from kvtier.tiers.objects import ObjectSeal
from kvtier.tiers.protocol import RowId, RowStatus, Slots, TierProbe, TierStats
from kvtier.tiers.shared_fs.cleaner import Cleaner
from kvtier.tiers.shared_fs.files import RowFiles
from kvtier.tiers.shared_fs.filesystem import FileSystem
from kvtier.tiers.shared_fs.ledger import OVERHEAD_BYTES, Ledger

_CLOSE_WAIT_S = 30.0
_PROBE_BYTES = 4 << 20
_LEAST_ROWS = 4
_MOST_HANDLES = 1 << 22
_UNKNOWN = TierProbe(read_latency_s=1e-3, read_bytes_per_s=1e9, write_latency_s=1e-3, write_bytes_per_s=1e9)
_UNUSABLE = TierProbe(read_latency_s=1e9, read_bytes_per_s=1.0, write_latency_s=1e9, write_bytes_per_s=1.0)
_WRONG = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP)


class SharedFsTier(HandleTier):
    """See `kvtier.tiers.protocol.SharedTier` for the contract and `Ledger` for the cap.

    Everything lies under `<path>/kvtier`, which `cap_bytes` bounds for all machines together: give all the same number.
    A row that some process wrote already is not written again.
    """

    def __init__(
        self,
        path: str,
        key_space_digest: bytes,
        layout_digest: str,
        row_bytes: int,
        cap_bytes: int,
        *,
        name: str = "shared_fs",
        direct: bool = True,
        fs: FileSystem | None = None,
    ) -> None:
        """Open or create the folder. Raises ConfigError (path, cap) or TierIOError. Blocks while the mount does."""
        self.name = name
        self.row_bytes = row_bytes
        self.cap_bytes = cap_bytes
        self._meter = Meter()
        self._in_flight = InFlight()
        self._fs = fs if fs is not None else FileSystem()
        root = os.path.join(path, "kvtier")
        try:
            self._fs.make_folder(root)
            self._ledger = Ledger(root, cap_bytes, self._fs, self._meter.fault)
            self._identity = key_space_digest, layout_digest
            seal = ObjectSeal(*self._identity, row_bytes)
            self._files = RowFiles(self._ledger, seal, row_bytes, self._fs, direct=direct)
        except OSError as error:
            if error.errno in _WRONG:
                raise ConfigError(f"shared_fs_path {path!r} cannot be used: {error.strerror}; change it") from error
            raise TierIOError(f"shared_fs_path {path!r} does not answer: {error}") from error
        row_cost = self._files.geometry.slot_bytes + OVERHEAD_BYTES
        if cap_bytes < _LEAST_ROWS * row_cost:
            raise ConfigError(
                f"shared_fs_bytes is {cap_bytes}, less than {_LEAST_ROWS} rows of {row_cost} bytes; raise it"
            )
        self._handles = Handles(min(cap_bytes // row_cost, _MOST_HANDLES))
        self._cleaner = Cleaner(self._ledger, self._fs, self._meter.fault)

    # ---- control thread

    def part(self, nonce: bytes) -> None:
        """See SharedTier. Transfers under way end under the old names."""
        self._files = RowFiles(
            self._ledger, self._parted(nonce), self.row_bytes, self._fs, direct=self._files.direct, probed=True
        )

    def close(self) -> None:
        """Stop, wait for transfers in flight, leave the ledger."""
        if self._in_flight.closed:
            return
        if not self._in_flight.close(_CLOSE_WAIT_S):
            self._meter.fault("close_abandoned")
            return
        self._cleaner.close()
        try:
            self._ledger.close()
        except OSError:
            self._meter.fault("close_io_error")

    # ---- any thread

    def exists(self, rows: Sequence[RowId]) -> list[bool]:
        """See SharedTier. One `stat` a row. Raises TierIOError."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [False] * len(rows)
            try:
                return [self._files.exists(row) for row in rows]
            except OSError as error:
                raise TierIOError(f"the shared file system does not answer: {error}") from error

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. A row whose file is in place already is OK at once."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, sources, self.row_bytes)
            self._handles.table.require_reserved(slots)
            begin_s = time.perf_counter()
            files = self._files
            self._renew_heads(rows)
            statuses = [files.write(row, source) for row, source in zip(rows, sources, strict=True)]
            good = np.array([status is RowStatus.OK for status in statuses], np.bool_)
            self._handles.publish(slots[good], [row for row, ok in zip(rows, good, strict=True) if ok])
            if RowStatus.FULL in statuses or self._cleaner.needed:
                self._cleaner.wake()
            self._meter.rows_written(statuses, self.row_bytes, begin_s)
            return statuses

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. VANISHED where another machine has evicted the row."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, targets, self.row_bytes)
            begin_s = time.perf_counter()
            statuses = [RowStatus.FOREIGN] * len(rows)
            for i, known in enumerate(self._handles.speaks_of(slots, rows)):
                if known:
                    statuses[i] = self._files.read(rows[i], targets[i])
            self._meter.rows_read(statuses, self.row_bytes, begin_s)
            return statuses

    def probe(self) -> TierProbe:
        """See the protocol. Uses a temporary file within the cap; where there is no room for it, a cautious guess."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return _UNUSABLE
            size = min(_PROBE_BYTES, round_up(4 * self.row_bytes, BLOCK))
            try:
                if not self._ledger.claim(2 * size):
                    return _UNKNOWN
                try:
                    return self._measure(size)
                finally:
                    self._ledger.settle(2 * size, 0)
            except OSError:
                self._meter.fault("probe_io_error")
                return _UNUSABLE

    def stats(self) -> TierStats:
        return self._meter.stats(
            capacity_rows=self._handles.table.capacity,
            used_rows=self._handles.table.used,
            cap_bytes=self.cap_bytes,
            medium_bytes=self._ledger.known_bytes,
        )

    def clean(self) -> int:
        """Count what is there and evict down to the mark now, as the tier does by itself when room runs short; returns
        the bytes removed. Raises OSError."""
        return self._cleaner.clean()

    # ---- inside

    def _renew_heads(self, rows: Sequence[RowId]) -> None:
        """What is written now builds on blocks that must not look unused to a cleaner."""
        written = {row.key for row in rows}
        for row in rows:
            if row.parent and row.parent not in written:
                try:
                    self._files.touch(RowId(row.parent, b"", row.group))
                except OSError:
                    return  # the write will say so

    def _measure(self, size: int) -> TierProbe:
        path = os.path.join(self._ledger.temporary, f"probe-{time.monotonic_ns()}")
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self._files.direct else 0)
        buffer = memoryview(mmap.mmap(-1, size))
        fd = self._fs.open(path, flags)
        try:
            seconds = []
            for verb, n_bytes in (("w", BLOCK), ("w", size), ("r", BLOCK), ("r", size)):
                begin_s = time.perf_counter()
                if verb == "w":
                    self._fs.pwritev(fd, [buffer[:n_bytes]], 0)
                    self._fs.fdatasync(fd)
                else:
                    self._fs.preadv(fd, [buffer[:n_bytes]], 0)
                seconds.append(time.perf_counter() - begin_s)
        finally:
            self._fs.close(fd)
            self._fs.remove(path)
        write_small, write_large, read_small, read_large = seconds
        return TierProbe(
            read_small,
            size / max(read_large - read_small, read_large / 10),
            write_small,
            size / max(write_large - write_small, write_large / 10),
        )
