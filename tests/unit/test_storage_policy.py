"""What a storage level decides by: write admission by value and conservative mode, as under vLLM."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from kvtier.place.mode import Mode
from kvtier.testing.memory_tier import MemoryTier
from tests.storage_bench import ROW, TOKENS, Bench, keys_of

N = 8


def prices(tmp_path: Path, wear: float) -> str:
    path = tmp_path / "prices.json"
    path.write_text(f'{{"tiers": {{"nvme": {{"wear_per_gb": {wear}}}}}}}')
    return str(path)


def taught(bench: Bench, seconds_a_token: float = 1e-4) -> Bench:
    for n in (TOKENS, 4 * TOKENS, 16 * TOKENS):
        bench.cache.observe_prefill([(0, n)], n * seconds_a_token)
    return bench


def bench_of(tmp_path: Path, wear: float, *others: MemoryTier) -> Bench:
    tiers = (MemoryTier(ROW, 256, name="nvme"), *others)
    return taught(Bench(*tiers, write_admission="value", prices_file=prices(tmp_path, wear)))


def test_a_cheap_medium_takes_everything_and_a_dear_one_what_is_shared(tmp_path: Path) -> None:
    chain = keys_of(*range(N))
    cheap = bench_of(tmp_path, 1e-12)
    assert cheap.store(chain) == [True] * N

    dear = bench_of(tmp_path, 1e9)
    assert dear.store(chain) == [False] * N
    assert dear.find(chain) == 0
    assert dear.count("kvtier_stores_refused", "nvme", "value") == N
    assert dear.count("kvtier_bytes", "nvme", "write") == 0
    dear.check()


def test_a_chain_is_decided_on_once(tmp_path: Path) -> None:
    """A tail without its head could never be loaded, and a head without its tail is half a saving."""
    bench = Bench(MemoryTier(ROW, 256, name="nvme"), write_admission="value", prices_file=prices(tmp_path, 1e9))
    chain, late = keys_of(*range(2 * N)), keys_of(*range(100, 100 + 2 * N))
    assert all(bench.store(chain[: N * 32])), "what computing costs is not known: everything is worth writing"
    taught(bench)
    assert not any(bench.store(late[: N * 32]))
    assert all(bench.store(chain, start=N)), "taken, as its head was"
    assert not any(bench.store(late, start=N)), "refused, as its head was"
    assert bench.find(chain) == 2 * N
    assert bench.load(chain) == [True] * (2 * N)
    bench.check()


def test_tiers_that_do_not_wear_take_everything(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, 1e9, MemoryTier(ROW, 256, name="shared_fs"))
    chain = keys_of(*range(N))
    assert bench.store(chain) == [True] * N
    assert bench.find(chain) == N
    assert bench.count("kvtier_bytes", "nvme", "write") == 0
    assert bench.count("kvtier_bytes", "shared_fs", "write") == N * ROW
    assert bench.load(chain) == [True] * N
    bench.check()


class Slow(MemoryTier):
    """Reads that take as long as they are told to."""

    seconds = 0.0

    def read(self, *arguments):  # type: ignore[no-untyped-def]
        time.sleep(self.seconds)
        return super().read(*arguments)


def test_overload_is_entered_and_left_as_the_state_machine_says_and_nothing_is_written_meanwhile() -> None:
    tier = Slow(ROW, 256, name="nvme")
    bench = taught(Bench(tier, gate=False, load_deadline_s=10.0), 1e-3)  # a block takes 16 ms to compute
    chain, more = keys_of(*range(N)), keys_of(*range(50, 50 + N))
    bench.store(chain)
    policy = bench.cache.policy
    modes = []

    def step(seconds: float = 1.0) -> None:
        bench.clock.advance(seconds)
        bench.count("kvtier_conservative")  # drains, as the scheduler does
        modes.append(policy.watch.machine.mode)

    step()
    policy.waited(3.0)  # somebody waited above the mark
    for _ in range(3):
        step()
    assert modes[-1] is Mode.CONSERVATIVE
    assert policy.watch.machine.reason == "queue_p99_s"

    assert bench.store(more) == [False] * N
    assert bench.count("kvtier_stores_refused", "nvme", "conservative") == N

    tier.seconds = 2.0
    assert bench.find(chain) == N, "foreground loads go on"
    began = time.monotonic()
    assert bench.load(chain) == [False] * N
    assert time.monotonic() - began < 1.0, "no longer than computing them takes: 0.13 s"

    tier.seconds = 0.0
    for _ in range(30):
        step()
    assert modes[-1] is Mode.NORMAL
    assert sum(a is not b for a, b in itertools.pairwise(modes)) == 2, "in once, out once"
    assert bench.count("kvtier_conservative_entries", "queue_p99_s") == 1
    assert bench.count("kvtier_conservative_seconds") >= 10.0
    assert bench.store(more) == [True] * N, "made up for when they are stored again"
    bench.cache.close()


@pytest.mark.parametrize("conservative", [False, True])
def test_a_deadline_is_never_longer_than_configured_nor_ended_by_an_untrusted_estimate(conservative: bool) -> None:
    untaught = Bench(MemoryTier(ROW, 64), load_deadline_s=7.0)
    if conservative:
        untaught.cache.policy.watch.machine.mode = Mode.CONSERVATIVE
    assert untaught.cache.policy.load_deadline_s([]) == 7.0
    chain = keys_of(*range(N))
    untaught.store(chain)
    runs = untaught.cache._paths.known(chain)
    assert untaught.cache.policy.load_deadline_s(runs) == 7.0
    untaught.cache.close()
