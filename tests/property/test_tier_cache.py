"""TierCache under every interleaving: requests that share prefixes, slow promotions, failing tiers, resets, restarts.

After every step: index and residency are sound, caps hold, and no lease is without an owner; whatever is loaded is
compared byte by byte with what the model would have computed.
"""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.cache.geometry import Geometry
from kvtier.cache.request import CachedRequest
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.request import StopReason
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.faulty_tier import FaultKind, FaultyTier, Seeded
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

ROW_BYTES = 64
MEMORY_ROWS, LOWER_ROWS = 10, 24

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class CacheMachine(RuleBasedStateMachine):
    """A scripted engine over a small memory tier and a small, sometimes failing tier below it."""

    policy = "lru"
    groups = 1
    windows: dict[int, int] = {}  # noqa: RUF012 - overridden whole by a subclass

    @initialize(seed=st.integers(0, 2**16), share=st.sampled_from([0.0, 0.0, 0.2]))
    def start(self, seed: int, share: float) -> None:
        self.memory_checks = bool(seed % 2)
        self.draw = random.Random(seed)
        self.clock = VirtualClock()
        kinds = (FaultKind.EIO, FaultKind.ENOSPC, FaultKind.SHORT, FaultKind.FLIP)
        self.plan = Seeded(seed, share, kinds)
        self.lower = MemoryTier(ROW_BYTES, LOWER_ROWS, name="nvme")
        self.requests: list[tuple[CachedRequest, list[RowRef]]] = []
        self._open_cache()

    def _open_cache(self) -> None:
        buffer = np.zeros(MEMORY_ROWS * ROW_BYTES, np.uint8)
        memory = DramTier.over(buffer, ROW_BYTES, MEMORY_ROWS, ROW_BYTES, checksums=False)
        config = CacheConfig(
            dram_bytes=1,
            policy=self.policy,
            io_threads=2,
            chunk_bytes=4096,
            ghost_blocks=30,
            memory_checks=self.memory_checks,
        )
        self.cache = TierCache(
            config,
            Geometry(16, self.groups, self.windows),
            memory,
            memory.row,
            [FaultyTier(self.lower, self.plan)],
            self.clock,
        )
        self.engine = FakeEngine(self.cache)

    # --- the engine's life --------------------------------------------------------------------------------------

    @rule(tokens=prompts)
    def serve(self, tokens: list[int]) -> None:
        self.engine.serve(tokens)

    @rule(tokens=prompts)
    def arrive(self, tokens: list[int]) -> None:
        self.requests.append((self.engine.open(tokens, 1), []))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), settle=st.booleans())
    def look_up(self, data: st.DataObject, settle: bool) -> None:
        request, _ = self._pick(data)
        if request.load is None:
            start = data.draw(st.integers(0, request.blocks))
            self.engine.lookup(request, start, patience=50 if settle else 1)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        request, _ = self._pick(data)
        plan = request.plan
        if request.load is None and plan is not None and not plan.waiting and plan.epoch == self.cache.epoch:
            self.engine.load(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def load_arrives(self, data: st.DataObject) -> None:
        self.cache.end_load(self._pick(data)[0])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        request, written = self._pick(data)
        start = data.draw(st.integers(0, request.blocks - 1))
        written += self.engine.compute(request, start)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def store_arrives(self, data: st.DataObject) -> None:
        request, written = self._pick(data)
        self.cache.commit_store(request, written)
        written.clear()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), stop=st.sampled_from([StopReason.END_TURN, StopReason.ABORTED]))
    def end(self, data: st.DataObject, stop: StopReason) -> None:
        """The engine reports the end first and completions afterwards, as vLLM does."""
        index = data.draw(st.integers(0, len(self.requests) - 1))
        request, written = self.requests.pop(index)
        self.engine.finish(request, stop)
        self.cache.end_load(request)
        self.cache.commit_store(request, written)

    @rule()
    def settle(self) -> None:
        self.engine.settle()

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.cache.lower)
    @rule()
    def detach(self) -> None:
        """The tier below goes while requests wait for it and writes are under way."""
        assert self.cache.detach("nvme")
        assert not self.cache.lower
        self.lower = self.lower.reopen()

    @precondition(lambda self: not self.cache.lower)
    @rule()
    def attach(self) -> None:
        """What it held when it went is found again."""
        rows = len(self.lower.published)
        assert self.cache.attach(FaultyTier(self.lower, self.plan)) <= rows

    @rule()
    def reset(self) -> None:
        """vLLM drops its jobs: nothing under way is ever completed."""
        self.cache.reset()
        self.requests = [(request, []) for request, _ in self.requests]

    @rule()
    def restart(self) -> None:
        for request, written in self.requests:
            self.engine.finish(request, StopReason.ABORTED)
            self.cache.end_load(request)
            self.cache.commit_store(request, written)
        self.requests.clear()
        attached = bool(self.cache.lower)
        self.cache.close()
        assert self.cache.leases() == 0
        if not attached:
            return self._open_cache()
        self.lower = self.lower.reopen()
        self._open_cache()

    # --- what must always hold ------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert self.cache.memory.residency.resident_rows <= MEMORY_ROWS
            assert len(self.lower.published) <= LOWER_ROWS

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request, written in self.requests:
            self.engine.finish(request, StopReason.ABORTED)
            self.cache.end_load(request)
            self.cache.commit_store(request, written)
        self.engine.settle()
        assert self.cache.leases() == 0
        assert self.cache.memory.residency.pinned_rows == 0
        used = self.cache.memory.tier.stats().used_rows
        assert used == self.cache.memory.residency.resident_rows, "a memory row belongs to nobody"
        for below in self.cache.lower:
            assert below.tier.stats().used_rows == below.residency.resident_rows, "a row below belongs to nobody"
        self._sums_agree()
        self.cache.close()

    def _sums_agree(self) -> None:
        """Every prompt token has one source, and every recomputed one exactly one reason."""
        sums, _ = self.cache.recorder.drain()
        recomputed = sum(
            v for (name, labels), v in sums.items() if name == "kvtier_tokens" and labels == ("recompute",)
        )
        missed = sum(v for (name, _), v in sums.items() if name == "kvtier_miss_tokens")
        assert recomputed == missed

    def _pick(self, data: st.DataObject) -> tuple[CachedRequest, list[RowRef]]:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]


class HybridMachine(CacheMachine):
    """A full-attention group and one with a window of two blocks, ordered by the forecast."""

    policy = "kvtier"
    groups = 2
    windows = {1: 2}  # noqa: RUF012


TestOneGroup = CacheMachine.TestCase
TestOneGroup.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHybrid = HybridMachine.TestCase
TestHybrid.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def make_cache(lower_rows: int = 64, **options: object) -> tuple[FakeEngine, MemoryTier]:
    buffer = np.zeros(16 * ROW_BYTES, np.uint8)
    memory = DramTier.over(buffer, ROW_BYTES, 16, ROW_BYTES, checksums=False)
    lower = MemoryTier(ROW_BYTES, lower_rows, name="nvme")
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, **options)  # type: ignore[arg-type]
    return FakeEngine(TierCache(config, Geometry(16), memory, memory.row, [lower], VirtualClock())), lower


def test_a_repeated_prompt_is_loaded_and_byte_exact() -> None:
    engine, _ = make_cache()
    assert engine.serve(range(8)) == 0
    assert engine.serve(range(8)) == 8
    engine.cache.close()


def test_what_memory_lost_comes_back_from_below() -> None:
    engine, _ = make_cache()
    engine.serve(range(8))
    engine.settle()
    engine.cache.memory.clear()
    assert engine.serve(range(8)) == 8
    sums, _ = engine.cache.recorder.drain()
    assert sums["kvtier_tokens", ("nvme",)] == 8 * 16
    engine.cache.close()


def test_two_requests_wait_for_one_promotion() -> None:
    engine, lower = make_cache()
    engine.serve(range(8))
    engine.settle()
    engine.cache.memory.clear()
    first, second = engine.open(range(8), 1), engine.open(range(8), 1)
    before = lower.stats().read_bytes
    engine.cache.lookup(first, 0)
    engine.cache.lookup(second, 0)
    assert engine.lookup(first) == engine.lookup(second) == 8
    assert lower.stats().read_bytes - before == 8 * ROW_BYTES, "read once for both"
    for request in (first, second):
        engine.load(request)
        engine.cache.end_load(request)
        engine.finish(request)
    assert engine.cache.leases() == 0
    engine.cache.close()


def test_a_promise_survives_an_eviction_storm() -> None:
    """LMCache#4133: looked up 768 tokens, could stage 651."""
    engine, _ = make_cache()
    engine.serve(range(8))
    request = engine.open(range(8), 1)
    assert engine.lookup(request) == 8
    for n in range(40):
        engine.serve([100 + n, 200 + n, 300 + n, 400 + n])
    assert engine.load(request) == 8, "every promised block is still there, byte for byte"
    engine.cache.end_load(request)
    engine.finish(request)
    engine.cache.close()


def test_a_request_past_its_deadline_uses_what_is_ready_and_says_why() -> None:
    engine, _ = make_cache(load_deadline_s=1.0)
    engine.serve(range(8))
    engine.settle()
    engine.cache.memory.clear()
    stuck = FaultyTier(engine.cache.lower[0].tier, Seeded(0, 0.0, (FaultKind.DELAY,)))
    engine.cache.lower[0].tier = stuck
    request = engine.open(range(8), 1)
    assert engine.cache.lookup(request, 0) is None
    engine.cache.mover.drain(5.0)
    clock = engine.cache.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(2.0)
    plan = engine.cache.lookup(request, 0)
    assert plan is not None
    assert plan.blocks == 0
    engine.finish(request)
    sums, _ = engine.cache.recorder.drain()
    assert sums["kvtier_miss_tokens", ("deadline",)] == 8 * 16
    engine.settle()
    engine.cache.close()


def test_restart_finds_what_was_written() -> None:
    engine, lower = make_cache()
    engine.serve(range(8))
    engine.serve([0, 1, 2, 50, 51])
    engine.settle()
    engine.cache.close()
    again, _ = make_cache()
    again.cache.close()
    buffer = np.zeros(16 * ROW_BYTES, np.uint8)
    memory = DramTier.over(buffer, ROW_BYTES, 16, ROW_BYTES, checksums=False)
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2)
    cache = TierCache(config, Geometry(16), memory, memory.row, [lower.reopen()], VirtualClock())
    engine = FakeEngine(cache)
    assert engine.serve(range(8)) == 8
    assert engine.serve([0, 1, 2, 50, 51]) == 5
    assert cache.tree.walk(token_chain(range(8))).blocks == 8
    cache.close()


def test_window_rows_find_their_place_again_after_a_restart() -> None:
    """Where every layer slides, nothing on the medium says what came before a row; the next prompt does."""
    lower = MemoryTier(ROW_BYTES, 8, name="nvme")

    def start(tier: MemoryTier) -> FakeEngine:
        memory = DramTier.over(np.zeros(8 * ROW_BYTES, np.uint8), ROW_BYTES, 8, ROW_BYTES, checksums=False)
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2)
        return FakeEngine(TierCache(config, Geometry(16, 1, {0: 2}), memory, memory.row, [tier], VirtualClock()))

    engine = start(lower)
    request = engine.open(range(6), 1)
    engine.cache.commit_store(request, engine.compute(request, 4))
    engine.finish(request)
    engine.settle()
    engine.cache.close()
    lower = lower.reopen()
    engine = start(lower)
    request = engine.open(range(6), 1)
    assert engine.lookup(request) == 6
    assert engine.load(request) == 6
    engine.cache.end_load(request)
    engine.finish(request)
    engine.cache.close()

    engine = start(lower.reopen())
    for n in range(8):
        engine.serve([50 + n, 60 + n])
        engine.settle()
    assert engine.cache.lower[0].residency.resident_rows == 8, "rows nobody asked for made room"
    engine.cache.close()
