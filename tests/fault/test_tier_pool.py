"""The pool when things go wrong: peers that die or stop, a master that forgets, no room, damage, and slow answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.codec.checksum import checksum64
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError, TierIOError
from kvtier.testing.rows import chain_rows, payload_of, read_back, soiled_buffers, store_rows
from kvtier.tiers.addresses import address_of
from kvtier.tiers.objects import ObjectSeal
from kvtier.tiers.open import Site, open_lower_tiers
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import MooncakeClient, PoolOptions
from kvtier.tiers.protocol import RowId, RowStatus
from tests.pool_rig import MIB, Pool, needs_mooncake, running_pool

pytestmark = needs_mooncake
ROW = 100_000
SPACE = b"\3" * 32


def join(pool: Pool, space: bytes = SPACE, **options: int) -> PoolTier:
    return PoolTier(PoolOptions(master=pool.address, host="127.0.0.1", **options), space, "layout", ROW, handles=4096)


def adopt(tier: PoolTier, rows: list[RowId]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    slots = tier.reserve(len(rows))
    assert slots is not None
    tier.adopt(slots, rows)
    return slots


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with running_pool() as running:
        yield running


def test_what_one_client_puts_another_finds_and_reads(pool: Pool) -> None:
    first, second = join(pool), join(pool)
    rows = chain_rows(12)
    store_rows(first, rows)
    assert second.exists([*rows, *chain_rows(1, seed="none")]) == [True] * 12 + [False]
    assert read_back(second, adopt(second, rows), rows) == [RowStatus.OK] * 12
    other = join(pool, space=b"\4" * 32)
    assert other.exists(rows) == [False] * 12, "another key space has other names"
    for tier in (first, second, other):
        tier.close()


@pytest.mark.parametrize("row_bytes", [1, 5_000, 256 << 10, (256 << 10) + 1, 3 << 20])
def test_rows_of_every_size_travel_with_their_headers(pool: Pool, row_bytes: int) -> None:
    """Small ones beside them, large ones from and to where they are."""
    options = PoolOptions(master=pool.address, host="127.0.0.1")
    first, second = (PoolTier(options, SPACE, f"layout {row_bytes}", row_bytes, handles=64) for _ in range(2))
    rows = chain_rows(4, seed=row_bytes)
    store_rows(first, rows)
    assert read_back(second, adopt(second, rows), rows) == [RowStatus.OK] * 4
    first.close()
    second.close()


@pytest.mark.parametrize("row_bytes", [5_000, 300_000])
def test_one_row_read_several_times_in_one_call_arrives_each_time(pool: Pool, row_bytes: int) -> None:
    """Mooncake fills one of the buffers and says that it filled all of them."""
    tier = PoolTier(
        PoolOptions(master=pool.address, host="127.0.0.1"), SPACE, f"layout {row_bytes}", row_bytes, handles=64
    )
    one, two = chain_rows(2, seed="twice")
    store_rows(tier, [one, two])
    rows = [one, two, one, one, two]
    slots = adopt(tier, rows)
    targets = soiled_buffers(5, row_bytes)
    assert tier.read(slots, rows, targets) == [RowStatus.OK] * 5
    assert [bytes(target) for target in targets] == [bytes(payload_of(row, row_bytes)) for row in rows]
    tier.close()


def test_damaged_and_foreign_objects_are_misses_and_leave_the_pool(pool: Pool) -> None:
    tier, seal = join(pool), ObjectSeal(SPACE, "layout", ROW)
    rows = chain_rows(3, seed="damage")
    good = payload_of(rows[0], ROW)
    flipped = bytearray(good)
    flipped[ROW // 2] ^= 4

    def put(row: RowId, payload: bytes, header: bytes) -> None:
        whole = np.frombuffer(bytes(payload) + header, np.uint8).copy()
        assert tier._client.put([seal.name(row)], [[address_of(whole)]], [[len(whole)]]) == [0]

    put(rows[0], flipped, seal.pack(rows[0], checksum64(good)))
    put(rows[1], good, bytes(128))
    put(rows[2], good, seal.pack(rows[1], checksum64(good)))
    slots = adopt(tier, rows)
    statuses = tier.read(slots, rows, soiled_buffers(3, ROW))
    assert statuses == [RowStatus.CORRUPT, RowStatus.CORRUPT, RowStatus.FOREIGN]
    assert tier.exists(rows) == [False] * 3
    assert tier.read(slots, rows, soiled_buffers(3, ROW)) == [RowStatus.VANISHED] * 3
    assert tier.stats().faults == {"corrupt": 2, "foreign": 1, "vanished": 3}
    store_rows(tier, rows)
    tier.close()


def test_fewer_copies_than_asked_for_are_reported(pool: Pool) -> None:
    tier = join(pool, replicas=3)
    store_rows(tier, chain_rows(5, seed="copies"))
    assert tier.stats().faults == {"replica_shortfall": 5}
    tier.close()


def test_a_full_pool_refuses_or_evicts_and_nothing_wrong_is_read() -> None:
    with running_pool(1, 16 * MIB) as pool:
        tier = join(pool)
        wrong, statuses, kept = 0, set(), []
        for seed in range(40):
            rows = chain_rows(10, seed=seed)
            slots = tier.reserve(10)
            assert slots is not None
            answers = tier.write(slots, rows, [payload_of(row, ROW) for row in rows])
            statuses |= set(answers)
            ok = [i for i, answer in enumerate(answers) if answer is RowStatus.OK]
            kept.append((slots[ok], [rows[i] for i in ok]))
        assert statuses <= {RowStatus.OK, RowStatus.FULL}
        assert RowStatus.FULL in statuses, "40 MB do not fit 16 MiB while they are leased"
        for slots, rows in kept:
            found = read_back(tier, slots, rows)
            wrong += sum(status not in (RowStatus.OK, RowStatus.VANISHED) for status in found)
        assert wrong == 0
        assert tier.stats().faults["full"] > 0
        tier.close()


def test_an_owner_that_is_killed_takes_its_rows_along_and_nothing_else() -> None:
    with running_pool(2) as pool:
        tier = join(pool)
        rows = chain_rows(40, seed="kill")
        slots = store_rows(tier, rows)
        pool.processes[1].kill()
        pool.processes[1].wait()
        began = time.monotonic()
        statuses = read_back(tier, slots, rows)
        assert time.monotonic() - began < 20
        assert RowStatus.OK in statuses
        assert set(statuses) <= {RowStatus.OK, RowStatus.IO_ERROR, RowStatus.VANISHED}
        lost = [row for row, status in zip(rows, statuses, strict=True) if status is not RowStatus.OK]
        assert lost, "both owners held rows"
        deadline = time.monotonic() + 30
        while any(tier.exists(lost)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not any(tier.exists(lost)), "the master has noticed"
        tier.release(slots)
        again = store_rows(tier, rows)
        assert read_back(tier, again, rows) == [RowStatus.OK] * 40, "they are put again where there is room"
        tier.close()


def test_an_owner_that_is_stopped_costs_a_bounded_time() -> None:
    with running_pool(1) as pool:
        tier = join(pool)
        rows = chain_rows(3, seed="stop")
        slots = store_rows(tier, rows)
        pool.stop(pool.processes[1])
        began = time.monotonic()
        assert set(tier.read(slots, rows, soiled_buffers(3, ROW))) <= {RowStatus.IO_ERROR, RowStatus.VANISHED}
        assert time.monotonic() - began < 30
        pool.processes[1].send_signal(signal.SIGCONT)
        tier.close()


def test_a_master_that_is_killed_is_an_io_error_and_its_successor_is_found_empty() -> None:
    with running_pool(1) as pool:
        tier = join(pool)
        rows = chain_rows(3, seed="master")
        slots = store_rows(tier, rows)
        pool.master.kill()
        pool.master.wait()
        assert tier.read(slots, rows, soiled_buffers(3, ROW)) == [RowStatus.IO_ERROR] * 3
        with pytest.raises(TierIOError, match="does not answer"):
            tier.exists(rows)
        more = tier.reserve(1)
        assert more is not None
        (row,) = chain_rows(1, seed="more")
        assert tier.write(more, [row], [payload_of(row, ROW)]) == [RowStatus.IO_ERROR]
        pool.start_master()
        deadline = time.monotonic() + 40
        statuses: list[RowStatus] = []
        while time.monotonic() < deadline:
            statuses = tier.write(more, [row], [payload_of(row, ROW)])
            if statuses == [RowStatus.OK]:
                break
            time.sleep(1.0)
        assert statuses == [RowStatus.OK], "the client has found the new master by itself, and the owner too"
        assert tier.read(slots, rows, soiled_buffers(3, ROW)) == [RowStatus.VANISHED] * 3
        tier.close()


def test_a_pool_that_is_down_costs_the_engine_its_tier_and_no_more_than_five_seconds() -> None:
    with running_pool(0) as pool:
        pool.master.kill()
        pool.master.wait()
        address = pool.address
    began = time.monotonic()
    config = CacheConfig(pool_master=address)
    opened = open_lower_tiers(Site(config, SPACE, "layout", ROW))
    assert time.monotonic() - began < 5
    assert opened.tiers == []
    assert "does not answer" in opened.missing["pool"]


def test_a_master_that_is_stopped_costs_the_engine_its_tier_and_no_more_than_five_seconds() -> None:
    with running_pool(0) as pool:
        pool.stop(pool.master)
        began = time.monotonic()
        opened = open_lower_tiers(Site(CacheConfig(pool_master=pool.address), SPACE, "layout", ROW))
        assert time.monotonic() - began < 5
        assert list(opened.missing) == ["pool"]


def test_wrong_options_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        PoolTier(PoolOptions(master="somewhere"), SPACE, "layout", ROW)
    with pytest.raises(ConfigError, match="pool_protocol is 'ib'"):
        PoolTier(PoolOptions(master="h:1", protocol="ib"), SPACE, "layout", ROW)
    with pytest.raises(ConfigError, match="pool_replicas is 0"):
        PoolTier(PoolOptions(master="h:1", replicas=0), SPACE, "layout", ROW)


class StagedOnly(MooncakeClient):
    """A client as over RDMA: memory must be registered before it is used."""

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self.ranges: list[tuple[int, int]] = []

    def register(self, address: int, n_bytes: int) -> bool:
        self.ranges.append((address, address + n_bytes))
        return super().register(address, n_bytes)

    def put(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        self._check(pointers, sizes)
        return super().put(names, pointers, sizes)

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        self._check(pointers, sizes)
        return super().get(names, pointers, sizes)

    def _check(self, pointers: list[list[int]], sizes: list[list[int]]) -> None:
        for row, lengths in zip(pointers, sizes, strict=True):
            for pointer, length in zip(row, lengths, strict=True):
                assert any(a <= pointer and pointer + length <= b for a, b in self.ranges), "not registered"


def test_where_memory_must_be_registered_all_that_moves_is(pool: Pool) -> None:
    """What RDMA asks of us, over TCP: rows of the slab go as they are, others through registered memory."""
    made: list[StagedOnly] = []

    def connect(options: PoolOptions) -> StagedOnly:
        made.append(StagedOnly(PoolOptions(master=options.master, host=options.host)))
        return made[0]

    options = PoolOptions(master=pool.address, host="127.0.0.1", protocol="rdma")
    tier = PoolTier(options, os.urandom(32), "layout", ROW, handles=64, connect=connect)
    slab = memoryview(bytearray(8 * ROW))
    assert tier.register(slab)
    rows = chain_rows(8)
    inside = [slab[i * ROW : (i + 1) * ROW] for i in range(4)]
    for view, row in zip(inside, rows[:4], strict=True):
        view[:] = payload_of(row, ROW)
    slots = tier.reserve(8)
    assert slots is not None
    sources = [*inside, *(payload_of(row, ROW) for row in rows[4:])]
    assert tier.write(slots, rows, sources) == [RowStatus.OK] * 8
    assert read_back(tier, slots, rows) == [RowStatus.OK] * 8
    back = [slab[i * ROW : (i + 1) * ROW] for i in range(8)]
    assert tier.read(slots, rows, back) == [RowStatus.OK] * 8
    assert [bytes(view) for view in back] == [bytes(payload_of(row, ROW)) for row in rows]
    tier.close()
