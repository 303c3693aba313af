"""Made-up rows whose bytes follow from their identity, so that any mix-up, tear or flip shows."""

from __future__ import annotations

import hashlib
import random

from kvtier.tiers.protocol import RowId, RowStatus, Slots, Tier


def chain_rows(n: int, seed: int | str = 0, group: int = 0) -> list[RowId]:
    """Identities of `n` consecutive blocks of one made-up prompt."""
    keys = [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n)]
    return [RowId(key, keys[i - 1] if i else b"", group) for i, key in enumerate(keys)]


def payload_of(row: RowId, row_bytes: int) -> memoryview:
    """The bytes that belong to a row and to no other."""
    seed = row.key + row.parent + row.group.to_bytes(2, "little")
    return memoryview(bytearray(random.Random(seed).randbytes(row_bytes)))


def soiled_buffers(n: int, row_bytes: int) -> list[memoryview]:
    """Buffers that hold something else before a read."""
    return [memoryview(bytearray(b"\xa5") * row_bytes) for _ in range(n)]


def store_rows(tier: Tier, rows: list[RowId]) -> Slots:
    """Reserve slots and write the rows' own bytes into them. Raises AssertionError unless all of it works."""
    slots = tier.reserve(len(rows))
    assert slots is not None, f"no room for {len(rows)} rows"
    statuses = tier.write(slots, rows, [payload_of(row, tier.row_bytes) for row in rows])
    assert statuses == [RowStatus.OK] * len(rows), f"rows were not written: {statuses}"
    return slots


def read_back(tier: Tier, slots: Slots, rows: list[RowId]) -> list[RowStatus]:
    """Read rows and compare their bytes. Raises AssertionError for an OK row with wrong bytes; returns the statuses."""
    targets = soiled_buffers(len(rows), tier.row_bytes)
    statuses = tier.read(slots, rows, targets)
    for row, status, target in zip(rows, statuses, targets, strict=True):
        assert status is not RowStatus.OK or target == payload_of(row, tier.row_bytes), f"wrong bytes served for {row}"
    return statuses
