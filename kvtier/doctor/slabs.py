"""What lies in a folder of the nvme tier: whose slabs, sound or not, in use or not, and the cap."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.doctor.findings import Finding, State
from kvtier.doctor.locks import holder_of_path
from kvtier.tiers.nvme.format import Superblock, Verdict, judge_journal_header
from kvtier.tiers.nvme.io import BLOCK
from kvtier.tiers.nvme.space import JOURNAL_SUFFIX, SLAB_SUFFIX, KeySpaceFiles, key_spaces_in

_MEANING = {
    Verdict.EMPTY: "has no superblock",
    Verdict.CORRUPT: "has a damaged superblock",
    Verdict.FOREIGN: "is not kvtier's, in spite of its name",
    Verdict.VERSION: "was written by another version of kvtier",
}


def slab_folders(folder: Path) -> list[Path]:
    """The folder and those below it (one for each process of a node) that hold slabs."""
    below = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and entry.name.startswith(("dp", "rank-"))]
    return [each for each in (folder, *below) if key_spaces_in(each)]


def check_slabs(folder: Path, cap_bytes: int) -> list[Finding]:
    """Findings about every slab in the folder, and about the cap. Opens files for reading only."""
    try:
        slabs = [files for each in slab_folders(folder) for files in key_spaces_in(each)]
    except OSError as error:
        return [Finding("nvme", "files", State.FAULT, f"cannot be listed: {error.strerror}", "mend its rights")]
    found = [_slab(files) for files in slabs]
    occupied = sum(files.occupied_bytes() for files in slabs)
    state = os.statvfs(folder)
    possible = occupied + state.f_bavail * state.f_frsize
    says = f"{occupied} bytes in {len(slabs)} slabs; nvme_bytes is {cap_bytes}; the medium could hold {possible}"
    if cap_bytes > possible:
        fix = f"set nvme_bytes to {possible >> 20}MiB at most, or free space"
        found.append(Finding("nvme", "room", State.FAULT, says, fix))
    else:
        found.append(Finding("nvme", "room", State.OK, says))
    return found


def _slab(files: KeySpaceFiles) -> Finding:
    name = files.stem + SLAB_SUFFIX
    try:
        holder = holder_of_path(files.slab)
        verdict, superblock = Superblock.parse(_first_block(files.slab))
        if superblock is not None:
            verdict = judge_journal_header(_first_block(files.journal), superblock.slab_id)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        fix = "nothing to do: the engine starts this key space afresh; kvtier clear removes what is left"
        return Finding("nvme", name, State.FAULT, f"{missing} is missing", fix)
    except OSError as error:
        return Finding("nvme", name, State.FAULT, f"cannot be read: {error.strerror}", "mend its rights, or its drive")
    in_use = f", in use by {holder}" if holder else ""
    if superblock is None:
        fix = "the engine starts it afresh and counts it; kvtier clear removes it"
        return Finding("nvme", name, State.FAULT, _MEANING[verdict] + in_use, fix)
    size = f"{superblock.n_slots} slots of {superblock.row_bytes} bytes{in_use}"
    if verdict is not Verdict.OK:
        fix = "its rows cannot be recovered: the engine starts it afresh; kvtier clear removes it"
        return Finding("nvme", name, State.FAULT, f"{size}; its {JOURNAL_SUFFIX} file is {verdict.value}", fix)
    if os.stat(files.slab).st_size < BLOCK + superblock.n_slots * superblock.slot_bytes:
        fix = "rows behind the end read as misses; kvtier clear removes it"
        return Finding("nvme", name, State.FAULT, f"{size}; the file is cut off", fix)
    return Finding("nvme", name, State.OK, size)


def _first_block(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(BLOCK)
