"""Public reports that need a scene of their own: what went wrong there, played here. docs/reliability.md names them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.request import CachedRequest
from kvtier.cache.storage_cache import StorageCache
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.keys import key_at
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, content_of, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows, store_rows
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import RowId, RowStatus, Slots
from kvtier.tiers.shared_fs import SharedFsTier
from kvtier.tiers.shared_fs.filesystem import FileSystem

ROW = 64


class Suspicious(MemoryTier):
    """Compares what it is given with what the model would compute, at the moment it is given it."""

    wrong = 0

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        self.wrong += sum(bytes(s) != content_of(r.key, r.group, ROW) for r, s in zip(rows, sources, strict=True))
        return super().write(slots, rows, sources)


def engine_over(lower: MemoryTier, memory_rows: int, geometry: Geometry | None = None, **config: object) -> FakeEngine:
    memory = DramTier.over(np.zeros(memory_rows * ROW, np.uint8), ROW, memory_rows, ROW, checksums=False)
    settings = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, **config)  # type: ignore[arg-type]
    return FakeEngine(TierCache(settings, geometry or Geometry(16), memory, memory.row, [lower], VirtualClock()))


def test_nothing_is_carried_before_the_engine_says_it_is_written() -> None:
    """vllm#45704: the copy began while the device still wrote. 60 lives of requests whose rows are written piece by
    piece, with everything else going on between the pieces."""
    carried = 0
    for seed in range(60):
        draw, lower = random.Random(seed), Suspicious(ROW, 256, name="nvme")
        engine = engine_over(lower, 40)
        cache = engine.cache
        writing: list[tuple[CachedRequest, list[tuple[RowRef, int]]]] = []
        for step in range(25):
            if draw.random() < 0.5:
                request = engine.open([draw.randrange(3), *range(100 * step, 100 * step + draw.randint(1, 6))], 1)
                granted = cache.offer_store(request, [RowRef(block, 0) for block in range(request.blocks)])
                for _, slot in granted:
                    cache.memory_row(slot)[:] = draw.randbytes(ROW)  # the device has begun
                writing.append((request, granted))
            if writing and draw.random() < 0.5:
                request, granted = writing.pop(draw.randrange(len(writing)))
                for row, slot in granted:
                    cache.memory_row(slot)[:] = content_of(key_at(request.chain, row.block), row.group, ROW)
                    if draw.random() < 0.3:
                        cache.poll()
                cache.commit_store(request, [row for row, _ in granted])
                engine.finish(request)
            if draw.random() < 0.3:
                cache.mover.drain(1.0)
            cache.poll()
        for request, _ in writing:
            cache.storer.abort(request)  # the engine gave up on them
            engine.finish(request)
        engine.settle()
        assert lower.wrong == 0, f"seed {seed}"
        carried += len(lower.published)
        assert cache.leases() == 0
        cache.close()
    assert carried > 900


def test_a_queue_served_first_come_first_served_moves_under_pressure() -> None:
    """vllm#45387: nothing ran and everybody waited, because the first in the queue waited for blocks that those behind
    it kept out. Twelve long prompts from below through a memory that holds three of them; whoever is first stops the
    queue until it has its answer."""
    lower = MemoryTier(ROW, 400, name="nvme")
    engine = engine_over(lower, 24, load_deadline_s=0.5)
    prompts = [range(100 * i, 100 * i + 8) for i in range(12)]
    for prompt in prompts:
        engine.serve(prompt)
        engine.settle()
    engine.cache.memory.clear()
    engine.cache.epoch += 1
    clock = engine.cache.clock
    assert isinstance(clock, VirtualClock)
    waiting = [engine.open(prompt, 1) for prompt in prompts]
    running: list[tuple[CachedRequest, int]] = []
    loaded = steps = 0
    while (waiting or running) and steps < 200:
        steps += 1
        engine.cache.stepped()
        if len(running) == 3 or (running and not waiting):
            request, got = running.pop(0)
            engine.cache.commit_store(request, engine.compute(request, got))
            engine.finish(request)
        for request in list(waiting):
            if len(running) == 3 or engine.cache.lookup(request, 0) is None:
                break  # first come, first served
            waiting.remove(request)
            got = engine.load(request)
            engine.cache.end_load(request)
            engine.cache.started(request)
            loaded += got
            running.append((request, got))
        engine.cache.mover.drain(0.01)
        clock.advance(0.02)
    assert not waiting
    assert not running, f"no progress in {steps} steps"
    assert loaded >= 4 * 8, "and not by giving everything up"
    engine.settle()
    assert engine.cache.leases() == 0
    engine.cache.close()


HOPS = {"tier": 5e-6, "cache": 50e-6}
"""Seconds of CPU a row of 64 bytes may cost in all threads: in the tier alone, and through index, mover and tier."""


def test_a_put_stays_within_its_budget_hop_by_hop() -> None:
    """LMCache#1239: a put paid for every layer it went through. Rows too small for their bytes to count."""
    n = 256
    rows, tier = chain_rows(n), MemoryTier(ROW, 4 * n)
    payloads = [memoryview(bytes(ROW)) for _ in rows]
    cache = StorageCache(CacheConfig(dram_bytes=1, policy="lru"), Geometry(16), [MemoryTier(ROW, 20 * n)])
    spent: dict[str, list[float]] = {"tier": [], "cache": []}
    for attempt in range(5):
        slots = tier.reserve(n)
        assert slots is not None
        began = time.process_time()
        tier.write(slots, rows, payloads)
        spent["tier"].append((time.process_time() - began) / n)
        tier.release(slots)
        keys, pages = token_chain(range(1000 * attempt, 1000 * attempt + n)), [[memoryview(bytearray(ROW))]] * n
        began = time.process_time()
        assert all(cache.store(keys, pages))
        spent["cache"].append((time.process_time() - began) / n)
    cache.close()
    for hop, budget_s in HOPS.items():
        assert min(spent[hop]) < budget_s, f"{hop}: {min(spent[hop]) * 1e6:.0f} us a row"


def test_ten_million_rows_would_lie_in_folders_of_a_few_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#28654: 7.5 million files in one folder, and a listing of it for every look-up."""
    tier = SharedFsTier(str(tmp_path), b"\3" * 32, "layout", ROW, 64 << 20, direct=False)
    held = Counter(str(Path(tier._files.path(row)).parent) for row in chain_rows(100_000))
    assert len(held) == 4096
    assert max(held.values()) < 3 * 100_000 / 4096, "10,000,000 rows: at most 7,500 files in any folder"
    listing = FileSystem.listing

    def not_of_rows(self: FileSystem, path: str) -> object:
        assert "objects" not in Path(path).parts, "folders of rows are listed by the cleaner only"
        return listing(self, path)

    monkeypatch.setattr(FileSystem, "listing", not_of_rows)
    rows = chain_rows(50)
    slots = store_rows(tier, rows)
    assert tier.exists(rows) == [True] * 50
    assert tier.read(slots, rows, [memoryview(bytearray(ROW)) for _ in rows]) == [RowStatus.OK] * 50
    tier.close()


def test_without_reuse_nothing_is_read_and_a_request_costs_little() -> None:
    """LMCache#1938: twice the time to the first token where nothing is ever reused. What the engine's thread pays for a
    prompt of 4,096 tokens that nobody has seen, in CPU of its own; computing such a prompt takes any GPU 100 ms."""
    lower = MemoryTier(ROW, 2000, name="nvme")
    engine = engine_over(lower, 1000)
    spent = []
    for i in range(20):
        tokens = range(1000 * i, 1000 * i + 256)
        began = time.thread_time()
        chain = token_chain(tokens)
        assert len({content_of(key_at(chain, block), 0, ROW) for block in range(256)}) == 256
        own_s = time.thread_time() - began  # what the fake engine does itself
        began = time.thread_time()
        assert engine.serve(tokens) == 0
        spent.append(time.thread_time() - began - own_s)
        engine.settle()
    assert lower.stats().read_bytes == 0
    sums, _ = engine.cache.recorder.drain()
    assert sums["kvtier_tokens", ("recompute",)] == 20 * (256 * 16 + 1)
    assert sorted(spent)[10] < 0.006, f"{sorted(spent)[10] * 1e3:.1f} ms a request"
    engine.cache.close()


@pytest.mark.parametrize("below", [False, True], ids=["from memory", "from below"])
def test_a_prompt_that_leaves_a_hybrid_conversation_loads_up_to_the_boundary_before(below: bool) -> None:
    """vllm#52773: reusable heads of hybrid models were thrown away when prompts diverged. Windows are there where turns
    ended; whoever leaves the conversation later loads up to the last such place."""
    engine = engine_over(MemoryTier(ROW, 256, name="nvme"), 64, Geometry(16, 2, {1: 2}))

    def turn(tokens: Sequence[int]) -> int:
        request = engine.open(tokens, 1)
        engine.lookup(request)
        loaded = engine.load(request)  # compares every byte
        engine.cache.end_load(request)
        engine.cache.started(request)
        last = range(len(tokens) - 2, len(tokens))  # what is left of a window when its turn ends
        rows = [RowRef(block, 0) for block in range(len(tokens))] + [RowRef(block, 1) for block in last]
        granted = engine.cache.offer_store(request, rows)
        for row, slot in granted:
            engine.cache.memory_row(slot)[:] = content_of(key_at(request.chain, row.block), row.group, ROW)
        engine.cache.commit_store(request, [row for row, _ in granted])
        engine.finish(request)
        engine.settle()
        if below:
            engine.cache.memory.clear()
            engine.cache.epoch += 1
        return loaded

    assert turn(range(4)) == 0
    assert turn(range(8)) == 4
    assert turn([0, 1, 2, 3, 4, 5, 90, 91]) == 4, "six blocks match, and the window is whole after four"
    assert turn([0, 1, 2, 70]) == 0, "no turn ended before it left"
    assert turn(range(10)) == 8
    assert engine.cache.leases() == 0
    engine.cache.close()
