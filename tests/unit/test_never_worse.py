"""Caches of any size against no cache at all, in a real TierCache: what it reads and what it spares.

The tier below reads as slowly as it says, and computing a block costs what the gate was taught. A cache's seconds are
those of the blocks computed and of the rows read from below, at these prices.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import RowId, RowStatus, Slots, TierProbe

ROW, TOKENS = 64, 16
BLOCK_S = 2e-4  # to compute a block
PREFIX, TURN, TURNS, SESSIONS = 4, 6, 5, 6
WORKING_SET = PREFIX + SESSIONS * TURN * TURNS


class Timed(MemoryTier):
    """Reads take the time they are said to take."""

    def __init__(self, rows: int, row_s: float) -> None:
        super().__init__(ROW, rows, name="nvme")
        self.row_s = row_s
        self.rows_read = 0

    def probe(self) -> TierProbe:
        return TierProbe(0.0, ROW / self.row_s, 0.0, 1e9)

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        time.sleep(self.row_s * len(rows))
        self.rows_read += len(rows)
        return super().read(slots, rows, targets)


def cache_of(memory_rows: int, tier: MemoryTier) -> TierCache:
    memory = DramTier.over(np.zeros(memory_rows * ROW, np.uint8), ROW, memory_rows, ROW, checksums=False)
    cache = TierCache(CacheConfig(dram_bytes=1, io_threads=2), Geometry(TOKENS), memory, memory.row, [tier])
    for blocks in (1, 4, 16, 64):
        cache.observe_prefill([(0, blocks * TOKENS)], blocks * BLOCK_S)
    return cache


def agents(seed: int) -> list[tuple[str, list[int]]]:
    """Sessions that share a prefix and grow by a turn each time, in random order."""
    draw = random.Random(seed)
    order = [session for session in range(SESSIONS) for _ in range(TURNS)]
    draw.shuffle(order)
    prompts = {session: list(range(PREFIX)) for session in range(SESSIONS)}
    stream = []
    for session in order:
        prompts[session] += [1000 * (session + 1) + len(prompts[session]) + i for i in range(TURN)]
        stream.append((f"s{session}", list(prompts[session])))
    return stream


@pytest.mark.parametrize("row_s", [BLOCK_S / 10, BLOCK_S * 10], ids=["fast", "slow"])
@pytest.mark.parametrize("size", [0.1, 0.25, 0.5, 1.0, 2.0])
def test_a_cache_of_any_size_saves_time_or_costs_none(size: float, row_s: float) -> None:
    rows = max(1, int(size * WORKING_SET))
    tier = Timed(4 * rows, row_s)
    cache = cache_of(rows, tier)
    engine = FakeEngine(cache)
    spent_s = alone_s = 0.0
    for session, prompt in agents(0):
        request = engine.open(prompt, 1, session)
        before = tier.rows_read
        engine.lookup(request)
        spent_s += row_s * (tier.rows_read - before)
        loaded = engine.run(request)
        engine.settle()
        spent_s += BLOCK_S * (len(prompt) - loaded)
        alone_s += BLOCK_S * len(prompt)
    sums, _ = cache.recorder.drain()
    read = sums.get(("kvtier_bytes", ("nvme", "read")), 0.0)
    if row_s > BLOCK_S:
        assert read == 0, "computing is faster"
    assert spent_s <= alone_s, "of no use at worst"
    if size >= 1.0:
        assert spent_s < 0.6 * alone_s
    assert cache.leases() == 0
    cache.check_integrity()
    cache.close()


def test_prompts_that_never_repeat_cost_nothing_to_read_and_a_hundredth_to_decide() -> None:
    blocks, prompts = 500, 12
    cache = cache_of(4 * blocks, Timed(8 * blocks, BLOCK_S / 10))
    own = []
    for n in range(prompts):
        chain = token_chain(range(blocks * n, blocks * (n + 1)))
        context = RequestContext(request_id=f"r{n}", arrival_s=cache.clock.now(), prompt_tokens=blocks * TOKENS + 1)
        rows = np.zeros((blocks, 2), np.intp)
        rows[:, 0] = np.arange(blocks)
        began = time.thread_time()
        request = cache.open(context, chain)
        plan = cache.lookup(request, 0)
        assert plan is not None
        assert plan.blocks == 0
        cache.started(request)
        granted = cache.offer_store(request, rows)
        cache.commit_store(request, rows[granted.at])
        cache.close_request(request, Outcome(finished_s=cache.clock.now(), stop_reason=StopReason.END_TURN))
        cache.stepped()
        own.append(time.thread_time() - began)
        cache.mover.drain(5.0)
        cache.stepped()
    sums, _ = cache.recorder.drain()
    assert not any(value for (name, labels), value in sums.items() if name == "kvtier_bytes" and labels[1] == "read")
    assert sums["kvtier_tokens", ("recompute",)] == prompts * (blocks * TOKENS + 1)
    # A prompt of 8,000 tokens takes a GPU 0.4 s at 20,000 tokens a second.
    assert statistics.median(own) <= 0.01 * blocks * TOKENS / 20_000
    cache.close()
