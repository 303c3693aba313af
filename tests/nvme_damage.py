"""Damages what an nvme tier has on its medium, the way a bad cell does: one bit, behind the tier's back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvtier.tiers.nvme.format import KIND_FREE, RECORD_DTYPE, Superblock
from kvtier.tiers.nvme.io import BLOCK


def flip_a_bit(folder: Path, row: int | str) -> None:
    """Flip a bit in the payload of the `row`-th row published in the only slab under `folder`, or of the "last" one."""
    (slab,) = folder.rglob("*.slab")
    _, superblock = Superblock.parse(slab.read_bytes()[:BLOCK])
    assert superblock is not None
    slots = _published(slab.with_suffix(".journal"))
    slot = slots[-1] if row == "last" else slots[int(row)]
    flip_bit_at(slab, BLOCK + slot * superblock.slot_bytes + 67)


def flip_bit_at(path: Path, offset: int) -> None:
    """Flip a high bit of one byte: in a float, one that rounding cannot hide."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())


def _published(journal: Path) -> list[int]:
    """Slots in the order in which rows were published in them."""
    content = journal.read_bytes()[BLOCK:]
    records = np.frombuffer(content[: len(content) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize], RECORD_DTYPE)
    return [int(r["slot"]) for r in records if r["kind"] not in (0, KIND_FREE)]
