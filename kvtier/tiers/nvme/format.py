"""What the nvme tier writes, byte by byte. Little-endian; golden tests hold it still.

Slab file:    superblock (one block) | slot 0 | slot 1 | ... | scratch for probes
Slot:         payload | zeros | row header in the last 128 bytes of the last block
Journal file: header (one block) | records of 96 bytes; an all-zero record is unused room

A slot is a whole number of blocks. Its body (the whole blocks of the payload) goes to and from the caller's buffer
directly; only its tail (the rest of the payload and the header) passes through a scratch buffer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvtier.codec.checksum import checksum64
from kvtier.model.keys import KEY_BYTES
from kvtier.tiers.addresses import round_up
from kvtier.tiers.nvme.io import BLOCK
from kvtier.tiers.protocol import RowId

FORMAT_VERSION = 1

_SUPERBLOCK = struct.Struct("<8sII32s32s16sQQQ")
_SLAB_MAGIC = b"KVTSLAB\0"
_JOURNAL_HEADER = struct.Struct("<8sII16s")
_JOURNAL_MAGIC = b"KVTJRNL\0"
_CHECKSUM = struct.Struct("<Q")

ROW_HEADER_BYTES = 128
_ROW_HEADER = struct.Struct("<4sHHIIQQ8s8s32s32sQ")
_ROW_MAGIC = b"KVTr"
_PREFIX_BYTES = 8

RECORD_BYTES = 96
_RECORD = struct.Struct("<HHIQQ32s32s")
RECORD_DTYPE = np.dtype(
    [
        ("kind", "<u2"),
        ("count", "<u2"),
        ("slot", "<u4"),
        ("sequence", "<u8"),
        ("generation", "<u8"),
        ("key", "V32"),
        ("parent", "V32"),
        ("checksum", "<u8"),
    ]
)
KIND_PUBLISH, KIND_PUBLISH_FIRST, KIND_FREE = 1, 2, 3
FREE_SLOTS_PER_RECORD = 16


class Verdict(Enum):
    """What a header on the medium turned out to be. Everything but OK is a counted reason."""

    OK = "ok"
    EMPTY = "empty"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    VERSION = "version"


def layout_fingerprint(layout_digest: str) -> bytes:
    """32 bytes for a layout digest of any length."""
    return hashlib.sha256(layout_digest.encode()).digest()


class Geometry(NamedTuple):
    """How a row of `row_bytes` lies in a slot."""

    row_bytes: int
    body_bytes: int
    tail_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, row_bytes: int) -> Geometry:
        """The geometry of rows of `row_bytes`."""
        body = row_bytes // BLOCK * BLOCK
        tail = round_up(row_bytes - body + ROW_HEADER_BYTES, BLOCK)
        return cls(row_bytes, body, tail, body + tail)


class Superblock(NamedTuple):
    """The first block of a slab."""

    key_space: bytes
    layout: bytes
    slab_id: bytes
    row_bytes: int
    slot_bytes: int
    n_slots: int

    def pack(self) -> bytes:
        """One block of bytes."""
        return _seal(_SUPERBLOCK.pack(_SLAB_MAGIC, FORMAT_VERSION, BLOCK, *self))

    @classmethod
    def parse(cls, block: bytes) -> tuple[Verdict, Superblock | None]:
        """The superblock in `block` and OK, or why there is none."""
        verdict = _judge(block, _SUPERBLOCK.size, _SLAB_MAGIC)
        if verdict is not Verdict.OK:
            return verdict, None
        _, version, block_bytes, *fields = _SUPERBLOCK.unpack_from(block)
        if version != FORMAT_VERSION or block_bytes != BLOCK:
            return Verdict.VERSION, None
        return Verdict.OK, cls(*fields)


def pack_journal_header(slab_id: bytes) -> bytes:
    """The first block of the journal that belongs to the slab `slab_id`."""
    return _seal(_JOURNAL_HEADER.pack(_JOURNAL_MAGIC, FORMAT_VERSION, RECORD_BYTES, slab_id))


def judge_journal_header(block: bytes, slab_id: bytes) -> Verdict:
    """Whether `block` starts a journal of the slab `slab_id`."""
    verdict = _judge(block, _JOURNAL_HEADER.size, _JOURNAL_MAGIC)
    if verdict is not Verdict.OK:
        return verdict
    _, version, record_bytes, owner = _JOURNAL_HEADER.unpack_from(block)
    if version != FORMAT_VERSION or record_bytes != RECORD_BYTES:
        return Verdict.VERSION
    return Verdict.OK if owner == slab_id else Verdict.FOREIGN


def _seal(fields: bytes) -> bytes:
    return (fields + _CHECKSUM.pack(checksum64(fields))).ljust(BLOCK, b"\0")


def _judge(block: bytes, size: int, magic: bytes) -> Verdict:
    if not block.strip(b"\0"):
        return Verdict.EMPTY
    if not block.startswith(magic):
        return Verdict.FOREIGN
    if len(block) < size + _CHECKSUM.size or _CHECKSUM.unpack_from(block, size)[0] != checksum64(block[:size]):
        return Verdict.CORRUPT
    return Verdict.OK


class RowSeal(NamedTuple):
    """Writes and checks row headers of one slab."""

    key_space: bytes
    layout: bytes
    row_bytes: int

    def pack(self, slot: int, row: RowId, generation: int, payload_checksum: int) -> bytes:
        """The 128 bytes that say what the slot holds."""
        fields = _ROW_HEADER.pack(
            _ROW_MAGIC,
            FORMAT_VERSION,
            row.group,
            slot,
            len(row.parent),
            generation,
            self.row_bytes,
            self.key_space[:_PREFIX_BYTES],
            self.layout[:_PREFIX_BYTES],
            row.key,
            row.parent,
            payload_checksum,
        )
        return fields + _CHECKSUM.pack(checksum64(fields))

    def check(self, header: bytes, slot: int, row: RowId, generation: int) -> tuple[Verdict, int]:
        """The payload checksum the header promises and OK; CORRUPT if the header is damaged, FOREIGN if it is whole
        but speaks of another row, slot, generation, layout or key space."""
        if len(header) != ROW_HEADER_BYTES:
            return Verdict.CORRUPT, 0
        (payload_checksum,) = _CHECKSUM.unpack_from(header, _ROW_HEADER.size - _CHECKSUM.size)
        if header == self.pack(slot, row, generation, payload_checksum):
            return Verdict.OK, payload_checksum
        (stored,) = _CHECKSUM.unpack_from(header, _ROW_HEADER.size)
        whole = stored == checksum64(header[: _ROW_HEADER.size])
        return Verdict.FOREIGN if whole else Verdict.CORRUPT, 0


class RowHeader(NamedTuple):
    """What a sound row header says, whoever wrote it."""

    slot: int
    row: RowId
    generation: int

    @classmethod
    def parse(cls, header: bytes) -> RowHeader | None:
        """The header in 128 bytes, or None if they are not a sound one."""
        fields, stored = header[: _ROW_HEADER.size], header[_ROW_HEADER.size :]
        if len(stored) != _CHECKSUM.size or _CHECKSUM.unpack(stored)[0] != checksum64(fields):
            return None
        magic, version, group, slot, parent_bytes, generation, _, _, _, key, parent, _ = _ROW_HEADER.unpack(fields)
        if magic != _ROW_MAGIC or version != FORMAT_VERSION or parent_bytes > KEY_BYTES:
            return None
        return cls(slot, RowId(key, parent[:parent_bytes], group), generation)


class Entry(NamedTuple):
    """A row to be published in the journal."""

    slot: int
    row: RowId
    generation: int


def pack_publish(entry: Entry, sequence: int, seed: int) -> bytes:
    """One journal record: `slot` now holds `row`."""
    kind = KIND_PUBLISH if entry.row.parent else KIND_PUBLISH_FIRST
    row = entry.row
    fields = _RECORD.pack(kind, row.group, entry.slot, sequence, entry.generation, row.key, row.parent)
    return fields + _CHECKSUM.pack(checksum64(fields, seed))


def pack_free(slots: Sequence[int], sequence: int, seed: int) -> bytes:
    """One journal record: up to 16 slots hold nothing now."""
    listed = struct.pack(f"<{len(slots)}I", *slots).ljust(2 * KEY_BYTES, b"\0")
    fields = _RECORD.pack(KIND_FREE, len(slots), slots[0], sequence, 0, listed[:KEY_BYTES], listed[KEY_BYTES:])
    return fields + _CHECKSUM.pack(checksum64(fields, seed))
