"""Hints: leases in time, capped pins, later evidence over earlier claims, little lost by false or late ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.place.hints import NOTHING, Hint, HintBook, HintKind, HintLimits, HintOutcome, Return

MB = 1 << 20


def book(pins: int = 100 * MB, sessions: int = 100) -> HintBook:
    return HintBook(HintLimits(sessions=sessions, pin_bytes_per_client=pins, longest_s=600.0, lead_max_s=10.0))


def hint(kind: HintKind, seconds: float = 0.0, session: str = "s", **more: object) -> Hint:
    return Hint(session=session, kind=kind, seconds=seconds, **more)  # type: ignore[arg-type]


def test_a_return_is_fetched_once_when_its_lead_begins_and_protected_until_it_is_back() -> None:
    b = book()
    assert b.offer(hint(HintKind.RETURNS_IN, 20.0), 0.0, MB).outcome is HintOutcome.ACCEPTED
    assert b.standing("s", 0.0).keeps_in_memory(0.0), "what is resident stays"
    assert b.due(9.9, lambda s: 60.0) == [], "no sooner than the longest lead"
    assert b.due(16.9, lambda s: 3.0) == []
    assert b.due(17.0, lambda s: 3.0) == ["s"]
    assert b.due(17.1, lambda s: 3.0) == [], "once"
    b.arrived("s", 21.0)
    assert b.standing("s", 21.0) == NOTHING
    assert b.returns == {Return.ON_TIME: 1}
    assert len(b) == 0


def test_a_return_that_does_not_come_is_forgotten_at_three_times_its_time() -> None:
    b = book()
    b.offer(hint(HintKind.RETURNS_IN, 20.0), 100.0, MB)
    assert b.standing("s", 159.9).keeps_in_memory(159.9)
    assert b.expire(159.9) == []
    assert b.standing("s", 160.0) == NOTHING
    assert b.expire(160.0) == ["s"]
    assert b.returns == {Return.NEVER: 1}
    assert len(b) == 0
    b.arrived("s", 200.0)
    assert b.returns.total() == 1


@pytest.mark.parametrize(("back_s", "how"), [(1.0, Return.EARLY), (18.0, Return.ON_TIME), (45.0, Return.LATE)])
def test_how_returns_went_is_counted(back_s: float, how: Return) -> None:
    b = book()
    b.offer(hint(HintKind.RETURNS_IN, 20.0), 0.0, MB)
    b.arrived("s", back_s)
    assert b.returns == {how: 1}


def test_pins_are_capped_by_client_and_given_back() -> None:
    b = book(pins=10 * MB)
    assert b.offer(hint(HintKind.PIN, 60.0, "a", client="x"), 0.0, 8 * MB).outcome is HintOutcome.ACCEPTED
    clipped = b.offer(hint(HintKind.PIN, 60.0, "b", client="x"), 0.0, 8 * MB)
    assert clipped == (HintOutcome.CLIPPED, "pin_bytes")
    assert b.standing("b", 0.0).pinned_bytes == 2 * MB
    assert b.offer(hint(HintKind.PIN, 60.0, "c", client="x"), 0.0, MB) == (HintOutcome.REJECTED, "pin_bytes")
    assert b.offer(hint(HintKind.PIN, 60.0, "c", client="y"), 0.0, MB).outcome is HintOutcome.ACCEPTED
    again = b.offer(hint(HintKind.PIN, 60.0, "a", client="x", max_bytes=MB), 1.0, 8 * MB)
    assert again.outcome is HintOutcome.ACCEPTED
    assert b.pinned_bytes("x") == 3 * MB, "a later pin takes the place of the one before"
    assert set(b.expire(61.0)) == {"a", "b", "c"}
    assert b.pinned_bytes("x") == b.pinned_bytes("y") == 0


def test_pins_are_rejected_where_none_are_granted_and_time_is_clipped() -> None:
    b = book(pins=0)
    assert b.offer(hint(HintKind.PIN, 1.0), 0.0, MB).outcome is HintOutcome.REJECTED
    assert b.offer(hint(HintKind.RETAIN_UNTIL, 1e6), 0.0, MB) == (HintOutcome.CLIPPED, "time")
    assert not b.standing("s", 600.0).keeps_somewhere(600.0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_malformed_hint_changes_nothing(bad: float) -> None:
    b = book()
    assert b.offer(hint(HintKind.RETURNS_IN, bad), 0.0, MB) == (HintOutcome.REJECTED, "malformed")
    assert b.offer(hint(HintKind.RETURNS_IN, 1.0, ""), 0.0, MB).outcome is HintOutcome.REJECTED
    assert b.offer(hint(HintKind.PIN, 1.0, max_bytes=-1), 0.0, MB).outcome is HintOutcome.REJECTED
    assert len(b) == 0


def test_later_evidence_overrides_what_was_said_before() -> None:
    b = book()
    b.offer(hint(HintKind.PIN, 60.0), 0.0, MB)
    b.offer(hint(HintKind.RETURNS_IN, 5.0), 0.0, MB)
    b.offer(hint(HintKind.DEMOTE, 60.0), 1.0, MB)
    now = b.standing("s", 1.0)
    assert (now.demoted, now.keeps_in_memory(1.0), b.pinned_bytes("")) == (True, False, 0)
    assert b.due(5.0, lambda s: 3.0) == []
    b.offer(hint(HintKind.RETURNS_IN, 5.0), 2.0, MB)
    assert not b.standing("s", 2.0).demoted
    b.offer(hint(HintKind.DEMOTE), 3.0, MB)
    b.arrived("s", 4.0)
    assert b.standing("s", 4.0) == NOTHING, "whoever is back is not away for long"


def test_a_pin_outlives_the_return_and_sharing_outlives_the_session() -> None:
    b = book()
    b.offer(hint(HintKind.PIN, 60.0), 0.0, MB)
    b.offer(hint(HintKind.RETURNS_IN, 2.0), 0.0, MB)
    b.offer(hint(HintKind.SHARE, 100.0), 0.0, MB)
    b.arrived("s", 2.0)
    assert b.standing("s", 59.0).keeps_in_memory(59.0)
    assert not b.standing("s", 61.0).keeps_in_memory(61.0)
    assert b.standing("s", 61.0).shared
    assert b.standing("s", 61.0).keeps_somewhere(61.0)


def test_a_prefetch_is_due_at_once_and_counts_as_no_return() -> None:
    b = book()
    b.offer(hint(HintKind.PREFETCH), 5.0, MB)
    assert b.due(5.0, lambda s: 0.0) == ["s"]
    b.arrived("s", 6.0)
    assert b.returns.total() == 0


def test_room_is_given_up_latest_return_first_and_pins_last() -> None:
    b = book()
    for session, seconds in (("later", 50.0), ("soon", 2.0)):
        b.offer(hint(HintKind.RETURNS_IN, seconds, session), 0.0, MB)
    b.offer(hint(HintKind.PIN, 60.0, "pinned"), 0.0, MB)
    b.offer(hint(HintKind.RETAIN_UNTIL, 60.0, "below"), 0.0, MB)
    assert b.by_urgency(0.0) == ["pinned", "soon", "later"]
    b.give_up("pinned", 0.0)
    assert b.by_urgency(0.0) == ["soon", "later"]
    assert b.pinned_bytes("") == 0


def test_the_book_is_bounded() -> None:
    b = book(sessions=2)
    for session in "ab":
        b.offer(hint(HintKind.RETURNS_IN, 1.0, session), 0.0, MB)
    assert b.offer(hint(HintKind.RETURNS_IN, 1.0, "c"), 0.0, MB) == (HintOutcome.REJECTED, "too_many_sessions")
    assert b.offer(hint(HintKind.RETURNS_IN, 1.0, "c"), 100.0, MB).outcome is HintOutcome.ACCEPTED
    for _ in range(10_000):
        b.offer(hint(HintKind.RETURNS_IN, 500.0, "c"), 100.0, MB)
    assert len(b._starts._heap) < 100
    assert len(b._ends._heap) < 100


steps = st.tuples(
    st.sampled_from(["offer", "offer", "offer", "arrive", "due", "expire", "give_up"]),
    st.sampled_from(list(HintKind)),
    st.sampled_from("abc"),
    st.sampled_from("xy"),
    st.floats(0, 50),
    st.integers(0, 8 * MB),
    st.floats(0, 20),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=60))
def test_whatever_is_said_caps_hold_leases_end_and_nothing_is_left_over(
    history: list[tuple[str, HintKind, str, str, float, int, float]],
) -> None:
    b, now = book(pins=10 * MB), 0.0
    wanted: Counter[str] = Counter()
    for what, kind, session, client, seconds, n_bytes, pause in history:
        now += pause
        if what == "offer":
            answer = b.offer(Hint(session=session, kind=kind, seconds=seconds, client=client), now, n_bytes)
            if answer.outcome is not HintOutcome.REJECTED and kind in (HintKind.RETURNS_IN, HintKind.PREFETCH):
                wanted[session] = 1
        elif what == "arrive":
            b.arrived(session, now)
            wanted[session] = 0
            assert not b.standing(session, now).demoted
            assert not b.standing(session, now).returns_s
        elif what == "due":
            for name in b.due(now, lambda s: 2.0):
                assert wanted[name] == 1, "named once per hint, and never after the session is back"
                wanted[name] = 0
        elif what == "expire":
            b.expire(now)
        else:
            b.give_up(session, now)
            assert not b.standing(session, now).keeps_in_memory(now)
        b.expire(now)
        standings = {s: b.standing(s, now) for s in "abc"}
        pinned = sum(s.pinned_bytes for s in standings.values())
        assert b.pinned_bytes("x") + b.pinned_bytes("y") == pinned
        assert max(b.pinned_bytes("x"), b.pinned_bytes("y")) <= 10 * MB
        assert set(b.by_urgency(now)) == {s for s, standing in standings.items() if standing.keeps_in_memory(now)}
    later = now + 2000.0
    b.expire(later)
    assert len(b) == 0
    assert b.pinned_bytes("x") == b.pinned_bytes("y") == 0
    assert b.due(later, lambda s: 1e9) == []
