"""Tiers that come and go while an engine runs: what is under way ends, what they hold is found again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier.cache import recovery
from kvtier.cache.geometry import Geometry
from kvtier.cache.lease import Lease
from kvtier.cache.storage_cache import StorageCache
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, content_of, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.shared_memory_tier import SharedMemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, Tier, TierProbe

ROW, SPACE = 4096, b"s" * 32
CONFIG = CacheConfig(dram_bytes=1, policy="lru", io_threads=2)


class Gated(MemoryTier):
    """Its writes wait for the gate."""

    def __init__(self, name: str = "slow") -> None:
        super().__init__(ROW, 64, name=name)
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        self.writing.set()
        self.gate.wait(20)
        return super().write(slots, rows, sources)

    def probe(self) -> TierProbe:
        return TierProbe(0.01, 1e8, 0.01, 1e8)


def engine_over(*tiers: Tier) -> FakeEngine:
    memory = DramTier.over(np.zeros(16 * ROW, np.uint8), ROW, 16, ROW, checksums=False)
    return FakeEngine(TierCache(CONFIG, Geometry(16), memory, memory.row, tiers, VirtualClock()))


def nvme(folder: Path) -> NvmeTier:
    return NvmeTier(str(folder), SPACE, "layout", ROW, 256 * ROW, direct=False)


def forget_memory(engine: FakeEngine) -> None:
    engine.settle()
    engine.cache.memory.clear()
    engine.cache.epoch += 1


def test_a_tier_taken_out_and_in_again_still_has_everything(tmp_path: Path) -> None:
    engine = engine_over(nvme(tmp_path))
    engine.serve(range(8))
    forget_memory(engine)
    assert engine.cache.detach("nvme")
    assert engine.serve(range(8)) == 0, "gone with its tier"
    forget_memory(engine)
    assert engine.cache.attach(nvme(tmp_path)) == 8
    assert engine.serve(range(8)) == 8
    engine.cache.check_integrity()
    assert engine.cache.leases() == 0
    engine.cache.close()


def test_tiers_stand_in_the_order_of_what_they_cost(tmp_path: Path) -> None:
    fast, slow = MemoryTier(ROW, 8, name="fast"), Gated()
    engine = engine_over(slow, fast)
    assert [level.name for level in engine.cache.lower] == ["fast", "slow"]
    engine.cache.detach("fast")
    engine.cache.attach(MemoryTier(ROW, 8, name="other"))
    assert [level.name for level in engine.cache.lower] == ["other", "slow"]
    engine.cache.close()
    storage = StorageCache(CONFIG, Geometry(16), [Gated(), MemoryTier(ROW, 8, name="fast")])
    assert [level.name for level in storage.levels] == ["fast", "slow"]
    storage.close()


def test_what_memory_holds_whole_stays_when_a_tier_goes() -> None:
    engine = engine_over(MemoryTier(ROW, 64, name="nvme"))
    for tail in (10, 20, 30):
        engine.serve([1, 2, tail, tail + 1])
        engine.settle()
    assert engine.cache.detach("nvme")
    assert engine.cache.memory.residency.resident_rows == 8
    assert engine.serve([1, 2, 20, 21]) == 4
    engine.cache.close()


def test_memory_lets_go_of_what_only_the_tier_that_goes_led_to() -> None:
    """Memory holds the end of the shared part, and a branch; the beginning is in the tier below only."""
    engine = engine_over(MemoryTier(ROW, 64, name="nvme"))
    for tail in (10, 20):
        engine.serve([1, 2, 3, 4, tail])
        engine.settle()
    cache = engine.cache
    head = cache.tree.walk(token_chain([1, 2, 3, 4])).path[0]
    for branch in list(head.children.values()):
        cache.memory.evict(branch, 0, "policy")
    cache.memory.evict(head, 0, "policy")
    cache.epoch += 1
    slots = cache.memory.make_room(1)
    assert slots is not None
    chain = token_chain([1, 2, 3, 4, 10])
    cache.levels.publish_in_memory(chain, 0, np.array([4]), slots, 0)
    assert cache.memory.residency.resident_rows == 1
    assert cache.detach("nvme")
    assert cache.memory.residency.resident_rows == 0
    cache.close()


def test_a_reset_reaches_tiers_that_were_out(tmp_path: Path) -> None:
    """Weights may have been exchanged in place: what was computed before must not come back with its tier."""
    engine = engine_over(nvme(tmp_path))
    engine.serve(range(8))
    engine.settle()
    assert engine.cache.detach("nvme")
    engine.cache.reset()
    assert engine.cache.attach(nvme(tmp_path)) == 0
    assert engine.serve(range(8)) == 0
    forget_memory(engine)
    assert engine.cache.detach("nvme")
    assert engine.cache.attach(nvme(tmp_path)) == 8, "what was computed after it may"
    assert engine.serve(range(8)) == 8
    engine.cache.close()


def test_a_reset_reaches_a_tier_that_is_leaving_and_shared_ones_that_were_out() -> None:
    slow, medium = Gated(), dict[tuple[bytes, int], bytes]()
    shared = SharedMemoryTier(ROW, 64, medium=medium)
    engine = engine_over(slow, shared)
    slow.gate.clear()
    engine.serve(range(4))
    assert slow.writing.wait(10)
    assert not engine.cache.detach("slow", wait_s=0.0)
    while shared.stats().used_rows < 4 or not medium:
        engine.cache.poll()
    assert engine.cache.detach(shared.name)
    engine.cache.reset()
    slow.gate.set()
    while engine.cache.levels.leaving:
        engine.settle()
    assert slow.stats().used_rows == 0
    engine.cache.attach(SharedMemoryTier(ROW, 64, medium=medium))
    assert engine.serve(range(4)) == 0
    engine.cache.close()


def test_a_tier_that_hangs_leaves_when_it_lets_go() -> None:
    tier = Gated()
    engine = engine_over(tier)
    tier.gate.clear()
    request = engine.open(range(4), 1)
    engine.cache.commit_store(request, engine.compute(request))
    assert tier.writing.wait(10)
    assert not engine.cache.detach("slow", wait_s=0.05)
    with pytest.raises(ConfigError, match="still ending"):
        engine.cache.attach(Gated())
    assert engine.serve([7, 8]) == 0, "the engine goes on"
    tier.gate.set()
    while engine.cache.levels.leaving:
        engine.settle()
    engine.finish(request)
    assert engine.cache.leases() == 0
    assert engine.cache.attach(Gated("slow")) == 0
    engine.cache.close()


@pytest.mark.keeps_leases  # what looks after leases keeps every level
@pytest.mark.parametrize("options", [{}, {"write_admission": "value"}, {"look_ahead": "speculation"}])
def test_nothing_of_a_tier_that_has_gone_is_kept(options: dict[str, str], tmp_path: Path) -> None:
    memory = DramTier.over(np.zeros(16 * ROW, np.uint8), ROW, 16, ROW, checksums=False)
    config, clock = msgspec.structs.replace(CONFIG, **options), VirtualClock()
    engine = FakeEngine(TierCache(config, Geometry(16), memory, memory.row, [nvme(tmp_path)], clock))
    listeners = set[int]()
    for _ in range(3):
        engine.serve(range(8))
        forget_memory(engine)
        clock.advance(5.0)
        engine.settle()
        listeners.add(len(engine.cache.tree.listeners))
        gone = weakref.ref(engine.cache.lower[0])
        assert engine.cache.detach("nvme")
        gc.collect()
        assert gone() is None
        engine.cache.attach(nvme(tmp_path))
    assert len(listeners) == 1
    engine.cache.close()


@pytest.mark.keeps_leases
def test_a_storage_cache_keeps_nothing_of_a_tier_that_has_gone() -> None:
    cache, keys = StorageCache(CONFIG, Geometry(16), [MemoryTier(ROW, 8, name="fast")]), token_chain(range(6))
    assert all(cache.store(keys, [[memoryview(bytearray(ROW))] for _ in range(6)]))
    gone = weakref.ref(cache.levels[0])
    assert cache.detach("fast")
    gc.collect()
    assert gone() is None
    cache.close()


def test_requests_that_wait_for_a_tier_that_goes_compute(tmp_path: Path) -> None:
    engine = engine_over(nvme(tmp_path))
    engine.serve(range(8))
    forget_memory(engine)
    request = engine.open(range(8), 1)
    engine.cache.lookup(request, 0)
    assert engine.cache.detach("nvme")
    loaded = engine.lookup(request)
    assert loaded is not None
    assert engine.load(request) == loaded
    engine.cache.end_load(request)
    engine.finish(request)
    assert engine.cache.leases() == 0
    engine.cache.check_integrity()
    engine.cache.close()


def test_a_name_that_is_not_there_says_what_is() -> None:
    engine = engine_over(MemoryTier(ROW, 8, name="fast"))
    with pytest.raises(ConfigError, match="there are: fast"):
        engine.cache.detach("nvme")
    with pytest.raises(ConfigError, match="detach it first"):
        engine.cache.attach(MemoryTier(ROW, 8, name="fast"))
    engine.cache.close()


def test_the_storage_cache_takes_tiers_out_and_in(tmp_path: Path) -> None:
    cache = StorageCache(CONFIG, Geometry(16), [nvme(tmp_path)])
    keys = token_chain(range(6))
    pages = [[memoryview(bytearray(content_of(keys[i * 32 : i * 32 + 32], 0, ROW)))] for i in range(6)]
    assert all(cache.store(keys, pages))
    assert cache.find(keys) == 6
    assert cache.detach("nvme"), "a promise is no reason to stay"
    assert cache.find(keys) == 0
    assert cache.attach(nvme(tmp_path)) == 6
    assert cache.find(keys) == 6
    targets = [[memoryview(bytearray(ROW))] for _ in range(6)]
    assert all(cache.load(keys, targets))
    assert targets == pages
    assert cache.leases() == 0
    assert cache.detach("nvme")
    cache.clear()
    assert cache.attach(nvme(tmp_path)) == 0, "it was out when everything was forgotten"
    assert cache.find(keys) == 0
    cache.check_integrity()
    cache.close()


class Brings(MemoryTier):
    """A tier that was found with rows in it: `prompts` prompts of `blocks` blocks."""

    def __init__(self, prompts: int, blocks: int, free: int = 0) -> None:
        super().__init__(ROW, prompts * blocks + free, name="brings")
        chains = [token_chain(range(1000 * p, 1000 * p + blocks)) for p in range(prompts)]
        rows = [
            RowId(chain[32 * i : 32 * i + 32], chain[32 * i - 32 : 32 * i] if i else b"", 0)
            for chain in chains
            for i in range(blocks)
        ]
        slots = self.reserve(len(rows))
        assert slots is not None
        contents = [memoryview(bytearray(content_of(row.key, 0, ROW))) for row in rows]
        assert self.write(slots, rows, contents) == [RowStatus.OK] * len(rows)
        self.found = [RecoveredRow(slot, row) for slot, row in zip(slots.tolist(), rows, strict=True)]

    def recover(self) -> list[RecoveredRow]:
        return self.found


class Turns:
    """A cache's lock; each time it is let go, `between` is called with how often it was before."""

    def __init__(self, lock: Any, between: Callable[[int], None]) -> None:
        self._lock = lock
        self._between = between
        self._turns = 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        turn, self._turns = self._turns, self._turns + 1
        self._between(turn)


def in_turns(engine: FakeEngine, tier: Tier, between: Callable[[int], None]) -> int:
    """Attach a tier and do something each time the cache's lock is let go; returns the rows it brought."""
    lock = engine.cache.lock
    engine.cache.lock = Turns(lock, between)  # type: ignore[assignment]
    try:
        return engine.cache.attach(tier)
    finally:
        engine.cache.lock = lock


def test_a_large_tier_is_taken_in_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_ROWS_A_TURN", 16)
    engine, visible = engine_over(), list[int]()

    def serve(turn: int) -> None:
        visible.append(engine.cache.lower[0].residency.resident_rows if engine.cache.lower else 0)
        assert engine.serve([7, 8, turn]) in (0, 2), "the engine goes on"

    assert in_turns(engine, Brings(20, 8, free=100), serve) == 160
    grown = np.diff(visible)
    assert len(visible) >= 10
    assert (grown <= 16 + 8 + 3).all(), "a turn is short"
    forget_memory(engine)
    assert engine.serve(range(3000, 3008)) == 8
    engine.cache.check_integrity()
    engine.cache.close()


def test_leaves_of_a_long_prompt_they_share_are_few_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_ROWS_A_TURN", 16)
    engine, tier, turns = engine_over(), Brings(1, 640, free=40), list[int]()
    leaves = [RowId(token_chain([leaf])[:32], tier.found[-1].row.key, 0) for leaf in range(90_000, 90_040)]
    slots = tier.reserve(40)
    assert slots is not None
    tier.found += [RecoveredRow(slot, row) for slot, row in zip(slots.tolist(), leaves, strict=True)]
    assert in_turns(engine, tier, turns.append) == 680
    assert len(turns) > 20, "a leaf costs as much as ten rows: a walk of 641 blocks"
    engine.cache.check_integrity()
    engine.cache.close()


def test_what_a_tier_brings_is_sorted_while_nobody_waits() -> None:
    engine, storage, tier = engine_over(), StorageCache(CONFIG, Geometry(16), []), Brings(20, 8)

    class Rows(list[RecoveredRow]):
        def __iter__(self) -> Iterator[RecoveredRow]:
            assert not storage._lock.locked()
            assert not engine.cache.lock._is_owned()  # type: ignore[attr-defined]
            return super().__iter__()

    tier.found = Rows(tier.found)
    assert engine.cache.attach(tier) == 160
    assert engine.cache.detach("brings")
    tier = Brings(20, 8)
    tier.found = Rows(tier.found)
    assert storage.attach(tier) == 160
    engine.cache.close()
    storage.close()


def test_a_reset_in_the_middle_reaches_what_is_not_visible_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_ROWS_A_TURN", 16)
    engine, tier = engine_over(), Brings(20, 8)
    brought = in_turns(engine, tier, lambda turn: engine.cache.reset() if turn == 3 else None)
    assert brought == 48
    assert engine.cache.lower[0].residency.resident_rows == tier.stats().used_rows == 0
    assert engine.serve(range(8)) == 0
    engine.cache.close()


def test_a_tier_may_leave_while_it_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_ROWS_A_TURN", 16)
    engine, tier = engine_over(), Brings(20, 8)
    in_turns(engine, tier, lambda turn: engine.cache.detach("brings") and None if turn == 3 else None)
    assert engine.cache.lower == []
    assert tier.stats().used_rows == 160, "what it holds is still there"
    assert engine.serve(range(8)) == 0
    engine.cache.check_integrity()
    engine.cache.close()


def test_a_tier_that_leaves_the_storage_cache_while_it_is_taken_in_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_ROWS_A_TURN", 16)
    cache, tier, loads = StorageCache(CONFIG, Geometry(16), []), Brings(20, 8), list[Lease]()
    lock, keys = cache._lock, token_chain(range(19000, 19008))

    def leave(turn: int) -> None:
        if turn == 3:
            with lock:
                level = cache.levels[0]
                promised = level.residency.slots_of(cache.tree.walk(keys)).ravel()
                loads.append(level.book.take(promised, "a load under way"))
            assert not cache.detach("brings", wait_s=0.0), "it has not left when the next turn is due"

    cache._lock = Turns(lock, leave)  # type: ignore[assignment]
    brought = cache.attach(tier)
    cache._lock = lock
    loads[0].release()
    assert 0 < brought < 160
    assert tier.stats().used_rows == 160, "what it holds is still there"
    assert cache.drain()[0]["kvtier_recovered_rows", ("brings",)] == brought
    cache.close()


def test_a_store_takes_the_room_of_what_is_not_visible_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_ROWS_A_TURN", 16)
    engine, tier = engine_over(), Brings(20, 8)

    def store(turn: int) -> None:
        if turn == 3:
            engine.serve(range(500, 512))
            engine.settle()

    assert in_turns(engine, tier, store) == 148
    level = engine.cache.lower[0]
    assert level.residency.resident_rows == tier.stats().used_rows == 160
    forget_memory(engine)
    assert engine.serve(range(500, 512)) == 12
    engine.cache.check_integrity()
    engine.cache.close()
