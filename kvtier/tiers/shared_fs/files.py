"""One row in one file: written aside, synced, renamed into place; read and verified, whoever wrote it.

File: the payload's whole blocks | the rest of the payload, zeros, and the header in the last 128 bytes. Two levels of
folders of up to 64 entries each keep any one of them small (sglang#28654). A file in place is always whole unless the
medium damaged it; what is found damaged is removed, so that it is written anew.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.codec.checksum import checksum64
from kvtier.tiers.addresses import address_of
from kvtier.tiers.nvme.format import Geometry
from kvtier.tiers.nvme.io import BLOCK, BouncePool
from kvtier.tiers.nvme.transfer import status_of
from kvtier.tiers.objects import HEADER_BYTES, STATUS_OF, ObjectSeal, Verdict
from kvtier.tiers.protocol import RowId, RowStatus
from kvtier.tiers.shared_fs.filesystem import GONE, FileSystem
from kvtier.tiers.shared_fs.ledger import FOLDER_BYTES, OVERHEAD_BYTES, Ledger

_LEAST_DIRECT_BODY_BYTES = 32 << 10
_TOUCH_AFTER_S = 60.0
_PLACE_ATTEMPTS = 4


class RowFiles:
    """Reads and writes the files of one key space and layout. Thread-safe. Raises nothing.

    `direct` bypasses the page cache where the file system allows it.
    """

    def __init__(
        self, ledger: Ledger, seal: ObjectSeal, row_bytes: int, fs: FileSystem, *, direct: bool, probed: bool = False
    ) -> None:
        """`probed` says that `direct` is known to work. Raises OSError."""
        self.geometry = Geometry.of(row_bytes)
        self.direct = direct
        self._ledger = ledger
        self._seal = seal
        self._fs = fs
        self._folder = os.path.join(ledger.root, "objects", seal.namespace)
        self._pool = BouncePool(self.geometry.slot_bytes)
        self._numbers = itertools.count()
        if direct and not probed:
            self.direct = self._takes_direct()

    def path(self, row: RowId) -> str:
        """Where the file of a row is, or would be."""
        name = self._seal.name(row)
        first, second = int(name[:2], 16) >> 2, int(name[2:4], 16) >> 2
        return f"{self._folder}/{first:02x}/{second:02x}/{name}"

    def exists(self, row: RowId) -> bool:
        """Whether a file of the right size is in place. Raises OSError if the medium does not answer."""
        try:
            return self._fs.stat(self.path(row)).st_size == self.geometry.slot_bytes
        except OSError as error:
            if error.errno in GONE:
                return False
            raise

    def touch(self, row: RowId) -> None:
        """Note that a row is in use, if it is there: what was not used for longest is evicted first."""
        try:
            self._fs.touch(self.path(row))
        except OSError as error:
            if error.errno not in (*GONE, errno.EPERM, errno.EACCES, errno.EROFS):
                raise

    def write(self, row: RowId, source: memoryview) -> RowStatus:
        """Put a row in place, unless it is there already. FULL if the cap leaves no room."""
        try:
            if self.exists(row):
                self.touch(row)
                return RowStatus.OK
            # Room for the blocks, one of the file's own in case it lies in many pieces, and new folders.
            claimed = self.geometry.slot_bytes + BLOCK + OVERHEAD_BYTES + 2 * FOLDER_BYTES
            if not self._ledger.claim(claimed):
                return RowStatus.FULL
            written = [claimed]  # until it is known to be less
            try:
                self._write_new(row, source, written)
            finally:
                self._ledger.settle(claimed, written[0])
        except OSError as error:
            return status_of(error)
        return RowStatus.OK

    def read(self, row: RowId, target: memoryview) -> RowStatus:
        """Read and verify a row. VANISHED if no file is there."""
        path = self.path(row)
        try:
            fd = self._fs.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            return RowStatus.VANISHED if error.errno in GONE else RowStatus.IO_ERROR
        try:
            about = self._fs.fstat(fd)
            if about.st_size != self.geometry.slot_bytes:
                status = RowStatus.CORRUPT
            else:
                status = self._read_open(fd, row, target)
            if status is RowStatus.OK and time.time() - about.st_mtime > _TOUCH_AFTER_S:
                self.touch(row)
        except OSError as error:
            return RowStatus.VANISHED if error.errno in GONE else RowStatus.IO_ERROR
        finally:
            self._fs.close(fd)
        if status is not RowStatus.OK:
            self._discard(path, about)
        return status

    # --- inside -------------------------------------------------------------------------------------------------

    def _write_new(self, row: RowId, source: memoryview, written: list[int]) -> None:
        temporary = f"{self._ledger.temporary}/{next(self._numbers)}"
        placed = False
        try:
            fd = self._fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.direct else 0))
            try:
                self._fill(fd, row, source)
                self._fs.fdatasync(fd)
                occupied = self._fs.fstat(fd).st_blocks * 512
            finally:
                self._fs.close(fd)
            folders = self._place(temporary, self.path(row))
            written[0] = occupied + OVERHEAD_BYTES + folders * FOLDER_BYTES
            placed = True
        finally:
            if not placed:
                self._fs.remove(temporary)
                written[0] = 2 * FOLDER_BYTES

    def _fill(self, fd: int, row: RowId, source: memoryview) -> None:
        geometry, header = self.geometry, self._seal.pack(row, checksum64(source))
        with self._pool.borrow() as scratch:
            body = geometry.body_bytes if self._in_place(source) else 0
            tail = scratch[: geometry.slot_bytes - body]
            rest = geometry.row_bytes - body
            into = np.frombuffer(tail, dtype=np.uint8)
            np.copyto(into[:rest], np.frombuffer(source, dtype=np.uint8)[body:])
            into[rest:-HEADER_BYTES] = 0
            tail[-HEADER_BYTES:] = header
            _move(self._fs.pwritev, fd, [source[:body], tail] if body else [tail])

    def _read_open(self, fd: int, row: RowId, target: memoryview) -> RowStatus:
        geometry = self.geometry
        with self._pool.borrow() as scratch:
            body = geometry.body_bytes if self._in_place(target) else 0
            tail = scratch[: geometry.slot_bytes - body]
            _move(self._fs.preadv, fd, [target[:body], tail] if body else [tail])
            verdict, promised = self._seal.check(bytes(tail[-HEADER_BYTES:]), row)
            if verdict is not Verdict.OK:
                return STATUS_OF[verdict]
            rest = geometry.row_bytes - body
            np.copyto(np.frombuffer(target, dtype=np.uint8)[body:], np.frombuffer(tail, dtype=np.uint8)[:rest])
        return RowStatus.OK if checksum64(target) == promised else RowStatus.CORRUPT

    def _in_place(self, buffer: memoryview) -> bool:
        """Whether the body can go straight between the file and the caller's buffer."""
        if self.geometry.body_bytes < _LEAST_DIRECT_BODY_BYTES:
            return False
        return not self.direct or address_of(buffer) % BLOCK == 0

    def _place(self, temporary: str, path: str) -> int:
        """Rename a whole file into place; returns how many folders had to be made for it."""
        folders = 0
        for attempt in range(_PLACE_ATTEMPTS):
            try:
                self._fs.rename(temporary, path)
                break
            except FileNotFoundError:
                # No folder yet, or a cleaner has just removed it for being empty.
                if attempt == _PLACE_ATTEMPTS - 1:
                    raise
                folder = os.path.dirname(path)
                folders += self._fs.make_folder(os.path.dirname(folder)) + self._fs.make_folder(folder)
        return folders

    def _discard(self, path: str, about: os.stat_result) -> None:
        """Remove a damaged file, unless another machine has put a new one in its place already."""
        try:
            if self._fs.stat(path).st_ino == about.st_ino:
                self._fs.remove(path)
        except OSError:
            return  # it will be found damaged again

    def _takes_direct(self) -> bool:
        path = f"{self._ledger.temporary}/direct"
        try:
            self._fs.close(self._fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            self._fs.remove(path)
        return True


def _move(call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview]) -> None:
    """Move all of `buffers` from the start of a file on. Raises OSError (EIO if it ends too early)."""
    pending, offset = list(buffers), 0
    while pending:
        moved = call(fd, pending, offset)
        if moved <= 0 or moved % 512:
            raise OSError(errno.EIO, f"short transfer of {moved} bytes at {offset}")
        offset += moved
        while pending and moved >= pending[0].nbytes:
            moved -= pending[0].nbytes
            pending.pop(0)
        if moved:
            pending[0] = pending[0][moved:]
