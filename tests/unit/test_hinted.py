"""Hints over a real TierCache: fetched before the return, kept, capped, and in nobody's way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.index.residency import ABSENT
from kvtier.model.request import Outcome, StopReason
from kvtier.place.hints import Hint, HintKind, HintOutcome
from kvtier.place.mode import Mode
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

ROW = 64
BLOCKS = 10


class Rig:
    """Memory for 32 blocks over a tier for 256."""

    def __init__(self, pin_bytes: int = 0) -> None:
        self.clock = VirtualClock(100.0)
        memory = DramTier.over(np.zeros(32 * ROW, np.uint8), ROW, 32, ROW, checksums=False)
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, hint_pin_bytes=pin_bytes)
        self.cache = TierCache(
            config, Geometry(16), memory, memory.row, [MemoryTier(ROW, 256, name="nvme")], self.clock
        )
        self.engine = FakeEngine(self.cache)

    def turn(self, session: str, first: int) -> int:
        """One turn of a session: BLOCKS blocks of prompt. Returns how many were offered."""
        offered = self.engine.serve(self.tokens(first), session=session)
        self.settle()
        return offered

    @staticmethod
    def tokens(first: int) -> range:
        return range(first, first + BLOCKS)

    def settle(self) -> None:
        self.cache.mover.drain(10.0)
        self.cache.poll()

    def crowd(self, sessions: int = 6) -> None:
        """Others fill memory."""
        for i in range(sessions):
            self.turn(f"other-{i}", 1000 + 100 * i)

    def in_memory(self, first: int) -> int:
        match = self.cache.tree.walk(token_chain(self.tokens(first)))
        return int((self.cache.memory.residency.slots_of(match) != ABSENT).sum())

    def hint(self, session: str, kind: HintKind, seconds: float = 0.0, client: str = "") -> HintOutcome:
        return self.cache.hinted.offer(Hint(session=session, kind=kind, seconds=seconds, client=client)).outcome

    def wait(self, seconds: float) -> None:
        """Let time pass as an engine's steps do."""
        for _ in range(int(seconds * 10)):
            self.clock.advance(0.1)
            self.cache.poll()
            self.settle()

    def counted(self, name: str) -> float:
        return sum(value for (n, _), value in self.cache.recorder._sums.items() if n == name)


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    yield r
    r.wait(40.0)
    r.cache.hinted.clear()
    assert r.cache.leases() == 0
    assert r.cache.memory.residency.pinned_rows == 0
    r.cache.check_integrity()
    r.cache.close()


def test_an_announced_session_is_back_in_memory_before_it_returns(rig: Rig) -> None:
    rig.turn("s", 0)
    rig.crowd()
    assert rig.in_memory(0) == 0, "without a hint the crowd has pushed it out"
    assert rig.hint("s", HintKind.RETURNS_IN, 3.0) is HintOutcome.ACCEPTED
    rig.wait(3.0)
    assert rig.in_memory(0) == BLOCKS
    rig.crowd(3)
    assert rig.in_memory(0) == BLOCKS, "and stays, whoever comes"
    before = rig.counted("kvtier_prefetched_rows_used")
    assert rig.turn("s", 0) == BLOCKS
    assert rig.counted("kvtier_prefetched_rows_used") - before == BLOCKS
    rig.wait(0.2)
    assert rig.cache.leases() == 0, "a return ends the hint"


def test_what_found_no_room_when_it_was_due_is_fetched_as_soon_as_there_is_some(rig: Rig) -> None:
    rig.turn("s", 0)
    rig.crowd()
    running = []
    for first in (5000, 5100):  # two requests that hold all of memory
        running.append(rig.engine.open(range(first, first + 15), 1))
        rig.cache.commit_store(running[-1], rig.engine.compute(running[-1]))
        rig.settle()
        rig.engine.lookup(running[-1])
    rest = rig.engine.open(range(5200, 5202), 1)
    rig.cache.commit_store(rest, rig.engine.compute(rest))
    rig.settle()
    rig.engine.lookup(rest)
    running.append(rest)
    assert rig.cache.memory.residency.pinned_rows == 32
    assert rig.hint("s", HintKind.RETURNS_IN, 2.0) is HintOutcome.ACCEPTED
    rig.wait(2.5)
    assert rig.in_memory(0) == 0, "it was due, and there was no room"
    for request in running:
        rig.engine.finish(request)
    rig.wait(0.3)
    assert rig.in_memory(0) == BLOCKS
    assert rig.turn("s", 0) == BLOCKS


def test_without_a_return_the_blocks_are_free_at_three_times_the_time(rig: Rig) -> None:
    rig.turn("s", 0)
    rig.hint("s", HintKind.RETURNS_IN, 2.0)
    rig.wait(5.5)
    assert rig.cache.memory.residency.pinned_rows == BLOCKS
    rig.wait(1.0)
    assert rig.cache.memory.residency.pinned_rows == 0
    assert rig.counted("kvtier_hint_returns") == 1


def test_a_hint_about_an_unknown_session_is_rejected(rig: Rig) -> None:
    assert rig.hint("nobody", HintKind.RETURNS_IN, 2.0) is HintOutcome.REJECTED


def test_a_demoted_session_leaves_memory_and_can_still_be_loaded(rig: Rig) -> None:
    rig.turn("s", 0)
    assert rig.in_memory(0) == BLOCKS
    assert rig.hint("s", HintKind.DEMOTE, 60.0) is HintOutcome.ACCEPTED
    assert rig.in_memory(0) == 0
    assert rig.turn("s", 0) == BLOCKS


def test_who_is_there_comes_before_who_was_announced(rig: Rig) -> None:
    """Every session is announced, so nothing of them may be kept at the price of a request that is running."""
    for i in range(3):
        rig.turn(f"s{i}", 100 * i)
        rig.hint(f"s{i}", HintKind.RETURNS_IN, 5.0 + i)
    kept = rig.cache.memory.residency.pinned_rows
    assert 0 < kept <= 16, "half of memory at most"
    big = rig.engine.open(range(5000, 5030), session="big")
    rig.engine.lookup(big)
    rig.engine.run(big)
    rig.settle()
    match = rig.cache.tree.walk(token_chain(range(5000, 5030)))
    assert int((rig.cache.memory.residency.slots_of(match) != ABSENT).sum()) == 30
    assert rig.counted("kvtier_hints_given_up") >= 1


def test_a_pin_holds_what_was_granted_grows_with_the_session_and_ends(rig: Rig) -> None:
    rig.cache.hinted.book.limits = type(rig.cache.hinted.book.limits)(pin_bytes_per_client=4 * ROW)
    rig.turn("s", 0)
    assert rig.hint("s", HintKind.PIN, 20.0) is HintOutcome.CLIPPED
    rig.crowd()
    assert rig.in_memory(0) == 4
    rig.wait(21.0)
    rig.crowd()
    assert rig.in_memory(0) == 0


def test_retained_blocks_stay_in_the_tier_below(rig: Rig) -> None:
    rig.turn("s", 0)
    rig.hint("s", HintKind.RETAIN_UNTIL, 30.0)
    for i in range(40):
        rig.turn(f"o{i}", 10_000 + 100 * i)
    assert rig.in_memory(0) == 0
    assert rig.turn("s", 0) == BLOCKS
    rig.wait(31.0)
    for i in range(40):
        rig.turn(f"p{i}", 50_000 + 100 * i)
    assert rig.turn("s", 0) == 0


def test_hints_of_a_request_hold_from_its_end(rig: Rig) -> None:
    request = rig.engine.open(rig.tokens(0), session="s")
    request.hints.append(Hint(session="s", kind=HintKind.RETURNS_IN, seconds=5.0))
    rig.engine.lookup(request)
    assert len(rig.cache.hinted) == 0
    rig.engine.run(request)
    rig.settle()
    assert len(rig.cache.hinted) == 1
    rig.wait(1.0)
    rig.crowd()
    assert rig.in_memory(0) == BLOCKS


def test_a_reset_forgets_hints_and_what_they_kept(rig: Rig) -> None:
    rig.turn("s", 0)
    rig.hint("s", HintKind.RETURNS_IN, 5.0)
    rig.cache.reset()
    assert len(rig.cache.hinted) == 0
    assert rig.cache.leases() == 0
    assert rig.hint("s", HintKind.RETURNS_IN, 5.0) is HintOutcome.REJECTED


def test_in_conservative_mode_nothing_is_fetched_until_it_is_over(rig: Rig) -> None:
    rig.turn("s", 0)
    rig.crowd()
    rig.cache.watch.machine.mode = Mode.CONSERVATIVE
    rig.hint("s", HintKind.RETURNS_IN, 30.0)
    rig.wait(9.0)
    assert rig.in_memory(0) == 0
    rig.wait(5.0)
    assert rig.cache.watch.machine.mode is Mode.NORMAL, "ten calm seconds"
    rig.wait(20.0)
    assert rig.in_memory(0) == BLOCKS


def test_ended_requests_close_with_their_outcome(rig: Rig) -> None:
    request = rig.engine.open(rig.tokens(0), session="s")
    rig.cache.close_request(request, Outcome(finished_s=0.0, stop_reason=StopReason.ABORTED))
    assert rig.hint("s", HintKind.RETURNS_IN, 1.0) is HintOutcome.ACCEPTED


def test_thousands_of_hinted_sessions_take_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick looks for the copies of a few of them, and comes round to all."""
    sessions = [f"s{i}" for i in range(150)]
    for i, session in enumerate(sessions):
        rig.turn(session, 10_000 + 100 * i)
        assert rig.hint(session, HintKind.RETAIN_UNTIL, 1000.0) is HintOutcome.ACCEPTED
    looked: list[str] = []
    keep = rig.cache.hinted._keep_below

    def noted(session: str) -> None:
        looked.append(session)
        keep(session)

    monkeypatch.setattr(rig.cache.hinted, "_keep_below", noted)
    rig.clock.advance(0.2)
    rig.cache.poll()
    assert 0 < len(looked) <= 64
    rig.wait(1.0)
    assert set(looked) == set(sessions)
