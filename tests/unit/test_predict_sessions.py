"""Sessions inferred from the tree: who continues whom, what is shared, what is left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.index.tree import PrefixTree
from kvtier.predict.sessions import Arrival, Sessions
from kvtier.predict.subjects import NOTHING_KNOWN, SubjectKind, Subjects


class Cache:
    """Sessions over a tree of one-byte keys, where a prompt is a word."""

    def __init__(self) -> None:
        self.tree = PrefixTree(key_bytes=1)
        self.subjects = Subjects(0.0)
        self.sessions = Sessions(self.tree, self.subjects, self, 0.0)
        self.events: list[tuple[SubjectKind, float]] = []
        self.tails: list[int] = []

    def returned(self, subject: int, now: float) -> None:
        age_s = now - float(self.subjects.since_s[subject])
        self.events.append((SubjectKind(self.subjects.kind[subject]), age_s))

    def left_behind(self, tail: int) -> None:
        self.tails.append(tail)

    def ask(self, prompt: str, now: float, output: str = "", ended_s: float | None = None) -> Arrival:
        arrival = self.sessions.arrive(self.tree.insert(prompt.encode()), now)
        return self.end(arrival, prompt + output, now if ended_s is None else ended_s)

    def end(self, arrival: Arrival, text: str, now: float) -> Arrival:
        path = self.tree.insert(text.encode())
        if self.sessions.is_current(arrival.visit, arrival.serial):
            self.subjects.running[arrival.visit] = False
            self.subjects.wait_from(arrival.visit, now)
            self.sessions.grow(arrival, path, now)
        self.sessions.check_integrity()
        return arrival

    def owner(self, text: str) -> SubjectKind:
        segment = self.tree.walk(text.encode()).path[-1]
        return SubjectKind(self.subjects.kind[int(self.sessions.owner[segment.id])])


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_longer_prompt_continues_the_session(cache: Cache) -> None:
    first = cache.ask("system-hello", 10.0)
    second = cache.ask("system-hello-world", 25.0)
    assert (first.gap_s, second.gap_s) == (-1.0, 15.0)
    assert cache.events == [(SubjectKind.VISIT, 15.0)]
    assert second.new_blocks == len("-world")
    assert cache.subjects.turn[second.visit] == 2
    assert cache.subjects.live == 1


def test_the_gap_starts_when_the_response_ended(cache: Cache) -> None:
    arrival = cache.sessions.arrive(cache.tree.insert(b"abc"), 10.0)
    cache.end(arrival, "abcdef", 14.0)
    assert cache.ask("abcdefg", 20.0).gap_s == 6.0


def test_the_same_prompt_again_is_the_same_session(cache: Cache) -> None:
    cache.ask("abc", 0.0)
    assert cache.ask("abc", 5.0).gap_s == 5.0
    assert cache.subjects.live == 1


def test_a_fork_leaves_a_tail_that_can_return(cache: Cache) -> None:
    cache.ask("abcXYZ", 0.0)
    cache.ask("abcUVW", 10.0)
    assert len(cache.tails) == 1
    assert cache.owner("abcXYZ") == SubjectKind.TAIL
    assert cache.subjects.end[cache.tails[0]] == 6
    cache.events.clear()
    back = cache.ask("abcXYZ!", 40.0)
    assert cache.events == [(SubjectKind.TAIL, 30.0)]
    assert back.gap_s == 30.0


def test_what_two_visits_cover_is_shared_and_waits_for_any_touch(cache: Cache) -> None:
    cache.ask("abcXYZ", 0.0)
    cache.ask("abcUVW", 10.0)
    cache.ask("abcXYZ!", 40.0)
    assert cache.owner("abc") == SubjectKind.RUN
    assert cache.owner("abcXYZ!") == SubjectKind.VISIT
    cache.events.clear()
    third = cache.ask("abcPQR", 43.0)
    assert third.branched
    assert third.gap_s < 0
    assert cache.events == [(SubjectKind.RUN, 3.0)]
    assert [(run.count, run.gap_s) for run in third.runs] == [(3, 3.0)]


def test_a_run_touched_in_part_waits_on_below(cache: Cache) -> None:
    for t, prompt in enumerate(("abcdX", "abcdY", "abcdX1", "abcdY1")):
        cache.ask(prompt, float(t))
    cache.events.clear()
    cache.ask("abZ", 9.0)
    assert cache.events == []
    cache.ask("abcdX12", 10.0)
    assert sorted(age for kind, age in cache.events if kind == SubjectKind.RUN) == [1.0, 7.0]


def test_a_running_request_is_not_continued(cache: Cache) -> None:
    arrival = cache.sessions.arrive(cache.tree.insert(b"abcX"), 0.0)
    other = cache.ask("abcY", 1.0)
    assert other.gap_s < 0
    assert other.branched
    assert cache.events == []
    cache.end(arrival, "abcX", 2.0)


def test_simultaneous_twins_become_one(cache: Cache) -> None:
    first = cache.sessions.arrive(cache.tree.insert(b"abc"), 0.0)
    second = cache.sessions.arrive(cache.tree.insert(b"abc"), 0.0)
    assert not cache.sessions.is_current(first.visit, first.serial)
    cache.end(first, "abc1", 1.0)
    cache.end(second, "abc2", 1.0)
    assert cache.subjects.live == 1
    assert cache.events == []


def test_forgetting_blocks_forgets_their_visits(cache: Cache) -> None:
    cache.ask("abcX", 0.0)
    cache.ask("abcY", 1.0)
    cache.ask("abcX1", 2.0)
    leaf = cache.tree.walk(b"abcX1").path[-1]
    cache.tree.truncate(leaf, 1)
    cache.sessions.check_integrity()
    cache.tree.truncate(leaf, 0)
    cache.sessions.check_integrity()
    assert cache.ask("abcX1", 3.0).gap_s < 0


def test_random_life_keeps_the_invariants() -> None:
    for seed in range(20):
        rng, cache, now = random.Random(seed), Cache(), 0.0
        running: list[tuple[Arrival, str]] = []
        for _ in range(120):
            now += rng.expovariate(1.0)
            known = [cache.tree.chain_of(segment).decode() for segment in cache.tree.segments()] or [""]
            stem = rng.choice(known)
            prompt = stem[: rng.randint(0, len(stem))] + "".join(rng.choices("ab", k=rng.randint(1, 4)))
            choice = rng.random()
            if choice < 0.6:
                cache.ask(prompt, now, "".join(rng.choices("ab", k=rng.randint(0, 3))), now + 0.1)
            elif choice < 0.75:
                running.append((cache.sessions.arrive(cache.tree.insert(prompt.encode()), now), prompt))
            elif choice < 0.85 and running:
                arrival, text = running.pop(rng.randrange(len(running)))
                cache.end(arrival, text, now)
            else:
                leaves = [segment for segment in cache.tree.segments() if not segment.children]
                if leaves:
                    leaf = rng.choice(leaves)
                    cache.tree.truncate(leaf, rng.randint(0, leaf.length - 1))
            cache.sessions.check_integrity()
        assert cache.subjects.kind[NOTHING_KNOWN] == SubjectKind.RUN
        assert np.isfinite(cache.subjects.since_s).all()
