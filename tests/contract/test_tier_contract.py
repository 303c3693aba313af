"""One suite every tier passes: what `kvtier.tiers.protocol` promises, tested from outside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.codec.form import RowForm
from kvtier.codec.registry import CodecChoice, build_codec
from kvtier.errors import IntegrityError
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows, payload_of, read_back, soiled_buffers, store_rows
from kvtier.testing.shared_memory_tier import SharedMemoryTier
from kvtier.tiers.codec_tier import CodecTier, encoded_row_bytes
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.dedup import DedupTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme.uring import uring_missing
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import MooncakeClient, PoolOptions
from kvtier.tiers.protocol import RowId, RowStatus, Slots, Tier
from kvtier.tiers.shared_fs import SharedFsTier
from tests.pool_rig import needs_mooncake, running_pool

CAPACITY = 24
MakeTier = Callable[[int], Tier]


def _nvme(folder: Path, row_bytes: int, **tuning: Any) -> NvmeTier:
    slot_bytes = row_bytes // 4096 * 4096 + 8192
    return NvmeTier(str(folder), b"\7" * 32, "layout", row_bytes, 400_000 + 2 * CAPACITY * slot_bytes, **tuning)


def _encoded(name: str, row_bytes: int, inner: MakeTier = lambda size: MemoryTier(size, CAPACITY)) -> CodecTier:
    codec = build_codec(CodecChoice(name=name), RowForm(kind="opaque", opaque_bytes=row_bytes))
    return CodecTier(inner(encoded_row_bytes(codec)), codec)


@pytest.fixture(scope="module")
def pool_options() -> Iterator[PoolOptions]:
    """Two owners on loopback; every tier has a key space of its own there."""
    with running_pool() as running:
        yield PoolOptions(master=running.address, host="127.0.0.1")


@pytest.fixture(scope="module")
def pool_client(pool_options: PoolOptions) -> Iterator[MooncakeClient]:
    """One client for all tiers: joining and leaving take a second each."""
    client = MooncakeClient(pool_options)
    leave, client.close = client.close, lambda: None  # type: ignore[method-assign]
    yield client
    leave()


def _pool(request: pytest.FixtureRequest, row_bytes: int) -> PoolTier:
    client = request.getfixturevalue("pool_client")
    options = request.getfixturevalue("pool_options")
    return PoolTier(options, os.urandom(32), "layout", row_bytes, handles=2 * CAPACITY, connect=lambda _: client)


def _shared_fs(folder: Path, row_bytes: int, **tuning: bool) -> SharedFsTier:
    # Folders count, and few files make many of them.
    cap_bytes = (4 << 20) + 2 * CAPACITY * (row_bytes // 4096 * 4096 + 40_960)
    return SharedFsTier(str(folder), b"\7" * 32, "layout", row_bytes, cap_bytes, **tuning)


@pytest.fixture(
    params=[
        "memory",
        "dram-own",
        "dram-shared",
        "dram-engine",
        "cxl",
        "nvme",
        "nvme-buffered",
        "nvme-uring",
        "faulty",
        "codec-raw",
        "codec-zstd",
        "dedup-memory",
        "dedup-nvme",
        "codec-dedup-nvme",
        "shared-memory",
        "shared_fs",
        "shared_fs-buffered",
        "codec-shared_fs",
        pytest.param("pool", marks=needs_mooncake),
        pytest.param("codec-pool", marks=needs_mooncake),
    ]
)
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    """Builds a tier with at least CAPACITY slots, for a row size; closes what it built."""
    made: list[Tier] = []

    if request.param == "nvme-uring" and (missing := uring_missing()):
        pytest.skip(missing)

    def make(row_bytes: int) -> Tier:
        kinds: dict[str, Callable[[], Tier]] = {
            "memory": lambda: MemoryTier(row_bytes, CAPACITY),
            "dram-own": lambda: DramTier.own(row_bytes, CAPACITY * (row_bytes + 4096)),
            "dram-shared": lambda: DramTier.own(
                row_bytes, CAPACITY * (row_bytes + 4096), shared_path=str(tmp_path / "dram")
            ),
            "dram-engine": lambda: DramTier.over(
                np.zeros((CAPACITY, row_bytes + 37), dtype=np.uint8), row_bytes, CAPACITY, row_bytes + 37
            ),
            "cxl": lambda: CxlTier(
                str(tmp_path / "cxl"), b"\7" * 32, "layout", row_bytes, (4 << 20) + CAPACITY * (row_bytes + 4224)
            ),
            "nvme": lambda: _nvme(tmp_path, row_bytes),
            "nvme-buffered": lambda: _nvme(tmp_path, row_bytes, direct=False, max_io_bytes=1 << 16),
            "nvme-uring": lambda: _nvme(tmp_path, row_bytes, backend="io_uring", max_io_bytes=1 << 17),
            "faulty": lambda: FaultyTier(MemoryTier(row_bytes, CAPACITY)),
            "codec-raw": lambda: _encoded("raw", row_bytes),
            "codec-zstd": lambda: _encoded("zstd", row_bytes),
            "dedup-memory": lambda: DedupTier(MemoryTier(row_bytes, CAPACITY)),
            "dedup-nvme": lambda: DedupTier(_nvme(tmp_path, row_bytes)),
            "codec-dedup-nvme": lambda: _encoded("zstd", row_bytes, lambda size: DedupTier(_nvme(tmp_path, size))),
            "shared-memory": lambda: SharedMemoryTier(row_bytes, CAPACITY),
            "shared_fs": lambda: _shared_fs(tmp_path, row_bytes),
            "shared_fs-buffered": lambda: _shared_fs(tmp_path, row_bytes, direct=False),
            "pool": lambda: _pool(request, row_bytes),
            "codec-pool": lambda: _encoded("zstd", row_bytes, lambda size: _pool(request, size)),
            "codec-shared_fs": lambda: _encoded("zstd", row_bytes, lambda size: _shared_fs(tmp_path, size)),
        }
        tier = kinds[request.param]()
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.close()


@pytest.fixture(params=[1, 1000, 4096, 65536, 70001])
def tier(request: pytest.FixtureRequest, make_tier: MakeTier) -> Tier:
    """A tier for each awkward row size."""
    return make_tier(request.param)


def holds(tier: Tier, slots: Slots, rows: list[RowId]) -> bool:
    """Whether every row reads back OK and bit for bit."""
    return read_back(tier, slots, rows) == [RowStatus.OK] * len(rows)


def test_what_was_written_is_read_bit_for_bit(tier: Tier) -> None:
    rows = chain_rows(9)
    slots = store_rows(tier, rows)
    assert len(set(slots.tolist())) == 9
    assert holds(tier, slots, rows)
    order = np.random.default_rng(1).permutation(9)
    assert holds(tier, slots[order], [rows[i] for i in order])
    assert holds(tier, slots[3:4], rows[3:4])


def test_slots_are_reserved_once_and_none_is_promised_beyond_capacity(tier: Tier) -> None:
    capacity = tier.stats().capacity_rows
    assert capacity >= CAPACITY
    first = tier.reserve(capacity - 3)
    assert first is not None
    assert tier.reserve(4) is None
    second = tier.reserve(3)
    assert second is not None
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(capacity))
    assert tier.reserve(1) is None
    assert tier.stats().used_rows == capacity
    tier.release(second)
    third = tier.reserve(3)
    assert third is not None
    assert sorted(third.tolist()) == sorted(second.tolist())


def test_reserving_nothing_and_moving_nothing_is_fine(tier: Tier) -> None:
    nothing = tier.reserve(0)
    assert nothing is not None
    assert nothing.dtype == np.int32
    assert len(nothing) == 0
    assert tier.write(nothing, [], []) == []
    assert tier.read(nothing, [], []) == []
    tier.release(nothing)


def test_a_reserved_slot_shows_nothing_until_written(tier: Tier) -> None:
    rows = chain_rows(2)
    slots = tier.reserve(2)
    assert slots is not None
    assert tier.read(slots, rows, soiled_buffers(2, tier.row_bytes)) == [RowStatus.FOREIGN] * 2


def test_a_released_row_is_gone_and_its_slot_serves_another(tier: Tier) -> None:
    rows, others = chain_rows(6), chain_rows(6, seed=1)
    slots = store_rows(tier, rows)
    tier.release(slots[2:])
    assert tier.read(slots[2:], rows[2:], soiled_buffers(4, tier.row_bytes)) == [RowStatus.FOREIGN] * 4
    again = store_rows(tier, others[:4])
    assert holds(tier, slots[:2], rows[:2])
    assert holds(tier, again, others[:4])
    assert tier.stats().used_rows == 6


@pytest.mark.parametrize("field", ["key", "parent", "group"])
def test_a_row_is_only_read_under_its_own_identity(tier: Tier, field: str) -> None:
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    wrong = {
        "key": RowId(b"\1" * 32, *rows[1][1:]),
        "parent": rows[1]._replace(parent=b""),
        "group": rows[1]._replace(group=1),
    }
    into = soiled_buffers(2, tier.row_bytes)
    assert tier.read(slots, [rows[0], wrong[field]], into) == [RowStatus.OK, RowStatus.FOREIGN]
    assert into[0] == payload_of(rows[0], tier.row_bytes)
    assert tier.stats().faults == {"foreign": 1}


def test_double_release_raises_and_changes_nothing(tier: Tier) -> None:
    rows = chain_rows(4)
    slots = store_rows(tier, rows)
    tier.release(slots[:1])
    with pytest.raises(IntegrityError):
        tier.release(slots[:2])
    with pytest.raises(IntegrityError):
        tier.release(slots[[3, 3]])
    assert holds(tier, slots[1:], rows[1:])
    assert tier.stats().used_rows == 3


def test_only_reserved_slots_can_be_written(tier: Tier) -> None:
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    sources = [payload_of(row, tier.row_bytes) for row in rows]
    with pytest.raises(IntegrityError):
        tier.write(slots, rows, sources)
    tier.release(slots)
    with pytest.raises(IntegrityError):
        tier.write(slots, rows, sources)
    assert tier.stats().used_rows == 0


def test_misfitting_buffers_and_identities_are_refused(tier: Tier) -> None:
    slots = tier.reserve(1)
    assert slots is not None
    (row,) = chain_rows(1)
    fitting = payload_of(row, tier.row_bytes)
    for rows, sources in (
        ([row], [memoryview(bytearray(tier.row_bytes + 1))]),
        ([row, row], [fitting, fitting]),
        ([row._replace(key=b"short")], [fitting]),
        ([row._replace(parent=b"short")], [fitting]),
        ([row._replace(group=1 << 16)], [fitting]),
    ):
        with pytest.raises(IntegrityError):
            tier.write(slots, rows, sources)
    assert tier.write(slots, [row], [fitting]) == [RowStatus.OK]


def test_read_only_sources_are_fine(tier: Tier) -> None:
    (row,) = chain_rows(1)
    slots = tier.reserve(1)
    assert slots is not None
    assert tier.write(slots, [row], [memoryview(bytes(payload_of(row, tier.row_bytes)))]) == [RowStatus.OK]
    assert holds(tier, slots, [row])


def test_groups_keep_the_same_key_apart(tier: Tier) -> None:
    one, other = chain_rows(3, group=0), chain_rows(3, group=65535)
    slots_one, slots_other = store_rows(tier, one), store_rows(tier, other)
    assert holds(tier, slots_one, one)
    assert holds(tier, slots_other, other)


def test_counters_add_up(tier: Tier) -> None:
    before = tier.stats()
    assert (before.used_rows, before.read_bytes, before.written_bytes, before.faults) == (0, 0, 0, {})
    rows = chain_rows(5)
    slots = store_rows(tier, rows)
    assert holds(tier, slots[:3], rows[:3])
    after = tier.stats()
    assert after.used_rows == 5
    assert after.written_bytes == 5 * tier.row_bytes
    assert after.read_bytes == 3 * tier.row_bytes
    assert after.medium_bytes <= after.cap_bytes


def test_probe_gives_a_usable_curve_and_disturbs_no_row(tier: Tier) -> None:
    rows = chain_rows(CAPACITY)
    slots = store_rows(tier, rows)
    probe = tier.probe()
    assert 0 < probe.read_latency_s < 1
    assert 0 < probe.write_latency_s < 1
    assert probe.read_bytes_per_s > 0
    assert probe.write_bytes_per_s > 0
    assert holds(tier, slots, rows)


def test_a_closed_tier_says_so_and_raises_nothing(tier: Tier) -> None:
    rows = chain_rows(2)
    slots = store_rows(tier, rows)
    tier.close()
    tier.close()
    assert tier.reserve(1) is None
    assert tier.write(slots, rows, [payload_of(row, tier.row_bytes) for row in rows]) == [RowStatus.CLOSED] * 2
    assert tier.read(slots, rows, soiled_buffers(2, tier.row_bytes)) == [RowStatus.CLOSED] * 2
    tier.release(slots)
    assert tier.stats().capacity_rows >= CAPACITY


def test_a_new_tier_has_nothing_to_recover(tier: Tier) -> None:
    assert tier.recover() == []
    assert tier.recover() == []


def test_threads_move_disjoint_slots_side_by_side(make_tier: MakeTier) -> None:
    tier = make_tier(40_000)
    shares = [tier.reserve(6) for _ in range(4)]
    failures: list[str] = []
    start = threading.Barrier(4)

    def work(worker: int) -> None:
        slots, rows = shares[worker], chain_rows(6, worker)
        assert slots is not None
        start.wait()
        for first in (0, 3):
            part = slice(first, first + 3)
            payloads = [payload_of(row, tier.row_bytes) for row in rows[part]]
            if tier.write(slots[part], rows[part], payloads) != [RowStatus.OK] * 3:
                failures.append(f"write of {worker}")
            if not all(holds(tier, slots[: first + 3], rows[: first + 3]) for _ in range(4)):
                failures.append(f"read of {worker}")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.stats().written_bytes == 24 * tier.row_bytes
