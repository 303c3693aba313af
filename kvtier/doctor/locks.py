"""Who holds a file's lock, found out without taking it: an engine that starts meanwhile must not be in our way."""

from __future__ import annotations

import os
from pathlib import Path


def holder_of_path(path: str, locks: str = "/proc/locks") -> str | None:
    """ "process N" if some process holds a lock on `path`, else None. Raises OSError if there is no such file."""
    state = os.stat(path)
    mark = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    for line in Path(locks).read_text().splitlines():
        fields = line.split()
        if "->" not in fields and len(fields) > 5 and fields[5] == mark:
            return f"process {fields[4]}"
    return None
