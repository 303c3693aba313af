"""StorageCache: what a storage level answers, keeps and counts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier.cache.visits import SETTLE_S
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script
from kvtier.testing.memory_tier import MemoryTier
from tests.storage_bench import ROW, TOKENS, Bench, blank, keys_of


@pytest.mark.parametrize("groups", [1, 2])
def test_what_was_stored_is_found_and_loaded(groups: int) -> None:
    bench = Bench(MemoryTier(ROW, 64), groups=groups)
    chain = keys_of(1, 2, 3, 4)
    assert bench.find(chain) == 0
    assert bench.store(chain) == [True] * 4
    assert bench.find(chain) == 4
    assert bench.cache.leases() == 1
    assert bench.load(chain) == [True] * 4
    assert bench.count("kvtier_tokens", "memory") == 4 * TOKENS
    assert bench.count("kvtier_miss_tokens", "never_seen") == 4 * TOKENS
    bench.check()


def test_a_block_is_written_once_however_often_it_is_stored() -> None:
    bench = Bench(MemoryTier(ROW, 64))
    chain = keys_of(1, 2, 3)
    for _ in range(3):
        assert bench.store(chain) == [True] * 3
    assert bench.store(keys_of(1, 2, 3, 4)) == [True] * 4
    assert bench.count("kvtier_bytes", "memory", "write") == 4 * ROW
    bench.check()


def test_blocks_are_found_without_being_told_what_comes_before() -> None:
    """SGLang passes the keys before a call's only when asked to."""
    bench = Bench(MemoryTier(ROW, 64))
    first, second = keys_of(1, 2, 3, 4), keys_of(1, 2, 8, 9)
    bench.store(first)
    bench.store(second, start=2, head=b"")
    assert bench.find(second, head=b"") == 4
    assert bench.find(first, start=2, head=b"") == 2
    assert bench.find(second, start=3, head=b"") == 1
    assert bench.load(second) == [True] * 4
    assert bench.find(keys_of(1, 2, 7), head=b"") == 2
    bench.check()


def test_a_question_asked_in_parts_is_one_visit() -> None:
    bench = Bench(MemoryTier(ROW, 64))
    chain = keys_of(*range(8))
    bench.store(chain)
    before = bench.count("kvtier_requests")
    assert bench.find(chain[: 4 * 32], head=b"") == 4
    assert bench.find(chain, start=4) == 4
    assert bench.load(chain[: 4 * 32]) == [True] * 4
    assert bench.load(chain[4 * 32 :]) == [True] * 4
    assert bench.count("kvtier_requests") == before + 1
    assert bench.count("kvtier_tokens", "memory") == 8 * TOKENS
    bench.check()


def test_a_repeated_question_is_counted_once() -> None:
    bench = Bench(MemoryTier(ROW, 64))
    chain = keys_of(1, 2, 3)
    for _ in range(5):
        assert bench.find(chain) == 0
    bench.store(chain)
    assert bench.count("kvtier_miss_tokens") == 3 * TOKENS
    assert bench.count("kvtier_requests") == 1
    bench.check()


def test_two_requests_that_load_the_same_blocks_both_count() -> None:
    bench = Bench(MemoryTier(ROW, 64))
    chain = keys_of(1, 2, 3)
    bench.store(chain)
    assert bench.find(chain) == bench.find(chain) == 3
    assert bench.load(chain) == bench.load(chain) == [True] * 3
    assert bench.count("kvtier_tokens", "memory") == 6 * TOKENS
    bench.check()


def test_a_promise_holds_against_a_storm_of_stores_and_ends_by_itself() -> None:
    bench = Bench(MemoryTier(ROW, 8))
    chain = keys_of(1, 2, 3, 4)
    bench.store(chain)
    assert bench.find(chain) == 4
    for token in range(100, 140):
        bench.store(keys_of(token, token))
    assert bench.load(chain) == [True] * 4, "what was promised is still there"
    assert bench.find(chain) == 4
    bench.clock.advance(SETTLE_S)
    bench.find(keys_of(5))
    assert bench.count("kvtier_miss_tokens", "not_taken") == 4 * TOKENS
    for token in range(200, 240):
        bench.store(keys_of(token, token))
    assert bench.find(chain) < 4, "an old promise is no longer kept"
    bench.check()


def test_the_cap_is_kept_and_eviction_takes_tails_first() -> None:
    tier = MemoryTier(ROW, 8)
    bench = Bench(tier)
    chains = [keys_of(token, token, token) for token in range(6)]
    for chain in chains:
        bench.store(chain)
        assert tier.stats().used_rows <= 8
        bench.cache.check_integrity()
    assert bench.find(chains[-1]) == 3
    assert sum(bench.find(chain) for chain in chains) == 8
    bench.check()


def test_a_store_larger_than_the_tier_keeps_its_head() -> None:
    bench = Bench(MemoryTier(ROW, 4))
    chain = keys_of(*range(10))
    assert bench.store(chain)[0]
    kept = bench.find(chain)
    assert 0 < kept <= 4
    assert bench.load(chain[: kept * 32]) == [True] * kept
    assert bench.count("kvtier_stores_refused", "memory", "no_room") == 10 - kept
    bench.check()


@pytest.mark.parametrize(
    ("kind", "reason"), [(FaultKind.FLIP, "corrupt"), (FaultKind.EIO, "load_failed"), (FaultKind.SHORT, "load_failed")]
)
def test_a_block_that_cannot_be_read_is_a_miss_with_its_reason(kind: FaultKind, reason: str) -> None:
    inner = MemoryTier(ROW, 64)
    bench = Bench(FaultyTier(inner, Script([Fault("read", 0, kind, row=1)])), chunk_bytes=1 << 26)
    chain = keys_of(1, 2)
    bench.store(chain)
    assert bench.find(chain) == 2
    targets = blank(2)
    done = bench.cache.load(chain, targets)
    assert done.count(False) == 1
    assert done == [True, False] or kind is not FaultKind.FLIP
    bench.cache.settle()
    assert bench.count("kvtier_miss_tokens", reason) >= TOKENS
    assert bench.find(chain) == 1, "left alone for a while"
    bench.cache.settle()
    bench.clock.advance(2.0)
    expected = {"corrupt": 1}.get(reason, 2)
    assert bench.find(chain) == expected, "what is damaged leaves the tier, what could not be read may be tried again"
    bench.check()


def test_a_slower_tier_helps_out() -> None:
    fast = FaultyTier(MemoryTier(ROW, 64, name="fast"), Script([Fault("read", 0, FaultKind.FLIP)]))
    bench = Bench(fast, MemoryTier(ROW, 64, name="slow"))
    chain = keys_of(1)
    bench.store(chain)
    assert bench.count("kvtier_bytes", "fast", "write") == bench.count("kvtier_bytes", "slow", "write") == ROW
    assert bench.find(chain) == 1
    assert bench.load(chain) == [True]
    assert bench.count("kvtier_tokens", "slow") == TOKENS
    bench.check()


def test_a_write_that_fails_leaves_no_key() -> None:
    bench = Bench(FaultyTier(MemoryTier(ROW, 64), Script([Fault("write", 0, FaultKind.ENOSPC, row=1)])))
    chain = keys_of(1, 2, 3)
    assert bench.store(chain) == [True, False, False], "no tail without its head"
    assert bench.find(chain) == 1
    assert bench.store(chain) == [True] * 3
    bench.check()


def test_a_tier_that_keeps_failing_is_left_alone() -> None:
    bench = Bench(FaultyTier(MemoryTier(ROW, 64), Script([Fault("read", call, FaultKind.EIO) for call in range(9)])))
    chain = keys_of(1)
    bench.store(chain)
    for _ in range(5):
        bench.clock.advance(300.0)  # the row that failed is left alone for a while, too
        assert bench.find(chain) == 1
        assert bench.load(chain) == [False]
        bench.cache.settle()
    assert bench.find(chain) == 0, "the breaker is open"
    bench.cache.settle()
    assert bench.count("kvtier_miss_tokens", "tier_down") == TOKENS
    bench.check()


def test_the_gate_declines_what_is_slower_to_load_than_to_compute() -> None:
    class Crawling(MemoryTier):
        def probe(self):  # type: ignore[no-untyped-def]
            return super().probe().__class__(10.0, 1.0, 10.0, 1.0)

    bench = Bench(Crawling(ROW, 64))
    chain = keys_of(1, 2, 3, 4)
    bench.store(chain)
    for _ in range(8):
        bench.cache.observe_prefill([(0, 4 * TOKENS)], 0.001)
    assert bench.find(chain) == 0
    bench.cache.settle()
    assert bench.count("kvtier_miss_tokens", "declined_recompute_cheaper") == 4 * TOKENS
    bench.check()


def test_a_restart_finds_what_was_published() -> None:
    tier = MemoryTier(ROW, 64)
    bench = Bench(tier, groups=2)
    first, second = keys_of(1, 2, 3, 4), keys_of(1, 2, 8, 9)
    bench.store(first)
    bench.store(second, start=2, head=b"")
    bench.cache.close()
    after = Bench(tier.reopen(), groups=2)
    assert after.count("kvtier_recovered_rows") == 12
    assert after.find(first) == after.find(second) == 4
    assert after.load(first) == after.load(second) == [True] * 4
    after.check()


def test_clear_forgets_everything_even_what_is_being_written() -> None:
    gate, entered = threading.Event(), threading.Event()

    class Slow(MemoryTier):
        def write(self, slots, rows, sources):  # type: ignore[no-untyped-def]
            entered.set()
            assert gate.wait(10)
            return super().write(slots, rows, sources)

    tier = Slow(ROW, 64)
    bench = Bench(tier)
    chain = keys_of(1, 2)
    thread = threading.Thread(target=bench.store, args=(chain,))
    thread.start()
    assert entered.wait(10)
    assert bench.find(chain) == 0
    bench.cache.clear()
    gate.set()
    thread.join(10)
    assert bench.find(chain) == 0
    assert tier.stats().used_rows == 0
    bench.check()


def test_a_closed_cache_answers_nothing() -> None:
    bench = Bench(MemoryTier(ROW, 64))
    chain = keys_of(1)
    bench.store(chain)
    bench.cache.close()
    bench.cache.close()
    assert bench.find(chain) == 0
    assert bench.cache.load(chain, blank(1)) == [False]
    assert bench.store(chain) == [False]
    assert bench.cache.leases() == 0


def test_a_tier_that_raises_costs_misses_only() -> None:
    class Broken(MemoryTier):
        def read(self, slots, rows, targets):  # type: ignore[no-untyped-def]
            raise OSError("gone")

    bench = Bench(Broken(ROW, 64))
    chain = keys_of(1)
    bench.store(chain)
    bench.find(chain)
    assert bench.load(chain) == [False]
    assert bench.count("kvtier_faults", "memory", "io_error") == 1
    bench.check()


def test_finders_loaders_and_storers_side_by_side() -> None:
    """Three kinds of threads over a tier that is far too small: never a wrong byte, a leak or a broken index."""
    bench = Bench(FaultyTier(MemoryTier(ROW, 40), Script([Fault("read", 7, FaultKind.FLIP)])))
    chains = [keys_of(*(seed % 3, *([seed] * (2 + seed % 5)))) for seed in range(24)]

    def work(offset: int) -> None:
        rng = np.random.default_rng(offset)
        for _ in range(150):
            chain = chains[int(rng.integers(len(chains)))]
            if rng.random() < 0.5:
                bench.store(chain)
            else:
                n = bench.find(chain, head=b"")
                bench.load(chain[: n * 32])

    with ThreadPoolExecutor(3) as threads:
        for ended in [threads.submit(work, i) for i in range(3)]:
            ended.result(60)
    bench.check()
