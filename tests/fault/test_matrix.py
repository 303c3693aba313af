"""The fault matrix: every call into a real tier fails once, in every way, under both caches.

For each cell one fault is put into one call of a run in which everything is stored, forgotten by memory, and asked for
again; each step of the run gets it once. What must hold: every byte served is what the model would compute, every row
asked for is served or a miss with a reason, no exception gets out, the fault is counted under its reason, and nobody
waits longer than the deadline. `test_cache_faults` does the same by row and by script on a virtual clock;
`test_matrix_pool` with peers that stop and die.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.cache import attach
from kvtier.cache.tier_cache import TierCache
from kvtier.errors import TierError
from kvtier.testing.faulty_tier import Fault, FaultKind
from kvtier.tiers.health import BreakerLimits, BreakerState
from tests.fault.serving import BLOCKS, CACHES, DEADLINE_S, PROMPTS, ROW, Medium, Served

READS = {
    FaultKind.EIO: "io_error",
    FaultKind.SHORT: "io_error",
    FaultKind.FLIP: "corrupt",
    FaultKind.CLOSED: "closed",
    FaultKind.DELAY: "stall",
}
WRITES = {
    FaultKind.EIO: "io_error",
    FaultKind.ENOSPC: "full",
    FaultKind.SHORT: "io_error",
    FaultKind.FLIP: "corrupt",
    FaultKind.CLOSED: "closed",
    FaultKind.DELAY: "stall",
}
CELLS = [("read", kind) for kind in READS] + [("write", kind) for kind in WRITES]
MEDIA = ("nvme", "cxl", "shared_fs")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    return iter(tmp_path / str(n) for n in range(1000))


def calls(cache: str, medium: str, folders: Iterator[Path], *, reset: bool = False) -> dict[str, int]:
    """Calls of the run without a fault, in which everything is served from below. A busy disk may hold a call longer
    than the deadline by itself: then that was not the run without a fault, and it is made again."""
    for _ in range(5):
        served = CACHES[cache](Medium(medium, next(folders)))
        served.run()
        if reset:
            served.reset()
            served.run()
        whole = served.ask(PROMPTS[0]) == BLOCKS
        served.medium.gate.set()
        served.cache.close()
        if whole or medium not in MEDIA:
            return dict(served.medium.tier._calls)
    raise AssertionError("this disk stalls all the time")


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize(("op", "kind"), CELLS, ids=[f"{op}-{kind.value}" for op, kind in CELLS])
def test_every_call_fails_once(cache: str, medium: str, op: str, kind: FaultKind, folders: Iterator[Path]) -> None:
    reason = (READS if op == "read" else WRITES)[kind]
    steps = min(calls(cache, medium, folders)[op], 3)
    for call in range(steps):
        delay_s = 1e9 if kind is FaultKind.DELAY else 0.0
        served = CACHES[cache](Medium(medium, next(folders), Fault(op, call, kind, bit=call, delay_s=delay_s)))
        served.run()
        assert served.medium.tier.injected[kind] == 1
        served.end()
        faults = served.counted("kvtier_faults")
        if kind is not FaultKind.CLOSED or call < steps - 1:
            assert faults.get(reason), f"step {call}: {reason} was not counted, but {faults}"
        # Two waits in one storage call (read, then write), and what a busy machine adds.
        assert served.longest_s < 2 * DEADLINE_S + 1.0, f"step {call} added {served.longest_s} s"


@pytest.mark.parametrize("medium", ["small nvme", "cxl", "shared_fs"])
@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("op", ["reserve", "release"])
@pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.ENOSPC, FaultKind.CLOSED], ids=lambda kind: kind.value)
def test_every_decision_fails_once(cache: str, medium: str, op: str, kind: FaultKind, folders: Iterator[Path]) -> None:
    """Reserve and release come from the engine's own thread: whatever they say, it hears of no exception. They do no
    I/O, so they cannot stall (`test_tier_nvme_steps`), and there is nothing to come short or to flip."""
    steps = calls(cache, medium, folders, reset=True)[op]
    assert steps >= (4 if op == "reserve" or medium == "small nvme" else 1), steps
    for call in range(min(steps, 4)):
        served = CACHES[cache](Medium(medium, next(folders), Fault(op, call, kind)))
        served.run()
        served.reset()
        served.run()
        assert served.medium.tier.injected[kind] == 1
        served.end()
        faults = served.counted("kvtier_faults")
        if kind is not FaultKind.CLOSED and (op, kind) != ("reserve", FaultKind.ENOSPC):  # no room is no fault
            reason = "io_error" if kind is FaultKind.EIO else "full"
            assert faults.get(reason), f"step {call}: {reason} was not counted, but {faults}"
        if kind is FaultKind.CLOSED and call < steps - 1:
            refused = served.counted("kvtier_stores_refused")
            assert faults.get("closed") or refused.get("no_room"), f"step {call}: {faults}, {refused}"
        assert served.longest_s < 2 * DEADLINE_S + 1.0, f"step {call} added {served.longest_s} s"


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [(FaultKind.EIO, "io_error"), (FaultKind.SHORT, "io_error"), (FaultKind.DELAY, "deadline")],
    ids=lambda value: getattr(value, "value", value),
)
def test_every_question_fails_once(cache: str, kind: FaultKind, outcome: str, folders: Iterator[Path]) -> None:
    """Whether a shared tier holds something is asked from threads of its own, and waited for within a deadline."""
    for call in range(min(calls(cache, "shared_fs", folders)["exists"], 3)):
        medium = Medium("shared_fs", next(folders), Fault("exists", call, kind, delay_s=1e9))
        served = CACHES[cache](medium)
        served.run()
        assert medium.tier.injected[kind] == 1
        served.end()
        asked = served.counted("kvtier_discoveries")
        assert asked.get(outcome), f"step {call}: {asked}"
        assert served.longest_s < 2 * DEADLINE_S + 1.0, f"step {call} added {served.longest_s} s"


STARTS = [(op, kind) for op in ("recover", "probe") for kind in FaultKind if (op, kind) != ("probe", FaultKind.SHORT)]


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize(("op", "kind"), STARTS, ids=[f"{op}-{kind.value}" for op, kind in STARTS])
def test_every_start_fails_once(
    cache: str, medium: str, op: str, kind: FaultKind, folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine starts over a tier that holds its rows, and that cannot say what it holds, or what it costs."""
    monkeypatch.setattr(attach, "ARRIVAL_S", 0.5)
    there = Medium(medium, next(folders))
    first = CACHES[cache](there)
    first.run()
    first.end()
    there.gate.clear()
    there.open(Fault(op, 0, kind, bit=3, delay_s=1e9))
    began = time.monotonic()
    served = CACHES[cache](there)
    assert time.monotonic() - began < 0.5 + 1.5, "the engine's start waits for nobody longer than that"
    assert there.tier.injected[kind] == 1
    left_out = kind is FaultKind.DELAY or (op == "recover" and kind in (FaultKind.EIO, FaultKind.ENOSPC))
    levels = served.cache.lower if isinstance(served.cache, TierCache) else served.cache.levels
    assert len(levels) == (0 if left_out else 1)
    served.run()
    if op == "probe" and kind in (FaultKind.EIO, FaultKind.ENOSPC):
        _until_closed(served)
        assert served.ask(PROMPTS[0]) == BLOCKS, "what it costs was learned from use"
        served.forget()
    served.end()
    faults, refused = served.counted("kvtier_faults"), served.counted("kvtier_stores_refused")
    failed = "probe_failed" if op == "probe" else "full" if kind is FaultKind.ENOSPC else "io_error"
    expected = {FaultKind.EIO: failed, FaultKind.ENOSPC: failed, FaultKind.DELAY: "stall"}.get(kind)
    assert expected is None or faults.get(expected), faults
    if kind is FaultKind.CLOSED:
        assert faults.get("probe_failed") or faults.get("closed") or refused.get("no_room"), (faults, refused)


def _until_closed(served: Served) -> None:
    """Ask until the breaker has taken the tier back."""
    deadline = time.monotonic() + 10
    while served.level.health.breaker.state is not BreakerState.CLOSED and time.monotonic() < deadline:
        time.sleep(0.05)
        served.timed(PROMPTS[0])
    assert served.level.health.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("cache", list(CACHES))
def test_a_tier_that_cannot_be_taken_in_changes_nothing(cache: str, folders: Iterator[Path]) -> None:
    medium = Medium("nvme", next(folders))
    served = CACHES[cache](Medium("shared_fs", next(folders)))
    for kind in (FaultKind.EIO, FaultKind.ENOSPC):
        medium.tier.close()
        with pytest.raises(TierError, match="recover fails as told"):
            served.cache.attach(medium.open(Fault("recover", 0, kind)))
        assert served.level.name == "shared_fs"
    medium.tier.close()
    assert served.cache.attach(medium.open()) == 0
    served.cache.detach("nvme")
    served.run()
    assert served.ask(PROMPTS[0]) == BLOCKS
    served.end()


@pytest.mark.parametrize("cache", list(CACHES))
def test_the_engine_goes_on_while_a_slow_tier_is_taken_in(cache: str, folders: Iterator[Path]) -> None:
    """What a tier holds is read, and what it costs is measured, without the cache's lock."""
    medium = Medium("nvme", next(folders))
    first = CACHES[cache](medium)
    first.run()
    first.end()
    medium.gate.clear()
    served = CACHES[cache](Medium("shared_fs", next(folders)))
    with ThreadPoolExecutor(1) as elsewhere:
        for op in ("recover", "probe"):
            tier = medium.open(Fault(op, 0, FaultKind.DELAY, delay_s=1e9))
            attaching = elsewhere.submit(served.cache.attach, tier)
            while not tier.injected[FaultKind.DELAY]:
                time.sleep(0.001)
            assert served.timed(PROMPTS[1]) in (0, BLOCKS), "nobody waits for it"
            assert not attaching.done()
            medium.gate.set()
            assert attaching.result(20) == 9
            medium.gate.clear()
            assert served.cache.detach("nvme")
    served.end()


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("size", [0, 4096, 100_000])
def test_every_file_is_truncated(cache: str, medium: str, size: int, folders: Iterator[Path]) -> None:
    """Somebody cuts off the slab, the region, or the files of rows, under the running engine."""
    served = CACHES[cache](Medium(medium, next(folders)))
    served.run()
    folder = served.medium.folder
    cut = 0
    for path in [*folder.parent.glob("*.cxl"), *folder.rglob("*.slab"), *folder.glob("kvtier/objects/*/*/*/*")]:
        if path.stat().st_size > min(size, 4096):
            os.truncate(path, min(size, path.stat().st_size // 2))
            cut += 1
    assert cut
    for prompt in PROMPTS:
        served.timed(prompt)
    assert served.ask(PROMPTS[0]) in range(BLOCKS + 1)
    served.forget()
    served.end()
    assert set(served.counted("kvtier_faults")) & {"corrupt", "io_error", "foreign"}


@pytest.mark.parametrize("cache", list(CACHES))
def test_a_tier_a_hundred_times_slower_is_left_alone_and_taken_back(cache: str, folders: Iterator[Path]) -> None:
    """Slow is bad: the breaker opens on latency alone, and closes again when the tier is itself again."""
    medium = Medium("nvme", next(folders))
    medium.gate.set()
    served = CACHES[cache](medium)
    health = served.level.health
    # Rows here are small and calls short: what a hundred times their cost is must count, too.
    health.limits = BreakerLimits(slow_floor_s=0.002, bad=3, first_pause_s=0.2, trials=1)
    health.breaker._limits = health.limits
    served.run()
    assert health.breaker.state is BreakerState.CLOSED
    medium.tier._sleep = time.sleep
    medium.tier._slowdown = 100.0
    plain = medium.tier.inner.read
    slow_s = max(0.005, 100 * health.read.probed_s(BLOCKS * ROW))
    medium.tier.inner.read = lambda *arguments: (time.sleep(slow_s / 100), plain(*arguments))[1]  # type: ignore[method-assign]
    for _ in range(6):
        served.ask(PROMPTS[0])
        served.forget()
    assert health.breaker.state is BreakerState.OPEN
    assert health.breaker.last_reason == "slow"
    began = time.monotonic()
    assert served.ask(PROMPTS[0]) == 0
    assert time.monotonic() - began < slow_s, "an open breaker costs nobody its latency"
    medium.tier._slowdown = 1.0
    medium.tier.inner.read = plain  # type: ignore[method-assign]
    deadline = time.monotonic() + 10
    while health.breaker.state is not BreakerState.CLOSED and time.monotonic() < deadline:
        time.sleep(0.05)
        served.ask(PROMPTS[0])
        served.forget()
    assert health.breaker.state is BreakerState.CLOSED
    assert served.ask(PROMPTS[0]) == BLOCKS
    served.cache.close()
