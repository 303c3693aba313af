"""The engine's thread must not do something for every block of a prompt: calls are counted, for time is the machine's.

`python -m benchmarks.control [--vllm]` says what they take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.control import Control, Stopwatch

SMALL, LARGE = 1_024, 8_192
PART = 512  # rows of one promotion, or one store


class Calls(Control):
    """Counts calls of functions, Python's own included, instead of seconds."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        with counted(self.seconds[name]):
            yield


@contextmanager
def counted(into: list[float]) -> Iterator[None]:
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        into.append(count)


def calls_of(make: Callable[[int, int], Any], blocks: int) -> dict[str, float]:
    control: Stopwatch = make(blocks, PART)
    try:
        for _ in range(2):
            control.seconds.clear()
            control.round()  # type: ignore[attr-defined]
    finally:
        control.close()  # type: ignore[attr-defined]
    return {name: max(counts) for name, counts in control.seconds.items()}


def check(make: Callable[[int, int], Any], apart: set[str]) -> None:
    small, large = calls_of(make, SMALL), calls_of(make, LARGE)
    assert set(small) == set(large)
    for name in set(small) - apart:
        grown = large[name] - small[name]
        assert grown < (LARGE - SMALL) / 4, f"{name}: {small[name]} calls for {SMALL} blocks, {large[name]} for {LARGE}"
        assert small[name] < SMALL, f"{name}: {small[name]} calls for {SMALL} blocks"


def test_no_call_of_the_cache_does_something_for_every_block() -> None:
    check(Calls, apart=set())


def test_nor_does_what_vllm_calls_but_where_it_asks_key_by_key() -> None:
    pytest.importorskip("vllm")
    from benchmarks.control_vllm import VllmControl

    class VllmCalls(VllmControl):
        @contextmanager
        def timed(self, name: str) -> Iterator[None]:
            with counted(self.seconds[name]):
                yield

    check(VllmCalls, apart={"lookup, every key", "prepare_store, 512 keys", "complete_store, 512 keys"})
