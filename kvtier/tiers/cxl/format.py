"""How rows lie in a mapped region. Little-endian; golden tests hold it still.

Region: superblock (one page) | row headers, 128 bytes a slot | scratch for probes, up to 2 MiB | slot 0 | slot 1 | ...

Headers lie together, apart from the payloads, so that recovery reads 128 bytes a slot and not the whole device.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvtier.codec.checksum import checksum64
from kvtier.tiers.addresses import round_up, row_stride
from kvtier.tiers.nvme.format import ROW_HEADER_BYTES

REGION_ALIGN_BYTES = 2 << 20
"""Devdax is mapped in multiples of this, and huge pages start on it."""

SUPERBLOCK_BYTES = 4096
MAGIC = b"KVTCXL\0\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sII32s32sQQQ")
_CHECKSUM = struct.Struct("<Q")
_SCRATCH_SHARE, _LEAST_SCRATCH_BYTES, _MOST_SCRATCH_BYTES = 64, 64 << 10, 32 << 20


class Region(NamedTuple):
    """Where `n_slots` rows of `row_bytes`, their headers, room for probes and the superblock lie."""

    row_bytes: int
    stride_bytes: int
    n_slots: int
    scratch_bytes: int
    rows_offset: int
    total_bytes: int

    @classmethod
    def within(cls, cap_bytes: int, row_bytes: int) -> Region:
        """The most rows that fit `cap_bytes`; `n_slots` is 0 if none does."""
        stride = row_stride(row_bytes)
        total = cap_bytes // REGION_ALIGN_BYTES * REGION_ALIGN_BYTES
        scratch = min(
            _MOST_SCRATCH_BYTES, max(_LEAST_SCRATCH_BYTES, total // 64 // SUPERBLOCK_BYTES * SUPERBLOCK_BYTES)
        )
        per_slot = stride + ROW_HEADER_BYTES
        n = max(0, (total - scratch - SUPERBLOCK_BYTES) // per_slot)
        while n and _rows_offset(n, scratch) + n * stride > total:
            n = max(0, n - max(1, (_rows_offset(n, scratch) + n * stride - total) // per_slot))
        return cls(row_bytes, stride, n, scratch, _rows_offset(n, scratch), total)

    def superblock(self, key_space: bytes, layout: bytes) -> bytes:
        """The first page of the region."""
        fields = _FIELDS.pack(
            MAGIC, _VERSION, ROW_HEADER_BYTES, key_space, layout, self.row_bytes, self.rows_offset, self.n_slots
        )
        return (fields + _CHECKSUM.pack(checksum64(fields))).ljust(SUPERBLOCK_BYTES, b"\0")


def _rows_offset(n_slots: int, scratch_bytes: int) -> int:
    return round_up(SUPERBLOCK_BYTES + n_slots * ROW_HEADER_BYTES + scratch_bytes, REGION_ALIGN_BYTES)


def least_cap_bytes(row_bytes: int) -> int:
    """The smallest cap under which one row fits."""
    return round_up(_rows_offset(1, _LEAST_SCRATCH_BYTES) + row_stride(row_bytes), REGION_ALIGN_BYTES)
