"""The journal of one slab: which slot holds which row. Its last word about a slot is the truth.

Publish and free records are appended in batches, one `pwritev` each, to a preallocated file: appending never needs new
space. There is no fsync per append. A killed process loses nothing, because the page cache survives it. After a power
cut the tail may be lost or torn; then a slot may hold other bytes than the journal says, and the row header and the
payload checksum, compared at every read, turn that into a miss.

Replay trusts each record by its own checksum, seeded by the slab, and demands rising sequence numbers: the remains of
an append that failed half-way are older than what was written over them and are skipped.

The journal is compacted in the background into a temporary file (fsync, rename) before it is full; both fit the cap.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.codec.checksum import checksum64
from kvtier.tiers.addresses import round_up
from kvtier.tiers.nvme.format import (
    FREE_SLOTS_PER_RECORD,
    KIND_FREE,
    KIND_PUBLISH_FIRST,
    RECORD_BYTES,
    RECORD_DTYPE,
    Entry,
    Verdict,
    judge_journal_header,
    pack_free,
    pack_journal_header,
    pack_publish,
)
from kvtier.tiers.nvme.io import BLOCK, Syscalls
from kvtier.tiers.protocol import Slots

Records = npt.NDArray[np.void]
_CHECKED_BYTES = RECORD_BYTES - 8
_SPARE_RECORDS = 1024
_COMPACT_FROM = 0.75
_WAIT_S = 30.0


def journal_capacity(n_slots: int) -> int:
    """Records a journal of `n_slots` must hold: all rows, as much again before compaction is due, and spare."""
    return 2 * n_slots + _SPARE_RECORDS


def journal_bytes(n_slots: int) -> int:
    """Bytes of the preallocated journal file; compaction needs as much again for its temporary file."""
    return round_up(BLOCK + RECORD_BYTES * journal_capacity(n_slots), BLOCK)


class Journal:
    """Open journal of one slab. Thread-safe.

    `generation[slot]` is the generation last published there, 0 if the slot holds nothing: 8 bytes a slot are all the
    memory it needs, because compaction reads the keys from the old file.
    """

    def __init__(
        self, path: str, slab_id: bytes, n_slots: int, syscalls: Syscalls, fault: Callable[[str], None]
    ) -> None:
        """Start a journal in memory only; `load` replays what `path` holds and `start` makes the file ready."""
        self.path = path
        self.temporary_path = path + ".tmp"
        self.generation = np.zeros(n_slots, dtype=np.uint64)
        self.compactions = 0
        self._slab_id = slab_id
        self._seed = int.from_bytes(slab_id[:8], "little")
        self._sys = syscalls
        self._fault = fault
        self._capacity = journal_capacity(n_slots)
        self._changed = threading.Condition()
        self._fd = -1
        self._end = 0
        self._sequence = 1
        self._retry_at = 0
        self._compacting: threading.Thread | None = None

    # ---- start

    def load(self) -> Records:
        """Replay the file: the publish records that still hold, in the order they were written. Counts what it skips.

        A missing, foreign or damaged file replays as empty. Raises nothing.
        """
        try:
            verdict, data = self._read_file()
        except OSError:
            self._fault("journal_io_error")
            return np.zeros(0, dtype=RECORD_DTYPE)
        if verdict is not Verdict.OK:
            if verdict is not Verdict.EMPTY:
                self._fault(f"journal_{verdict.value}")
            return np.zeros(0, dtype=RECORD_DTYPE)
        replay = sound_records(data, self._seed)
        for _ in range(replay.damaged):
            self._fault("journal_record_corrupt")
        if len(replay.records):
            self._sequence = int(replay.records["sequence"].max()) + 1
        records = last_words(replay.records, len(self.generation))
        self.generation[records["slot"]] = records["generation"]
        whole = len(data) == (journal_bytes(len(self.generation)) - BLOCK) // RECORD_BYTES * RECORD_BYTES
        if whole and not replay.damaged and replay.end <= self._capacity // 2:
            self._end = replay.end
        return records

    def start(self, records: Records) -> None:
        """Open the file for appending; a fresh one that holds `records`, unless the loaded one is sound and half empty.

        Raises OSError.
        """
        if self._end:
            self._fd = self._sys.open(self.path, os.O_RDWR)
            return
        fd = self._write_file(records.tobytes())
        try:
            self._sys.rename(self.temporary_path, self.path)
        except OSError:
            self._sys.close(fd)
            raise
        self._fd = fd
        self._end = len(records)
        self._schedule()

    def _read_file(self) -> tuple[Verdict, bytearray]:
        """The verdict on the file's header, and its records if it is ours (a foreign file may be of any size)."""
        try:
            fd = self._sys.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return Verdict.EMPTY, bytearray()
        try:
            size = os.fstat(fd).st_size
            header = bytearray(min(size, BLOCK))
            self._read_at(fd, memoryview(header), 0)
            verdict = judge_journal_header(bytes(header), self._slab_id)
            if verdict is not Verdict.OK:
                return verdict, bytearray()
            records = bytearray(max(0, size - BLOCK) // RECORD_BYTES * RECORD_BYTES)
            self._read_at(fd, memoryview(records), BLOCK)
            return verdict, records
        finally:
            self._sys.close(fd)

    # ---- append

    def publish(self, entries: Sequence[Entry]) -> None:
        """Publish rows. Raises OSError, and then none of them is published."""
        with self._changed:
            first = self._claim(len(entries))
            self._append(b"".join(pack_publish(e, first + i, self._seed) for i, e in enumerate(entries)), len(entries))
            self.generation[[e.slot for e in entries]] = [e.generation for e in entries]

    def free(self, slots: Slots) -> None:
        """Forget published slots. Raises OSError, and then all are still published."""
        listed = slots.tolist()
        groups = [listed[i : i + FREE_SLOTS_PER_RECORD] for i in range(0, len(listed), FREE_SLOTS_PER_RECORD)]
        with self._changed:
            first = self._claim(len(groups))
            self._append(b"".join(pack_free(g, first + i, self._seed) for i, g in enumerate(groups)), len(groups))
            self.generation[slots] = 0

    def _claim(self, n: int) -> int:
        """Make room for `n` records and return the first of their sequence numbers, used up even if writing fails."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the journal is closed", self.path)
        while self._end + n > self._capacity and self._compacting is not None:
            if not self._changed.wait(_WAIT_S):
                raise OSError(errno.ETIMEDOUT, "journal compaction does not end", self.path)
        if self._end + n > self._capacity:
            self._compact_now()
        if self._end + n > self._capacity:
            raise OSError(errno.ENOSPC, "the journal is full", self.path)
        first = self._sequence
        self._sequence += n
        return first

    def _append(self, data: bytes, n: int) -> None:
        self._write_at(self._fd, memoryview(data), BLOCK + self._end * RECORD_BYTES)
        self._end += n
        self._schedule()

    def _write_at(self, fd: int, view: memoryview, offset: int) -> None:
        while view:
            moved = self._sys.pwritev(fd, [view], offset)
            if moved <= 0:
                raise OSError(errno.EIO, "short write", self.path)
            view, offset = view[moved:], offset + moved

    # ---- compaction

    def _schedule(self) -> None:
        """Compact in the background once three quarters are written. Called with the lock held."""
        if self._compacting is None and self._end >= max(self._retry_at, int(self._capacity * _COMPACT_FROM)):
            self._compacting = threading.Thread(target=self.compact, name="kvtier-journal", daemon=True)
            self._compacting.start()

    def compact(self) -> None:
        """Rewrite the file with the last words only. Appends go on meanwhile. A failure is counted, the old file stays.

        Runs in a thread of its own when due; otherwise only where nothing else compacts.
        """
        try:
            with self._changed:
                end, generation, fd = self._end, self.generation.copy(), self._fd
            kept = self._survivors(fd, end, generation)
            new_fd = self._write_file(kept)
            with self._changed:
                self._switch(new_fd, kept, end)
        except OSError:
            self._compaction_failed()
        finally:
            with self._changed:
                self._compacting = None
                self._changed.notify_all()

    def _compact_now(self) -> None:
        """Compact with the lock held: only if the journal filled up although (or because) compaction failed."""
        try:
            kept = self._survivors(self._fd, self._end, self.generation)
            self._switch(self._write_file(kept), kept, self._end)
        except OSError:
            self._compaction_failed()

    def _survivors(self, fd: int, end: int, generation: npt.NDArray[np.uint64]) -> bytes:
        """The records among the first `end` that are the last word about their slot, unchanged."""
        data = bytearray(end * RECORD_BYTES)
        self._read_at(fd, memoryview(data), BLOCK)
        records = np.frombuffer(data, dtype=RECORD_DTYPE)
        published = records[(records["kind"] > 0) & (records["kind"] <= KIND_PUBLISH_FIRST)]
        published = published[published["slot"] < len(generation)]
        kept: Records = published[generation[published["slot"]] == published["generation"]]
        return kept.tobytes()

    def _read_at(self, fd: int, view: memoryview, offset: int) -> None:
        while view:
            moved = self._sys.preadv(fd, [view], offset)
            if moved <= 0:
                raise OSError(errno.EIO, "the journal ends too early", self.path)
            view, offset = view[moved:], offset + moved

    def _write_file(self, records: bytes) -> int:
        """Write header and `records` to the temporary file, preallocated and synced; return its descriptor."""
        fd = self._sys.open(self.temporary_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            allocate(self._sys, fd, round_up(BLOCK + RECORD_BYTES * self._capacity, BLOCK))
            self._write_at(fd, memoryview(pack_journal_header(self._slab_id) + records), 0)
            self._sys.fdatasync(fd)
        except OSError:
            self._sys.close(fd)
            raise
        return fd

    def _switch(self, new_fd: int, kept: bytes, end: int) -> None:
        """Copy what was appended since `end`, then make the temporary file the journal. Called with the lock held."""
        try:
            late = bytearray((self._end - end) * RECORD_BYTES)
            self._read_at(self._fd, memoryview(late), BLOCK + end * RECORD_BYTES)
            self._write_at(new_fd, memoryview(late), BLOCK + len(kept))
            self._sys.rename(self.temporary_path, self.path)
        except OSError:
            self._sys.close(new_fd)
            raise
        self._sys.close(self._fd)
        self._fd = new_fd
        self._end = (len(kept) + len(late)) // RECORD_BYTES
        self._retry_at = 0
        self.compactions += 1

    def _compaction_failed(self) -> None:
        self._fault("journal_compaction_failed")
        self._retry_at = self._end + max(1, self._capacity // 16)
        with contextlib.suppress(OSError):
            self._sys.unlink(self.temporary_path)

    def close(self) -> None:
        """Wait for compaction, make the file durable and close it. Idempotent. Raises nothing."""
        with self._changed:
            thread = self._compacting
        if thread is not None:
            thread.join(_WAIT_S)
        with self._changed:
            if self._fd >= 0:
                try:
                    self._sys.fdatasync(self._fd)
                    self._sys.close(self._fd)
                except OSError:
                    self._fault("journal_io_error")
                self._fd = -1


def allocate(syscalls: Syscalls, fd: int, length: int) -> None:
    """Give the file `length` bytes of the medium, or only that size where the file system cannot preallocate."""
    try:
        syscalls.fallocate(fd, 0, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    syscalls.ftruncate(fd, length)


class Replay(NamedTuple):
    """Sound records of a file, how many were damaged, and where the used part ends."""

    records: Records
    damaged: int
    end: int


def sound_records(data: bytearray, seed: int) -> Replay:
    """The records in `data` whose checksum holds and whose sequence rises."""
    records = np.frombuffer(data, dtype=RECORD_DTYPE)
    used = np.flatnonzero((records["kind"] != 0) | (records["checksum"] != 0))
    view = memoryview(data)
    starts = (used * RECORD_BYTES).tolist()
    actual = [checksum64(view[start : start + _CHECKED_BYTES], seed) for start in starts]
    sound = records["checksum"][used] == np.array(actual, dtype=np.uint64)
    kept = records[used[sound]]
    if len(kept):
        sequence = kept["sequence"]
        newest_before = np.concatenate(([0], np.maximum.accumulate(sequence)[:-1])).astype(np.uint64)
        kept = kept[sequence > newest_before]
    return Replay(kept, int(len(used) - sound.sum()), int(used[-1]) + 1 if len(used) else 0)


def last_words(records: Records, n_slots: int) -> Records:
    """The publish records that no later record about their slot replaces, in order."""
    last = np.full(n_slots, -1, dtype=np.int64)
    frees = np.flatnonzero(records["kind"] == KIND_FREE)
    named = np.hstack([records[field][frees].view("<u4").reshape(-1, 8) for field in ("key", "parent")])
    listed = (np.arange(FREE_SLOTS_PER_RECORD) < records["count"][frees][:, None]) & (named < n_slots)
    np.maximum.at(last, named[listed], np.repeat(frees, listed.sum(axis=1)))
    publishes = np.flatnonzero((records["kind"] > 0) & (records["kind"] <= KIND_PUBLISH_FIRST))
    publishes = publishes[records["slot"][publishes] < n_slots]
    np.maximum.at(last, records["slot"][publishes], publishes)
    kept: Records = records[publishes[last[records["slot"][publishes]] == publishes]]
    return kept
