"""Equal payloads are kept once, and every name reads its own bytes: under release in any order, eviction, damage,
restart, and a tier that is full."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.faulty_tier import FaultKind, FaultyTier, Seeded
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows, soiled_buffers
from kvtier.testing.shared_memory_tier import SharedMemoryTier
from kvtier.tiers.dedup import DedupTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.open import Site, open_lower_tiers
from kvtier.tiers.protocol import RowId, RowStatus, Slots, Tier

ROW = 64


def payload(n: int) -> memoryview:
    return memoryview(bytearray(random.Random(n).randbytes(ROW)))


def put(tier: Tier, rows: list[RowId], payloads: list[int]) -> Slots:
    slots = tier.reserve(len(rows))
    assert slots is not None
    assert tier.write(slots, rows, [payload(n) for n in payloads]) == [RowStatus.OK] * len(rows)
    return slots


def get(tier: Tier, slots: Slots, rows: list[RowId], payloads: list[int]) -> None:
    into = soiled_buffers(len(rows), ROW)
    assert tier.read(slots, rows, into) == [RowStatus.OK] * len(rows)
    assert into == [payload(n) for n in payloads]


def test_equal_payloads_are_kept_once_also_within_one_call() -> None:
    inner = MemoryTier(ROW, 8)
    tier = DedupTier(inner, names_per_row=3)
    rows, others = chain_rows(4), chain_rows(4, seed=1)
    slots = put(tier, rows, [1, 2, 1, 1])
    again = put(tier, others, [2, 3, 3, 1])
    assert len(inner.published) == 3
    assert tier.stats().dedup_ratio == pytest.approx(8 / 3)
    get(tier, slots, rows, [1, 2, 1, 1])
    get(tier, again, others, [2, 3, 3, 1])
    assert tier.reserve(0) is not None
    assert inner.stats().used_rows == 3, "rows that were not needed went back"


def test_bytes_go_with_their_last_name_in_whatever_order_names_go() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        inner = MemoryTier(ROW, 8)
        tier = DedupTier(inner)
        rows = chain_rows(3)
        slots = put(tier, rows, [7, 7, 7])
        for at, which in enumerate(order):
            tier.release(slots[which : which + 1])
            left = order[at + 1 :]
            get(tier, slots[left], [rows[i] for i in left], [7] * len(left))
            assert tier.read(slots[[which]], [rows[which]], soiled_buffers(1, ROW)) == [RowStatus.FOREIGN]
        assert not inner.published
        assert inner.stats().used_rows == 0
        assert tier.stats().used_rows == 0
        get(tier, put(tier, rows[:1], [7]), rows[:1], [7])


def test_more_names_than_rows_and_no_promise_beyond_the_rows() -> None:
    inner = MemoryTier(ROW, 4)
    tier = DedupTier(inner, names_per_row=3)
    rows = chain_rows(12)
    kept = [put(tier, rows[i : i + 3], [5, 5, 5]) for i in (0, 3, 6)]
    stats = tier.stats()
    assert (stats.capacity_rows, stats.capacity_rows - stats.used_rows) == (12, 3)
    assert tier.reserve(4) is None, "there is room for three rows that are not equal"
    for slots, i in zip(kept, (0, 3, 6), strict=True):
        get(tier, slots, rows[i : i + 3], [5, 5, 5])
    assert inner.stats().medium_bytes <= inner.stats().cap_bytes


def test_a_damaged_row_is_shared_no_further() -> None:
    inner = MemoryTier(ROW, 8)
    tier = DedupTier(inner)
    rows = chain_rows(3)
    slots = put(tier, rows[:1], [1])
    ((held, (name, _)),) = inner.published.items()
    inner.published[held] = (name._replace(group=9), b"\0" * ROW)  # its medium holds another row now
    assert tier.read(slots, rows[:1], soiled_buffers(1, ROW)) == [RowStatus.FOREIGN]
    again = put(tier, rows[1:2], [1])
    get(tier, again, rows[1:2], [1])
    assert len(inner.published) == 2


def test_a_write_that_fails_shares_nothing() -> None:
    inner = MemoryTier(ROW, 8)
    tier = DedupTier(FaultyTier(inner, Seeded(3, 1.0, (FaultKind.EIO,))))
    rows = chain_rows(3)
    slots = tier.reserve(3)
    assert slots is not None
    assert RowStatus.OK not in tier.write(slots, rows, [payload(1)] * 3)
    assert tier.read(slots, rows, soiled_buffers(3, ROW)) == [RowStatus.FOREIGN] * 3
    tier.release(slots)
    assert inner.stats().used_rows == 0
    assert tier.stats().dedup_ratio == 1.0


def test_after_a_restart_first_names_are_found_and_the_others_are_misses(tmp_path: Path) -> None:
    def reopened() -> DedupTier:
        return DedupTier(NvmeTier(str(tmp_path), b"\7" * 32, "layout", ROW, 1 << 20), names_per_row=2)

    tier = reopened()
    rows, others = chain_rows(3), chain_rows(3, seed=1)
    put(tier, rows, [1, 2, 3])
    put(tier, others, [1, 2, 9])
    tier.close()
    after = reopened()
    found = after.recover()
    assert sorted(row for _, row in found) == sorted([*rows, others[2]])
    expected = dict(zip([*rows, others[2]], [1, 2, 3, 9], strict=True))
    for slot, row in found:
        get(after, np.array([slot], np.int32), [row], [expected[row]])
    get(after, put(after, others[:1], [1]), others[:1], [1])
    after.release(np.array([slot for slot, _ in found], np.int32))
    assert after.inner.stats().used_rows == 1
    after.close()


def test_random_lives_agree_with_a_tier_that_shares_nothing() -> None:
    draw = random.Random(5)
    inner = MemoryTier(ROW, 12)
    tier = DedupTier(inner, names_per_row=4)
    held: dict[int, tuple[RowId, int]] = {}
    for step in range(600):
        if draw.random() < 0.6:
            rows, payloads = chain_rows(draw.randint(1, 4), seed=step), draw.choices(range(16), k=4)
            slots = tier.reserve(len(rows))
            if slots is not None:
                payloads = payloads[: len(rows)]
                assert set(tier.write(slots, rows, [payload(n) for n in payloads])) == {RowStatus.OK}
                held.update(zip(slots.tolist(), zip(rows, payloads, strict=True), strict=True))
        elif held:
            gone = draw.sample(sorted(held), min(len(held), draw.randint(1, 6)))
            tier.release(np.array(gone, np.int32))
            for slot in gone:
                del held[slot]
        for slot, (row, n) in held.items():
            get(tier, np.array([slot], np.int32), [row], [n])
        assert len(inner.published) == len({n for _, n in held.values()})
        inner.check_integrity()
    assert tier.reserve(0) is not None
    assert inner.stats().used_rows == len(inner.published)


def test_threads_that_write_the_same_bytes_at_once_lose_nothing() -> None:
    inner = MemoryTier(ROW, 80)
    tier = DedupTier(inner)
    shares = [(tier.reserve(10), chain_rows(10, seed=worker)) for worker in range(8)]
    start = threading.Barrier(8)
    failed: list[int] = []

    def work(worker: int) -> None:
        slots, rows = shares[worker]
        assert slots is not None
        start.wait()
        statuses = [tier.write(slots[i : i + 1], rows[i : i + 1], [payload(i)]) for i in range(10)]
        if statuses != [[RowStatus.OK]] * 10:
            failed.append(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for slots, rows in shares:
        assert slots is not None
        get(tier, slots, rows, list(range(10)))
        tier.release(slots)
    assert inner.stats().used_rows == 0


def test_tiers_that_others_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="other processes share"):
        DedupTier(SharedMemoryTier(ROW, 4))
    with pytest.raises(ConfigError, match="between 1 and 64"):
        DedupTier(MemoryTier(ROW, 4), names_per_row=0.5)


def test_an_engine_over_it_gets_its_bytes_and_the_ratio_is_a_metric(tmp_path: Path) -> None:
    config = CacheConfig(
        dram_bytes=1, policy="lru", gate=False, nvme_path=str(tmp_path), nvme_bytes=1 << 20, dedup={"nvme": 2.0}
    )
    (tier,) = open_lower_tiers(Site(config, b"\1" * 32, "layout", ROW)).tiers
    assert isinstance(tier, DedupTier)
    memory = DramTier.over(np.zeros(8 * ROW, np.uint8), ROW, 8, ROW, checksums=False)
    engine = FakeEngine(TierCache(config, Geometry(16), memory, memory.row, [tier], VirtualClock()))
    for prompt in range(6):
        engine.serve(range(prompt * 10, prompt * 10 + 6))
        engine.settle()
    assert engine.serve(range(6)) == 6, "from nvme, byte for byte"
    engine.cache.gauges()
    assert engine.cache.recorder.drain()[0]["kvtier_dedup_ratio", ("nvme",)] == 1.0
    engine.cache.check_integrity()
    engine.cache.close()
