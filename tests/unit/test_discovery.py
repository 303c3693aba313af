"""Two engines over one shared medium: the second finds what the first stored, and loses only time when it is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.codec.form import RowForm
from kvtier.codec.registry import CodecChoice, build_codec
from kvtier.config import CacheConfig
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script
from kvtier.testing.shared_memory_tier import Medium, SharedMemoryTier
from kvtier.tiers.codec_tier import CodecTier, encoded_row_bytes
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import RowId, Tier
from tests.storage_bench import ROW, TOKENS, Bench, keys_of

ROW_BYTES = 64


class Engines:
    """Engines with memory of their own over a common medium."""

    def __init__(self) -> None:
        self.medium: Medium = {}
        self.clock = VirtualClock()
        self.all: list[FakeEngine] = []

    def start(
        self, *lower: Tier, geometry: Geometry | None = None, memory_rows: int = 128, **options: object
    ) -> FakeEngine:
        memory = DramTier.over(
            np.zeros(memory_rows * ROW_BYTES, np.uint8), ROW_BYTES, memory_rows, ROW_BYTES, checksums=False
        )
        config = CacheConfig(**{"dram_bytes": 1, "io_threads": 2, "gate": False, **options})  # type: ignore[arg-type]
        cache = TierCache(config, geometry or Geometry(16), memory, memory.row, lower or [self.tier()], self.clock)
        self.all.append(FakeEngine(cache))
        return self.all[-1]

    def tier(self, rows: int = 256) -> SharedMemoryTier:
        return SharedMemoryTier(ROW_BYTES, rows, self.medium)


@pytest.fixture
def engines() -> Iterator[Engines]:
    rig = Engines()
    yield rig
    for engine in rig.all:
        engine.settle()
        assert engine.cache.leases() == 0
        engine.cache.check_integrity()
        engine.cache.close(1.0)


def counted(engine: FakeEngine, name: str, *labels: str) -> float:
    sums, _ = engine.cache.recorder.drain()
    mine = {key: value for key, value in sums.items() if key[0] == name}
    for key, value in sums.items():
        engine.cache.recorder.add(key[0], value, *key[1])
    return sum(value for (_, found), value in mine.items() if not labels or found == labels)


def wait_for(engine: FakeEngine) -> None:
    """Until nothing is asked any more."""
    deadline = time.monotonic() + 10
    while engine.cache.seeker.busy and time.monotonic() < deadline:
        engine.cache.poll()
        time.sleep(0.001)
    assert not engine.cache.seeker.busy


@pytest.mark.parametrize(
    "geometry",
    [Geometry(16), Geometry(16, 2), Geometry(16, 2, {1: 2}), Geometry(16, 2, {0: 3, 1: 2})],
    ids=["one-group", "two-groups", "full-and-window", "windows-only"],
)
def test_what_one_engine_stored_another_loads_bit_for_bit(engines: Engines, geometry: Geometry) -> None:
    first = engines.start(geometry=geometry)
    second = engines.start(geometry=geometry)
    prompt = list(range(40))
    assert first.serve(prompt) == 0
    first.settle()
    assert second.serve(prompt) == 40
    assert counted(second, "kvtier_discoveries", "shared_fs", "all") == 1
    assert counted(second, "kvtier_discovered_rows") == 40 * geometry.groups
    assert counted(second, "kvtier_tokens", "shared_fs") == 40 * 16


def test_what_one_engine_stored_encoded_another_finds_and_decodes(engines: Engines) -> None:
    codec = build_codec(CodecChoice(name="zstd"), RowForm(kind="opaque", opaque_bytes=ROW_BYTES))
    inner = [SharedMemoryTier(encoded_row_bytes(codec), 256, engines.medium) for _ in range(2)]
    first, second = (engines.start(CodecTier(tier, codec)) for tier in inner)
    prompt = list(range(12))
    first.serve(prompt)
    first.settle()
    assert {len(row) for row in engines.medium.values()} == {encoded_row_bytes(codec)}
    assert second.serve(prompt) == 12
    assert counted(second, "kvtier_tokens", "shared_fs") == 12 * 16


def test_only_what_is_missing_is_asked_for_and_a_no_is_remembered_for_a_moment(engines: Engines) -> None:
    tier = engines.tier()
    second = engines.start(tier)
    first = engines.start()
    first.serve(list(range(10)))
    first.settle()
    assert second.serve([*range(10), *range(50, 60)]) == 10
    second.settle()
    asked = len(tier.asked)
    assert asked == 20, "one short question for all of it"
    assert second.serve([*range(10), *range(50, 60)]) == 20
    assert len(tier.asked) == asked, "what is known is not asked for"
    for _ in range(3):
        second.finish(second.open([7, 8, 9], 1))
        wait_for(second)
    assert len(tier.asked) == asked + 3
    assert counted(second, "kvtier_discoveries", "shared_fs", "known_missing") == 2
    engines.clock.advance(2.0)
    second.finish(second.open([7, 8, 9], 1))
    wait_for(second)
    assert len(tier.asked) == asked + 6


def test_a_long_prompt_of_which_nothing_is_there_costs_one_short_question(engines: Engines) -> None:
    tier = engines.tier()
    engine = engines.start(tier)
    engine.finish(engine.open(list(range(4000)), 1))
    wait_for(engine)
    assert len(tier.asked) == 32


def test_blocks_that_vanished_are_misses_with_that_reason(engines: Engines) -> None:
    first, second = engines.start(), engines.start()
    prompt = list(range(12))
    first.serve(prompt)
    first.settle()
    request = second.open(prompt, 1)
    wait_for(second)
    chain = token_chain(prompt)
    for block in (5, 6):
        del engines.medium[chain[block * 32 : block * 32 + 32], 0]
    assert second.lookup(request) in (5, 12)
    assert second.lookup(request) == 5
    assert second.load(request) == 5
    second.cache.end_load(request)
    second.cache.started(request)
    second.cache.commit_store(request, second.compute(request, 5))
    second.finish(request)
    assert counted(second, "kvtier_miss_tokens", "vanished") == 7 * 16
    second.settle()
    assert set(engines.medium) == {(chain[i * 32 : i * 32 + 32], 0) for i in range(12)}, "and stored again"


class Silent(SharedMemoryTier):
    """A medium that does not answer questions until told to."""

    def __init__(self, medium: Medium) -> None:
        super().__init__(ROW_BYTES, 256, medium)
        self.answer = threading.Event()

    def exists(self, rows: list[RowId]) -> list[bool]:  # type: ignore[override]
        assert self.answer.wait(30)
        return super().exists(rows)


def test_a_silent_medium_delays_no_request_beyond_the_deadline_and_is_soon_left_alone(engines: Engines) -> None:
    first = engines.start()
    first.serve(list(range(8)))
    first.settle()
    tier = Silent(engines.medium)
    second = engines.start(tier, discover_deadline_s=0.25)
    waited = 0.0
    for i in range(8):
        request = second.open(list(range(i * 100, i * 100 + 8)), 1)
        began = engines.clock.now()
        while second.cache.lookup(request, 0) is None:
            engines.clock.advance(0.05)
        waited += engines.clock.now() - began
        assert engines.clock.now() - began <= 0.25 + 0.05
        second.finish(request)
    assert waited <= 5 * 0.3, "after five the breaker is open and nobody waits"
    assert counted(second, "kvtier_discoveries", "shared_fs", "deadline") == 5
    assert counted(second, "kvtier_discoveries", "shared_fs", "tier_down") == 3
    tier.answer.set()
    wait_for(second)
    engines.clock.advance(60)
    assert second.serve(list(range(8))) == 8, "what was answered late is known all the same"


def test_a_medium_that_fails_to_answer_is_a_counted_miss(engines: Engines) -> None:
    first = engines.start()
    first.serve(list(range(4)))
    first.settle()
    broken = FaultyTier(engines.tier(), Script([Fault("exists", 0, FaultKind.EIO)]))
    second = engines.start(broken)
    assert second.serve(list(range(4))) == 0
    assert counted(second, "kvtier_discoveries", "shared_fs", "io_error") == 1
    assert counted(second, "kvtier_faults", "shared_fs", "io_error") == 1


def test_no_room_for_handles_adopts_the_head(engines: Engines) -> None:
    first = engines.start()
    first.serve(list(range(30)))
    first.settle()
    second = engines.start(engines.tier(rows=8))
    assert 1 <= second.serve(list(range(30))) <= 8


def test_after_a_reset_nothing_stored_before_is_found_by_anyone_asking_there(engines: Engines) -> None:
    first, second = engines.start(), engines.start()
    first.serve(list(range(6)))
    first.settle()
    second.cache.reset()
    assert second.serve(list(range(6))) == 0
    second.settle()
    assert second.serve(list(range(6))) == 6
    assert first.serve(list(range(6))) == 6


def test_the_wait_for_an_answer_is_never_longer_than_computing_would_take(engines: Engines) -> None:
    tier = Silent(engines.medium)
    engine = engines.start(tier, discover_deadline_s=10.0, gate=True)
    for _ in range(8):
        engine.cache.prefill.observe([(0, 1000)], 0.1)
    request = engine.open(list(range(8)), 1)
    began = engines.clock.now()
    while engine.cache.lookup(request, 0) is None:
        engines.clock.advance(0.001)
    assert engines.clock.now() - began < 0.1
    assert counted(engine, "kvtier_faults") == 0, "the tier is not to blame"
    tier.answer.set()
    wait_for(engine)
    engine.finish(request)


@pytest.mark.parametrize("told", [True, False], ids=["heads-told", "heads-not-told"])
@pytest.mark.parametrize("groups", [1, 2])
def test_two_storage_levels_share_pages(groups: int, told: bool) -> None:
    medium: Medium = {}
    first, second = (Bench(SharedMemoryTier(ROW, 64, medium), groups=groups) for _ in range(2))
    chain = keys_of(*range(12))
    assert first.store(chain) == [True] * 12
    assert second.find(chain, start=4, head=None if told else b"") == 8
    assert second.load(chain[4 * 32 :]) == [True] * 8
    assert second.find(chain, head=b"") == 12
    assert second.load(chain) == [True] * 12
    assert second.count("kvtier_bytes", "shared_fs", "write") == 0
    assert second.store(chain) == [True] * 12
    first.check()
    second.check()


def test_a_page_that_vanished_is_a_miss_of_the_storage_level() -> None:
    medium: Medium = {}
    first, second = (Bench(SharedMemoryTier(ROW, 64, medium)) for _ in range(2))
    chain = keys_of(1, 2, 3)
    first.store(chain)
    assert second.find(chain) == 3
    del medium[chain[32:64], 0]
    assert second.load(chain) == [True, False, True]
    second.cache.settle()
    assert second.count("kvtier_miss_tokens", "vanished") == 2 * TOKENS
    assert second.find(chain) == 1
    second.check()


def test_a_storage_level_waits_for_a_silent_medium_no_longer_than_its_deadline() -> None:
    tier = Silent({})
    tier.row_bytes = ROW
    bench = Bench(tier, discover_deadline_s=0.05)
    began = time.monotonic()
    for i in range(20):
        assert bench.find(keys_of(i, i)) == 0
    assert time.monotonic() - began < 1.0, "five times the deadline, then the breaker is open"
    assert bench.count("kvtier_discoveries", "shared_fs", "deadline") == 5
    tier.answer.set()
    bench.check()


def test_clearing_a_storage_level_hides_what_others_stored_before() -> None:
    medium: Medium = {}
    first, second = (Bench(SharedMemoryTier(ROW, 64, medium)) for _ in range(2))
    chain = keys_of(1, 2, 3)
    first.store(chain)
    second.cache.clear()
    assert second.find(chain) == 0
    assert first.find(chain) == 3
    first.check()
    second.check()


def test_a_tier_that_hangs_and_leaves_leaves_no_thread_and_no_question_behind() -> None:
    """With more asked of it than its queue takes."""
    gate = threading.Event()

    class Hanging(SharedMemoryTier):
        def exists(self, rows: Sequence[RowId]) -> list[bool]:
            gate.wait(20)
            return super().exists(rows)

    tier = Hanging(64, 64, name="hanging")
    memory = DramTier.over(np.zeros(8 * 64, np.uint8), 64, 8, 64, checksums=False)
    config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2)
    engine = FakeEngine(TierCache(config, Geometry(16), memory, memory.row, [tier], VirtualClock()))
    for first in range(300):
        engine.open([first], 1)
    assert engine.cache.busy
    engine.cache.detach("hanging")
    engine.cache.poll()
    assert not engine.cache.busy
    gate.set()
    asking = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-find-hanging")]
    for thread in asking:
        thread.join(10)
        assert not thread.is_alive()
    engine.cache.close()
