"""Model test: a shared tier, through restarts and the deeds of another process, does what the reference tier does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvtier.testing.rows import chain_rows, payload_of, soiled_buffers
from kvtier.testing.shared_memory_tier import Medium, SharedMemoryTier
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import MooncakeClient, PoolOptions
from kvtier.tiers.protocol import RowId, RowStatus, SharedTier, Slots
from kvtier.tiers.shared_fs import SharedFsTier
from tests.pool_rig import needs_mooncake, running_pool

ROW = 5000
HANDLES = 64
Open = Callable[[bytes], SharedTier]
"""Opens the tier under test in a key space."""


class SharedRestarts(RuleBasedStateMachine):
    """Two processes store, find, read and forget rows on one medium, and start anew. Rows are common, handles not."""

    def __init__(self, open_tier: Open) -> None:
        super().__init__()
        self.open_tier = open_tier
        self.space = os.urandom(32)
        self.medium: Medium = {}
        self.rows: list[RowId] = []
        self.chains = 0

    @initialize()
    def begin(self) -> None:
        self.ours = [self.open_tier(self.space) for _ in range(2)]
        self.models = [SharedMemoryTier(ROW, HANDLES, self.medium) for _ in range(2)]
        self.held: list[list[tuple[int, int, RowId]]] = [[], []]

    def take(self, who: int, n: int) -> tuple[Slots, Slots] | None:
        if len(self.held[who]) + n > HANDLES:
            return None
        ours, theirs = self.ours[who].reserve(n), self.models[who].reserve(n)
        assert ours is not None
        assert theirs is not None
        return ours, theirs

    def hold(self, who: int, slots: tuple[Slots, Slots], rows: list[RowId]) -> None:
        self.held[who] += zip(slots[0].tolist(), slots[1].tolist(), rows, strict=True)

    @rule(who=st.integers(0, 1), n=st.integers(1, 6), group=st.integers(0, 1))
    def store(self, who: int, n: int, group: int) -> None:
        slots = self.take(who, n)
        if slots is None:
            return
        self.chains += 1
        rows = chain_rows(n, self.chains, group)
        payloads = [payload_of(row, ROW) for row in rows]
        for tier, mine in ((self.ours[who], slots[0]), (self.models[who], slots[1])):
            assert tier.write(mine, rows, payloads) == [RowStatus.OK] * n
        self.hold(who, slots, rows)
        self.rows += rows

    @rule(who=st.integers(0, 1), data=st.data())
    def find(self, who: int, data: st.DataObject) -> None:
        """What the other one stored is found, adopted and read."""
        picked = data.draw(st.lists(st.sampled_from(self.rows), unique=True, max_size=6)) if self.rows else []
        asked = [*picked, *chain_rows(1, "never")]
        there = self.ours[who].exists(asked)
        assert there == self.models[who].exists(asked) == [True] * len(picked) + [False]
        slots = self.take(who, len(picked))
        if slots is not None:
            self.ours[who].adopt(slots[0], picked)
            self.models[who].adopt(slots[1], picked)
            self.hold(who, slots, picked)

    @rule(who=st.integers(0, 1), data=st.data())
    def read(self, who: int, data: st.DataObject) -> None:
        if not self.held[who]:
            return
        picked = data.draw(st.lists(st.sampled_from(self.held[who]), unique=True, max_size=8))
        rows = [row for _, _, row in picked]
        if data.draw(st.booleans()):
            rows = rows[1:] + rows[:1]
        answers = []
        for tier, column in ((self.ours[who], 0), (self.models[who], 1)):
            into = soiled_buffers(len(rows), ROW)
            slots = np.array([item[column] for item in picked], np.int32)
            statuses = tier.read(slots, rows, into)
            answers.append([(s, bytes(b) if s is RowStatus.OK else b"") for s, b in zip(statuses, into, strict=True)])
        assert answers[0] == answers[1]

    @rule(who=st.integers(0, 1), data=st.data())
    def forget(self, who: int, data: st.DataObject) -> None:
        """Rows are forgotten by one and stay for the other."""
        if not self.held[who]:
            return
        going = data.draw(st.lists(st.sampled_from(self.held[who]), unique=True, min_size=1, max_size=10))
        self.ours[who].release(np.array([item[0] for item in going], np.int32))
        self.models[who].release(np.array([item[1] for item in going], np.int32))
        self.held[who] = [item for item in self.held[who] if item not in going]

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        self.ours[who].close()
        self.models[who].close()
        self.ours[who] = self.open_tier(self.space)
        self.models[who] = SharedMemoryTier(ROW, HANDLES, self.medium)
        assert self.ours[who].recover() == []
        self.held[who] = []
        assert self.ours[who].exists(self.rows) == [True] * len(self.rows)

    @invariant()
    def agree(self) -> None:
        for ours, model, held in zip(self.ours, self.models, self.held, strict=True) if self.chains else ():
            assert ours.stats().used_rows == model.stats().used_rows == len(held)
            assert ours.stats().medium_bytes <= ours.stats().cap_bytes

    def teardown(self) -> None:
        for tier in getattr(self, "ours", []):
            tier.close()


def run(open_tier: Open, examples: int) -> None:
    soak = bool(os.environ.get("KVTIER_SOAK"))
    run_state_machine_as_test(
        lambda: SharedRestarts(open_tier),
        settings=settings(max_examples=200 if soak else examples, stateful_step_count=20, deadline=None),
    )


def test_shared_fs_does_what_the_reference_does() -> None:
    folder = tempfile.mkdtemp(prefix="kvtier-shared-")
    try:
        run(lambda space: SharedFsTier(folder, space, "layout", ROW, 256 << 20), 20)
    finally:
        shutil.rmtree(folder)


@needs_mooncake
def test_the_pool_does_what_the_reference_does() -> None:
    with running_pool() as pool:
        options = PoolOptions(master=pool.address, host="127.0.0.1")
        client = MooncakeClient(options)
        leave, client.close = client.close, lambda: None  # type: ignore[method-assign]
        try:
            run(lambda space: PoolTier(options, space, "l", ROW, handles=HANDLES, connect=lambda _: client), 20)
        finally:
            leave()


def test_a_tier_parted_from_the_past_finds_nothing_of_it(tmp_path: Path) -> None:
    first, second = (SharedFsTier(str(tmp_path), b"\1" * 32, "layout", ROW, 64 << 20) for _ in range(2))
    rows = chain_rows(3)
    slots = first.reserve(3)
    assert slots is not None
    assert first.write(slots, rows, [payload_of(row, ROW) for row in rows]) == [RowStatus.OK] * 3
    second.part(b"nonce")
    assert second.exists(rows) == [False] * 3
    assert first.exists(rows) == [True] * 3
    first.part(b"nonce")
    assert first.exists(rows) == [False] * 3
    first.close()
    second.close()
