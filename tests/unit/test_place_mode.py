"""Conservative mode: entered on sustained overload, left after a calm dwell, and never in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.place.mode import Mode, ModeLimits, ModeMachine, RecentTail, Signals

LIMITS = ModeLimits(high=Signals(0.9, 2.0, 0.9), low=Signals(0.6, 1.0, 0.7), samples=3, dwell_s=10.0)
CALM, BETWEEN, BUSY = Signals(0.1, 0.0, 0.1), Signals(0.8, 0.0, 0.1), Signals(0.95, 0.0, 0.1)


def test_a_scripted_overload_enters_and_leaves_as_the_state_machine_says() -> None:
    machine = ModeMachine(LIMITS)
    script = [BUSY] * 2 + [CALM] + [BUSY] * 3 + [BETWEEN] * 5 + [CALM] * 5 + [BETWEEN] + [CALM] * 11
    modes = [machine.sample(signals, float(t)) for t, signals in enumerate(script)]
    entered = modes.index(Mode.CONSERVATIVE)
    assert entered == 5, "the third sample on end above the mark"
    assert machine.reason == "link_share"
    assert modes[entered:-1] == [Mode.CONSERVATIVE] * (len(script) - 1 - entered), "a break in the calm starts it over"
    assert modes[-1] is Mode.NORMAL
    assert machine.entries == 1
    assert machine.seconds(1e6) == pytest.approx(len(script) - 1 - entered)


def test_different_signals_do_not_add_up_to_one() -> None:
    machine = ModeMachine(LIMITS)
    for t in range(30):
        signals = Signals(0.95, 0.0, 0.0) if t % 2 else Signals(0.0, 3.0, 0.0)
        assert machine.sample(signals, float(t)) is Mode.NORMAL


def test_marks_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="queue_p99_s"):
        ModeLimits(low=Signals(0.1, 9.0, 0.1))
    with pytest.raises(ConfigError, match="samples"):
        ModeLimits(samples=0)


levels = st.sampled_from([0.0, 0.5, 0.65, 0.8, 0.95])
signal = st.builds(Signals, levels, st.sampled_from([0.0, 0.9, 1.5, 3.0]), levels)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(signal, st.floats(0.2, 3.0)), max_size=60))
def test_every_change_of_mode_is_what_the_history_says(samples: list[tuple[Signals, float]]) -> None:
    machine, now = ModeMachine(LIMITS), 0.0
    seen: list[tuple[float, Signals]] = []
    since = 0  # samples before this one belong to the mode before
    for signals, pause in samples:
        now += pause
        before = machine.mode
        seen.append((now, signals))
        after = machine.sample(signals, now)
        recent = [s for _, s in seen[since:][-LIMITS.samples :]]
        trips = len(recent) == LIMITS.samples and any(
            all(s[i] > LIMITS.high[i] for s in recent) for i in range(len(Signals._fields))
        )
        calm = [all(s[i] < LIMITS.low[i] for i in range(3)) for _, s in seen[since:]]
        run = len(calm) - (max((i for i, c in enumerate(calm) if not c), default=-1) + 1)
        rested = run > 0 and now - seen[-run][0] >= LIMITS.dwell_s
        expected = trips if before is Mode.NORMAL else not rested
        assert (after is Mode.CONSERVATIVE) == expected
        if after is not before:
            since = len(seen)


def test_the_tail_is_of_what_was_seen_lately() -> None:
    tail = RecentTail(span_s=10.0)
    assert tail.value(0.0) == 0.0
    for i in range(100):
        tail.add(float(i), 1.0)
    assert tail.value(2.0) == 98.0
    assert tail.value(11.5) == 0.0
