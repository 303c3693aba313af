"""Speculative promotion in a real TierCache: off by default; by time and by tool; off again where it is of no use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.request import CachedRequest
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.index.residency import ABSENT
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.place.promotion import Promoter, PromotionOptions
from kvtier.testing.clock import VirtualClock
from kvtier.testing.fake_engine import FakeEngine, token_chain
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier

ROW, BLOCKS, ROWS = 64, 6, 256


class Rig:
    """One cache over one tier; the engine's clock stands still but when told."""

    def __init__(self, on: bool = True, **options: Any) -> None:
        self.clock = VirtualClock()
        memory = DramTier.over(np.zeros(ROWS * ROW, np.uint8), ROW, ROWS, ROW, checksums=False)
        config = CacheConfig(dram_bytes=1, io_threads=2, gate=False, look_ahead="speculation" if on else True)
        below = MemoryTier(ROW, 1024, name="nvme")
        self.cache = TierCache(config, Geometry(16), memory, memory.row, [below], self.clock)
        if options:
            self.cache.speculation.promoter = Promoter(PromotionOptions(**options))
        self.engine = FakeEngine(self.cache)

    def turn(self, tokens: range | list[int], session: str = "", tool: str = "", calls: str = "") -> CachedRequest:
        """One request: what it carries of a tool, and what tool it calls at its end."""
        chain = token_chain(tokens)
        context = RequestContext(
            request_id=f"{session}-{self.clock.now()}",
            arrival_s=self.clock.now(),
            prompt_tokens=16 * len(tokens) + 1,
            session_id=session,
            tool=tool,
        )
        request = self.cache.open(context, chain)
        self.engine.lookup(request)
        loaded = self.engine.load(request)
        self.cache.end_load(request)
        self.cache.started(request)
        self.cache.commit_store(request, self.engine.compute(request, loaded))
        stop = StopReason.TOOL_USE if calls else StopReason.END_TURN
        self.cache.close_request(request, Outcome(finished_s=self.clock.now(), stop_reason=stop, next_tool=calls))
        self.engine.settle()
        return request

    def forget_memory(self) -> None:
        self.cache.memory.clear()
        self.cache.epoch += 1

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.cache.stepped()
            self.engine.settle()

    def in_memory(self, tokens: range | list[int]) -> int:
        match = self.cache.tree.walk(token_chain(tokens))
        return int((self.cache.memory.residency.slots_of(match) != ABSENT).sum())

    def counted(self, name: str) -> float:
        sums, _ = self.cache.recorder.drain()
        return sum(value for (found, labels), value in sums.items() if found == name and labels == ("speculation",))

    def close(self) -> None:
        self.cache.speculation.clear()
        assert self.cache.leases() == 0
        self.cache.check_integrity()
        self.cache.close()


def test_a_value_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match='choose true, false or "speculation"'):
        CacheConfig.from_mapping({"look_ahead": "speculate"})


def test_it_is_off_by_default() -> None:
    assert CacheConfig().look_ahead is True
    rig = Rig(on=False)
    rig.turn(range(BLOCKS), "s", calls="grep")
    rig.forget_memory()
    rig.wait(6)
    assert rig.in_memory(range(BLOCKS)) == 0
    rig.close()


def test_what_is_likely_to_be_back_comes_up_and_counts_as_used_when_it_is() -> None:
    rig = Rig()
    for i in range(3):
        rig.turn(range(100 * i, 100 * i + BLOCKS), f"s{i}", calls="grep")
    rig.forget_memory()
    rig.wait(3)
    assert [rig.in_memory(range(100 * i, 100 * i + BLOCKS)) for i in range(3)] == [BLOCKS] * 3
    assert rig.counted("kvtier_prefetched_rows") == 3 * BLOCKS
    request = rig.turn(range(BLOCKS + 1), "s0", tool="grep")
    assert not request.waited, "it was in memory"
    assert rig.counted("kvtier_prefetched_rows_used") == BLOCKS
    assert rig.cache.speculation.promoter.switch.use > 0
    rig.wait(3)
    rig.close()


def test_nothing_comes_up_while_somebody_waits_or_hints_keep_anything() -> None:
    rig = Rig()
    rig.turn(range(BLOCKS), "s", calls="grep")
    rig.forget_memory()
    rig.cache.watch.machine.mode = type(rig.cache.watch.machine.mode).CONSERVATIVE
    rig.wait(4)
    assert rig.in_memory(range(BLOCKS)) == 0
    rig.cache.watch.machine.mode = type(rig.cache.watch.machine.mode).NORMAL
    rig.wait(4)
    assert rig.in_memory(range(BLOCKS)) == BLOCKS
    rig.close()


def test_it_goes_off_where_nothing_is_used_and_tries_again_later() -> None:
    trial = 4 * BLOCKS * ROW
    rig = Rig(trial_bytes=trial, retry_s=100.0)
    moved = []
    for i in range(40):
        rig.turn(range(1000 + 100 * i, 1000 + 100 * i + BLOCKS), f"s{i}", calls="grep")
        rig.forget_memory()
        rig.wait(2)
        moved.append(rig.counted("kvtier_prefetched_rows"))
    switch = rig.cache.speculation.promoter.switch
    assert switch.turned_off == 1, "80 s, of which it was off for the last"
    assert moved[0] > 0
    assert sum(moved) * ROW < 3 * trial, "a trial's worth, and the plan that crossed it"
    assert moved[-20:] == [0.0] * 20
    for i in range(40, 70):
        rig.turn(range(1000 + 100 * i, 1000 + 100 * i + BLOCKS), f"s{i}", calls="grep")
        rig.forget_memory()
        rig.wait(2)
        moved.append(rig.counted("kvtier_prefetched_rows"))
    assert any(moved[40:]), "a second trial"
    assert switch.turned_off == 2
    rig.close()


def test_what_the_next_tool_needs_comes_up_when_the_one_before_has_answered() -> None:
    """P(edit | grep) is near one, and calls of edit have used a prefix that several sessions share."""
    rig = Rig(lead_max_s=3.0)
    manual = list(range(500, 500 + BLOCKS))
    for i in range(8):
        own = [10_000 + 100 * i + j for j in range(3)]
        rig.turn(own, f"s{i}", calls="grep")
        rig.clock.advance(1.0)
        rig.turn([*own, 9_000 + i], f"s{i}", tool="grep", calls="edit")
        rig.clock.advance(1.0)
        rig.turn([*manual, 20_000 + i], f"t{i}", tool="edit")
        rig.clock.advance(1.0)
    speculation = rig.cache.speculation
    rig.clock.advance(1e5)  # nothing of this is likely to be back by its survival curve
    rig.forget_memory()
    speculation._next_s = rig.clock.now() + 1.0
    asked = [77_000 + j for j in range(3)]
    rig.turn(asked, "new", tool="grep")
    needed = {rig.cache.tree.segment(i).depth: p for i, (p, _) in speculation._needed.items()}
    assert needed[0] == pytest.approx(dict(rig.cache.forecast.tools.next_tools(0))["edit"])
    rig.wait(2)
    assert rig.in_memory(manual) == BLOCKS
    rig.close()
