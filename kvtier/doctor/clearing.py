"""Emptying tiers: all of it or nothing, and never under a running engine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from kvtier.doctor.slabs import slab_folders
from kvtier.errors import ConfigError
from kvtier.tiers.cxl.format import MAGIC
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.nvme.space import (
    KeySpaceFiles,
    allocated_bytes,
    holder_of,
    key_spaces_in,
    locked_folder,
    try_lock,
)


class Found(NamedTuple):
    """What a path holds of kvtier's: slabs of the nvme tier, or one file of the cxl tier."""

    path: str
    slabs: list[KeySpaceFiles]
    cxl_files: list[str]

    @property
    def occupied_bytes(self) -> int:
        """Bytes of the medium that clearing gives back."""
        slabs = sum(files.occupied_bytes() for files in self.slabs)
        return slabs + sum(allocated_bytes(path) for path in self.cxl_files)


def find_rows(path: str) -> Found:
    """What of kvtier's lies at `path`. Changes nothing. Raises ConfigError if nothing does."""
    at = Path(path)
    try:
        if at.is_dir():
            slabs = [files for folder in slab_folders(at) for files in key_spaces_in(folder)]
            if slabs:
                return Found(path, slabs, [])
        elif at.is_file():
            with at.open("rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    return Found(path, [], [path])
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read ({error.strerror}); run as the user of the engine") from error
    raise ConfigError(f"there is nothing of kvtier's at {path!r}; name what nvme_path or cxl_path says")


def clear_rows(found: Found) -> int:
    """Remove it and return the bytes given back. Raises ConfigError, and nothing is removed, if any of it is in use."""
    before, system = found.occupied_bytes, Syscalls()
    with contextlib.ExitStack() as stack:
        for folder in sorted({str(files.folder) for files in found.slabs}):
            stack.enter_context(locked_folder(folder, system))
        for path in [*(files.slab for files in found.slabs if os.path.exists(files.slab)), *found.cxl_files]:
            fd = system.open(path, os.O_RDWR)
            stack.callback(system.close, fd)
            if not try_lock(fd, system):
                raise ConfigError(f"{path!r} is in use by {holder_of(fd)}; stop that engine first. Nothing was removed")
        for files in found.slabs:
            files.remove(system)
        for path in found.cxl_files:
            system.unlink(path)
    return before
