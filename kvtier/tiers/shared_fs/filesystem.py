"""The operating system as the shared_fs tier sees it, so that a test can make any single step fail.

Everything blocks and releases the GIL; a dead mount blocks for good, which is why nothing here is called from an
engine's thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.tiers.nvme.io import Syscalls

GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
"""What the system answers for a file that another machine has removed."""


class Found(NamedTuple):
    """One file or folder of a tree. `bytes` is what it occupies on the medium."""

    path: str
    is_folder: bool
    bytes: int
    mtime_ns: int


class FileSystem(Syscalls):
    """Verbs on paths beside those on open files. Every method raises OSError as the kernel says."""

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def touch(self, path: str) -> None:
        os.utime(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listing(self, path: str) -> list[Found]:
        """What lies in a folder; entries that vanish meanwhile are left out."""
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                is_folder = entry.is_dir(follow_symlinks=False)
                found.append(Found(entry.path, is_folder, about.st_blocks * 512, about.st_mtime_ns))
        return found

    def tree(self, path: str) -> Iterator[Found]:
        """Every file and folder below `path`, itself left out. Folders that vanish meanwhile are left out."""
        stack = [path]
        while stack:
            try:
                entries = self.listing(stack.pop())
            except OSError as error:
                if error.errno in GONE:
                    continue
                raise
            for entry in entries:
                if entry.is_folder:
                    stack.append(entry.path)
                yield entry

    def make_folder(self, path: str) -> bool:
        """Make a folder and those above it; False if it was there."""
        try:
            self.mkdir(path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            self.make_folder(os.path.dirname(path))
            return self.make_folder(path)
        return True

    def remove(self, path: str) -> bool:
        """Remove a file; False if it was not there."""
        try:
            self.unlink(path)
        except OSError as error:
            if error.errno in GONE:
                return False
            raise
        return True
