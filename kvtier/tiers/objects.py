"""What a row is called and how it is sealed where many machines keep objects: shared files, a distributed pool.

Object: payload | zeros | header in the last 128 bytes. The name follows from the key, the group and everything that
must match (key space, layout, size of a row), so any process that wants a row can say where it would be; the header
says all of it again, with the xxh3 of the payload, so nothing a medium hands back is believed. Little-endian; golden
tests hold it still.
"""

from __future__ import annotations

import hashlib
import struct
from enum import Enum
from typing import NamedTuple

from kvtier.codec.checksum import checksum64
from kvtier.tiers.protocol import RowId, RowStatus

FORMAT_VERSION = 1
HEADER_BYTES = 128

_MAGIC = b"KVTo"
_HEADER = struct.Struct("<4sHHIQ8s8s32s32sQ12x")
_CHECKSUM = struct.Struct("<Q")
_TAG_BYTES = 8


class Verdict(Enum):
    """What the header of an object turned out to be. Everything but OK is a counted reason."""

    OK = "ok"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"


STATUS_OF = {Verdict.CORRUPT: RowStatus.CORRUPT, Verdict.FOREIGN: RowStatus.FOREIGN}


class Links(NamedTuple):
    """Which block an object holds and which one comes before it (empty where that was not known)."""

    key: bytes
    parent: bytes


class ObjectSeal:
    """Names, writes and checks the objects of one key space and layout. Immutable; thread-safe."""

    def __init__(self, key_space_digest: bytes, layout_digest: str, row_bytes: int) -> None:
        layout = hashlib.sha256(layout_digest.encode()).digest()
        fields = struct.pack("<HQ", FORMAT_VERSION, row_bytes)
        self.namespace = hashlib.sha256(b"kvtier.objects\0" + fields + key_space_digest + layout).hexdigest()[:16]
        self._prefix = self.namespace.encode()
        self._tags = key_space_digest[:_TAG_BYTES], layout[:_TAG_BYTES]
        self._row_bytes = row_bytes

    def name(self, row: RowId) -> str:
        """40 hexadecimal digits, the same on every machine."""
        group = row.group.to_bytes(2, "little")
        return hashlib.sha256(self._prefix + row.key + group).hexdigest()[:40]

    def pack(self, row: RowId, payload_checksum: int) -> bytes:
        """The header of an object that holds `row`."""
        fields = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            row.group,
            len(row.parent),
            self._row_bytes,
            *self._tags,
            row.key,
            row.parent,
            payload_checksum,
        )
        return fields + _CHECKSUM.pack(checksum64(fields))

    def check(self, header: bytes, row: RowId) -> tuple[Verdict, int]:
        """The payload checksum a header promises and OK; CORRUPT if it is damaged, FOREIGN if it is whole but speaks of
        another row, layout or key space. Writers need not agree on the parent: some engines do not tell it."""
        if not _is_whole(header):
            return Verdict.CORRUPT, 0
        magic, version, group, _, row_bytes, *tags, key, _, payload_checksum = _HEADER.unpack(header[: _HEADER.size])
        mine = (_MAGIC, FORMAT_VERSION, row.group, self._row_bytes, *self._tags, row.key)
        if (magic, version, group, row_bytes, *tags, key) != mine:
            return Verdict.FOREIGN, 0
        return Verdict.OK, payload_checksum


def links_of(header: bytes) -> Links | None:
    """The links a header of this format names, whatever its key space; None if it is damaged or of another format."""
    if not _is_whole(header):
        return None
    magic, version, _, parent_bytes, *_, key, parent, _ = _HEADER.unpack(header[: _HEADER.size])
    if magic != _MAGIC or version != FORMAT_VERSION:
        return None
    return Links(key, parent[:parent_bytes])


def _is_whole(header: bytes) -> bool:
    if len(header) != HEADER_BYTES:
        return False
    fields, stored = header[: _HEADER.size], header[_HEADER.size :]
    return bool(_CHECKSUM.unpack(stored)[0] == checksum64(fields))
