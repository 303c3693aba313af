"""Memory borrowed for calls into the pool: small rows share mappings and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier.codec.checksum import checksum64
from kvtier.tiers.objects import HEADER_BYTES
from kvtier.tiers.pool.client import Client
from kvtier.tiers.pool.staging import Staging


def staging_of(row_bytes: int) -> Staging:
    client: Client = None  # type: ignore[assignment]  # over TCP nothing is registered
    return Staging(client, row_bytes, any_memory=True)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_a_call_of_thousands_of_small_rows_takes_few_mappings() -> None:
    staging, before = staging_of(1024), mappings()
    with staging.borrow(16_384) as staged:
        assert len(staged.headers) == 16_384
        assert mappings() - before < 64
    kept = mappings()
    with staging.borrow(16_384):
        assert mappings() <= kept + 1, "what came back is used again"


@pytest.mark.parametrize("row_bytes", [64, 1000, 4096, 256 << 10])
def test_rows_that_share_a_mapping_keep_their_own_bytes(row_bytes: int) -> None:
    staging, n = staging_of(row_bytes), 9
    rows = [np.full(row_bytes, i, np.uint8) for i in range(n)]
    with staging.borrow(n) as staged:
        for i, row in enumerate(rows):
            assert staged.put(i, row.data) == checksum64(row.data)
            staged.headers[i][:] = 100 + i
        starts = sorted(staged.pieces(i, row.data)[0] for i, row in enumerate(rows))
        assert min(np.diff(starts)) >= row_bytes + HEADER_BYTES
        for i, row in enumerate(rows):
            target = np.empty(row_bytes, np.uint8)
            assert staged.get(i, target.data) == checksum64(row.data)
            assert (target == i).all()
            assert (staged.headers[i] == 100 + i).all()
