"""Opening a slab: whose it is, whether it can be trusted, and its size under the cap."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Callable

from kvtier.errors import ConfigError, TierIOError
from kvtier.tiers.nvme.format import Geometry, RowSeal, Superblock, Verdict, layout_fingerprint
from kvtier.tiers.nvme.io import BLOCK, DirectFile, Syscalls
from kvtier.tiers.nvme.journal import Journal, Records, allocate
from kvtier.tiers.nvme.space import (
    KeySpaceFiles,
    Plan,
    allocated_bytes,
    check_medium,
    files_of,
    holder_of,
    least_cap_bytes,
    lock_soon,
    locked_folder,
    make_room,
    plan_files,
    unusable,
)


class Slab:
    """An open, exclusively locked slab with its journal.

    Opening it decides everything before the first write: the lock, the room under the cap, whether the superblock is
    ours, what the journal says. Files that are damaged or belong to something else are counted and started afresh.
    """

    def __init__(
        self,
        path: str,
        key_space_digest: bytes,
        layout_digest: str,
        geometry: Geometry,
        cap_bytes: int,
        *,
        direct: bool,
        syscalls: Syscalls,
        fault: Callable[[str], None],
    ) -> None:
        """Raises ConfigError for a path or cap that cannot be used, TierIOError if the medium fails."""
        self.geometry = geometry
        self.seal = RowSeal(key_space_digest, layout_fingerprint(layout_digest), geometry.row_bytes)
        self._path = path
        self._cap_bytes = cap_bytes
        self._sys = syscalls
        self._fault = fault
        try:
            self._lock_and_open(path, key_space_digest, direct)
        except OSError as error:
            raise self._explained(error) from error

    def medium_bytes(self) -> int:
        """Bytes of the medium this key space's files occupy now."""
        return self.files.occupied_bytes()

    def close(self) -> None:
        """Make everything durable, unlock and close. Raises nothing."""
        self.journal.close()
        try:
            self._sys.fdatasync(self.file.fd)
        except OSError:
            self._fault("close_io_error")
        with contextlib.suppress(OSError):
            self._sys.close(self.file.fd)

    def _lock_and_open(self, path: str, key_space_digest: bytes, direct: bool) -> None:
        with locked_folder(path, self._sys) as folder, contextlib.ExitStack() as undo:
            self.files = files_of(folder, key_space_digest)
            try:
                self.file = DirectFile(self.files.slab, self._sys, direct=direct)
            except OSError as error:
                raise unusable(path, error) from error
            undo.callback(self._sys.close, self.file.fd)
            if not lock_soon(self.file.fd, self._sys):
                raise ConfigError(
                    f"the slab {self.files.slab!r} is in use by {holder_of(self.file.fd)}; "
                    f"give this engine another nvme_path, or stop the other one"
                )
            self.plan, self.journal, self.records = self._open(self.files)
            undo.pop_all()

    def _open(self, files: KeySpaceFiles) -> tuple[Plan, Journal, Records]:
        with contextlib.suppress(FileNotFoundError):
            self._sys.unlink(files.journal + ".tmp")
        check_medium(self._path, self._cap_bytes, files.folder)
        old = self._read_superblock()
        had_bytes = files.occupied_bytes() if old else 0
        room = make_room(files, self._cap_bytes, had_bytes, self._sys, self._fault)
        plan = plan_files(room, self.geometry)
        if plan.n_slots < 1:
            raise ConfigError(
                f"nvme_bytes is {self._cap_bytes}, of which {room} are left by other slabs under {self._path!r}; "
                f"a row of {self.geometry.row_bytes} bytes needs at least {least_cap_bytes(self.geometry)}: "
                f"raise nvme_bytes or use another nvme_path"
            )
        if old is None:
            self._sys.ftruncate(self.file.fd, 0)
            with contextlib.suppress(FileNotFoundError):
                self._sys.unlink(files.journal)
        # While the journal is rewritten its old and new files exist side by side: a larger old one takes slab room.
        excess = max(0, allocated_bytes(files.journal) - plan.journal_bytes)
        if os.fstat(self.file.fd).st_size > plan.slab_bytes - excess:
            self._sys.ftruncate(self.file.fd, max(BLOCK, (plan.slab_bytes - excess) // BLOCK * BLOCK))
        slab_id = old.slab_id if old else secrets.token_bytes(16)
        self._write_superblock(slab_id, plan.n_slots)
        journal = Journal(files.journal, slab_id, plan.n_slots, self._sys, self._fault)
        records = journal.load()
        journal.start(records)
        try:
            allocate(self._sys, self.file.fd, plan.slab_bytes)
            self.file.find_memory_align()
        except OSError:
            journal.close()
            raise
        return plan, journal, records

    def _read_superblock(self) -> Superblock | None:
        """The superblock if it is sound and ours; otherwise None, counted unless the file is new."""
        size = os.fstat(self.file.fd).st_size
        if size == 0:
            return None
        verdict, found = Superblock.parse(self.file.read_block(0))
        if found is None:
            self._fault(f"slab_{verdict.value}")
            return None
        expected = Superblock(
            self.seal.key_space,
            self.seal.layout,
            found.slab_id,
            self.geometry.row_bytes,
            self.geometry.slot_bytes,
            found.n_slots,
        )
        if found != expected:
            self._fault(f"slab_{Verdict.FOREIGN.value}")
            return None
        if size < BLOCK + found.n_slots * self.geometry.slot_bytes:
            self._fault("slab_truncated")
        return found

    def _write_superblock(self, slab_id: bytes, n_slots: int) -> None:
        block = memoryview(mmap.mmap(-1, BLOCK))
        geometry = self.geometry
        block[:] = Superblock(
            self.seal.key_space, self.seal.layout, slab_id, geometry.row_bytes, geometry.slot_bytes, n_slots
        ).pack()
        self.file.write(0, [block])

    def _explained(self, error: OSError) -> ConfigError | TierIOError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return ConfigError(
                f"the medium of {self._path!r} cannot hold nvme_bytes = {self._cap_bytes} ({error.strerror}); "
                f"lower nvme_bytes or free space"
            )
        return TierIOError(f"opening the slab under {self._path!r} failed: {error}")
