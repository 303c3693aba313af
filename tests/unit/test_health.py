"""The breaker: opens on errors and on slowness, backs off with jitter, lets one trial through, recovers."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cache.tier_health import ON_TRIAL, NegativeCache, TierHealth
from kvtier.model.keys import key_at
from kvtier.observe.metrics import Recorder
from kvtier.testing.clock import VirtualClock
from kvtier.tiers.health import Breaker, BreakerLimits, BreakerState
from kvtier.tiers.protocol import RowId, RowStatus, TierProbe


def make(clock: VirtualClock, seed: int = 0, **limits: float) -> Breaker:
    return Breaker(
        clock, random.Random(seed), BreakerLimits(**{"window": 10, "bad": 3, "first_pause_s": 1.0, **limits})
    )


def open_it(breaker: Breaker) -> None:
    for _ in range(3):
        assert breaker.allow()
        breaker.failure("io_error")
    assert breaker.state is BreakerState.OPEN


def wait_until_allowed(breaker: Breaker, clock: VirtualClock, step_s: float = 0.01) -> float:
    start = clock.now()
    while not breaker.allow():
        clock.advance(step_s)
    return clock.now() - start


def test_stays_closed_while_bad_outcomes_are_rare() -> None:
    breaker = make(VirtualClock())
    for i in range(200):
        assert breaker.allow()
        if i % 5 == 0:
            breaker.failure("io_error")
        else:
            breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.opened == 0


def test_opens_after_enough_bad_outcomes_in_the_window_and_says_why() -> None:
    breaker = make(VirtualClock())
    for outcome in (True, False, True, False, False, True):
        if outcome:
            breaker.failure("io_error")
        else:
            breaker.success()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()
    assert (breaker.last_reason, breaker.opened) == ("io_error", 1)


def test_a_stall_opens_it_at_once_and_counts_as_a_relapse() -> None:
    clock = VirtualClock()
    breaker = make(clock)
    breaker.trip("stall")
    assert breaker.state is BreakerState.OPEN
    assert breaker.last_reason == "stall"
    first = wait_until_allowed(breaker, clock)
    breaker.trip("stall")
    assert breaker.opened == 2
    assert wait_until_allowed(breaker, clock) > 0.9 * first


def test_half_open_lets_one_trial_through_at_a_time_and_closes_after_enough() -> None:
    clock = VirtualClock()
    breaker = make(clock, trials=2)
    open_it(breaker)
    clock.advance(1.0)
    assert breaker.allow()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allow()
    breaker.success()
    assert breaker.allow()
    assert not breaker.allow()
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert all(breaker.allow() for _ in range(5))


def test_every_relapse_doubles_the_pause_up_to_the_longest() -> None:
    clock = VirtualClock()
    breaker = make(clock, longest_pause_s=8.0)
    open_it(breaker)
    pauses = []
    for _ in range(6):
        pauses.append(wait_until_allowed(breaker, clock))
        breaker.failure("io_error")
    for pause, longest in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert longest / 2 - 0.011 <= pause <= longest + 0.011
    assert breaker.opened == 7


def test_recovery_resets_the_pause() -> None:
    clock = VirtualClock()
    breaker = make(clock, trials=1)
    open_it(breaker)
    for _ in range(4):
        wait_until_allowed(breaker, clock)
        breaker.failure("io_error")
    wait_until_allowed(breaker, clock)
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    open_it(breaker)
    assert wait_until_allowed(breaker, clock) <= 1.011


def test_a_relapse_needs_only_one_bad_trial_but_closed_starts_with_a_clean_slate() -> None:
    clock = VirtualClock()
    breaker = make(clock, trials=1)
    open_it(breaker)
    clock.advance(1.0)
    assert breaker.allow()
    breaker.success()
    breaker.failure("io_error")
    breaker.failure("io_error")
    assert breaker.state is BreakerState.CLOSED


def test_a_trial_nobody_reports_does_not_block_for_ever() -> None:
    clock = VirtualClock()
    breaker = make(clock, trial_s=5.0)
    open_it(breaker)
    clock.advance(1.0)
    assert breaker.allow()
    clock.advance(4.9)
    assert not breaker.allow()
    clock.advance(0.2)
    assert breaker.allow()


def test_outcomes_of_transfers_begun_before_it_opened_are_ignored() -> None:
    clock = VirtualClock()
    breaker = make(clock)
    open_it(breaker)
    for _ in range(10):
        breaker.success()
        breaker.failure("late")
    assert breaker.state is BreakerState.OPEN
    assert (breaker.opened, breaker.last_reason) == (1, "io_error")
    clock.advance(1.0)
    assert breaker.allow()


def test_jitter_is_seeded_and_spreads() -> None:
    def pause(seed: int) -> float:
        clock = VirtualClock()
        breaker = make(clock, seed)
        open_it(breaker)
        return wait_until_allowed(breaker, clock, 0.001)

    pauses = [pause(seed) for seed in range(20)]
    assert pauses == [pause(seed) for seed in range(20)]
    assert max(pauses) - min(pauses) > 0.2


def test_threads_never_get_two_trials_at_once() -> None:
    clock = VirtualClock()
    breaker = make(clock)
    open_it(breaker)
    clock.advance(1.0)
    admitted: list[bool] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        admitted.extend(breaker.allow() for _ in range(50))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_outcomes_never_break_the_rules(seed: int) -> None:
    draw, clock = random.Random(seed), VirtualClock()
    breaker = make(clock, seed)
    opened = 0
    for _ in range(5_000):
        before = breaker.state
        if breaker.allow():
            assert before is not BreakerState.OPEN or breaker.state is BreakerState.HALF_OPEN
            if draw.random() < 0.3:
                breaker.failure("io_error")
            else:
                breaker.success() if draw.random() < 0.5 else breaker.failure("slow")
        else:
            assert breaker.state is not BreakerState.CLOSED
        assert breaker.opened >= opened
        opened = breaker.opened
        clock.advance(draw.random())
    assert opened > 10


@pytest.mark.parametrize(
    ("read", "seconds", "state"),
    [
        (True, 0.04, BreakerState.CLOSED),
        (True, 0.2, BreakerState.OPEN),
        (False, 0.2, BreakerState.CLOSED),
        (False, 0.6, BreakerState.OPEN),
    ],
)
def test_slow_reads_open_it_sooner_than_slow_writes(read: bool, seconds: float, state: BreakerState) -> None:
    """A busy disk syncs small rows in 100 ms where it was probed with 1: nobody waits for that."""
    health = TierHealth("nvme", VirtualClock(), Recorder(), TierProbe(0.001, 1e9, 0.001, 1e9))
    row = RowId(bytes(32), b"", 0)
    for _ in range(health.limits.bad):
        assert health.breaker.state is BreakerState.CLOSED
        health.note([row], [RowStatus.OK], [(4096, seconds)], read, 4096, seconds)
    assert health.breaker.state is state
    assert health.breaker.last_reason == ("slow" if state is BreakerState.OPEN else "")


def test_a_tier_that_was_never_measured_is_tried_and_is_not_slow() -> None:
    clock, recorder = VirtualClock(), Recorder()
    health = TierHealth("pool", clock, recorder, ON_TRIAL)
    health.on_trial()
    assert not health.usable()
    clock.advance(1.0)
    row = RowId(bytes(32), b"", 0)
    for _ in range(health.limits.trials):
        assert health.usable()
        health.sent()
        health.note([row], [RowStatus.OK], [(4096, 30.0)], True, 4096, 30.0)
    assert health.breaker.state is BreakerState.CLOSED
    assert recorder.drain()[0]["kvtier_faults", ("pool", "probe_failed")] == 1


@given(st.data())
def test_rows_left_alone_are_found_among_a_chain_s_as_one_by_one(data: st.DataObject) -> None:
    clock = VirtualClock()
    rows = NegativeCache(clock)
    chain = bytes(range(256)) * 2  # 16 keys, the last 8 like the first
    for _ in range(data.draw(st.integers(0, 12))):
        block, group = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 1)))
        key = key_at(chain, block) or bytes(32)
        if data.draw(st.booleans()):
            rows.failed(key, group)
        else:
            rows.worked(key, group)
        clock.advance(data.draw(st.sampled_from([0.0, 0.4, 3.0])))
    blocks = data.draw(st.integers(0, 16))
    expected = [(b, g) for b in range(blocks) for g in (0, 1) if rows.holds(key_at(chain, b), g)]
    assert rows.among(chain, blocks) == expected
