"""What every tier demands of its callers before it moves a byte."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import IntegrityError
from kvtier.model.keys import KEY_BYTES
from kvtier.tiers.protocol import RowId, Slots

_GROUPS = 1 << 16


def check_arguments(slots: Slots, rows: Sequence[RowId], buffers: Sequence[memoryview], row_bytes: int) -> None:
    """Raise IntegrityError unless slots, rows and buffers of one transfer match each other and the tier."""
    if not len(slots) == len(rows) == len(buffers):
        raise IntegrityError(f"{len(slots)} slots, {len(rows)} rows and {len(buffers)} buffers in one transfer")
    for buffer in buffers:
        if buffer.nbytes != row_bytes:
            raise IntegrityError(f"a buffer of {buffer.nbytes} bytes for a row of {row_bytes}")
    for row in rows:
        if len(row.key) != KEY_BYTES or len(row.parent) not in (0, KEY_BYTES) or not 0 <= row.group < _GROUPS:
            raise IntegrityError(f"not the identity of a row: {row}")
