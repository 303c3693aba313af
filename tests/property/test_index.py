"""The prefix tree and residency against their naive twin, under every order of operations hypothesis can think of."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.errors import IntegrityError, LeaseError
from kvtier.index.naive import NaiveIndex
from kvtier.index.residency import ABSENT, Residency
from kvtier.index.tree import PrefixTree
from kvtier.testing.clock import VirtualClock

GROUPS = 2
ROWS = 400


def chain_of(tokens: list[int]) -> bytes:
    """Chained keys, as an engine would make them: a key names its whole prefix."""
    keys, parent = [], b""
    for token in tokens:
        parent = hashlib.sha256(parent + bytes([token])).digest()
        keys.append(parent)
    return b"".join(keys)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(chain_of)


class IndexMachine(RuleBasedStateMachine):
    """Same operations on both indexes; they must never disagree."""

    @initialize()
    def start(self) -> None:
        self.tree = PrefixTree()
        self.residency = Residency("test", self.tree, ROWS, GROUPS, prefix_closed=False)
        self.naive = NaiveIndex(GROUPS)
        self.free = list(range(ROWS))
        self.pinned: list[np.ndarray] = []
        self.chains: list[bytes] = []

    @rule(chain=prompts)
    def insert(self, chain: bytes) -> None:
        path = self.tree.insert(chain)
        self.naive.insert(chain)
        self.chains.append(chain)
        assert b"".join(segment.keys for segment in path) == chain
        assert self.tree.chain_of(path[-1]) == chain

    @rule(chain=prompts)
    def walk(self, chain: bytes) -> None:
        match = self.tree.walk(chain)
        assert match.blocks == self.naive.walk(chain)
        assert self.residency.slots_of(match).tolist() == self.naive.slots_of(chain)

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), group=st.integers(0, GROUPS - 1))
    def publish(self, data: st.DataObject, group: int) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        match = self.tree.walk(chain)
        absent = np.flatnonzero(self.residency.slots_of(match)[:, group] == ABSENT)
        if not absent.size or len(self.free) < absent.size:
            return
        blocks = absent[: data.draw(st.integers(1, int(absent.size)))]
        slots = np.array([self.free.pop() for _ in blocks], np.int32)
        self.residency.publish(match.path, blocks, group, slots)
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            self.naive.publish(chain, block, group, slot)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def publish_twice_is_refused(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        match = self.tree.walk(chain)
        present = np.flatnonzero(self.residency.slots_of(match)[:, 0] != ABSENT)
        if present.size:
            with pytest.raises(IntegrityError):
                self.residency.publish(match.path, present[:1], 0, np.array([0], np.int32))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slots = self.residency.slots_of(self.tree.walk(data.draw(st.sampled_from(self.chains))))
        held = slots[slots != ABSENT]
        self.residency.pin(held)
        self.pinned.append(held)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.residency.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(data=st.data())
    def evict_a_tail(self, data: st.DataObject) -> None:
        leaves = sorted(self.residency.leaves(), key=lambda segment: segment.id)
        if not leaves:
            return
        leaf = data.draw(st.sampled_from(leaves))
        held = self._held()
        low, extent = self.residency.evictable_from(leaf), self.residency.extent(leaf)
        chain = self.tree.chain_of(leaf)
        for offset in range(low, extent):
            for group in range(GROUPS):
                assert self.naive.slots.get((chain[: (leaf.depth + offset + 1) * 32], group)) not in held
        if low > 0 and low == extent:
            last = [self.naive.slots.get((chain[: (leaf.depth + low) * 32], group)) for group in range(GROUPS)]
            assert held & set(last)
        keep = data.draw(st.integers(low, extent))
        gone = self.residency.drop(leaf, keep)
        expected = []
        for offset in range(keep, leaf.length):
            for group in range(GROUPS):
                slot = self.naive.slots.get((chain[: (leaf.depth + offset + 1) * 32], group))
                if slot is not None:
                    expected.append(slot)
                    self.naive.drop(chain, leaf.depth + offset, group)
        assert sorted(gone.tolist()) == sorted(expected)
        self.free += gone.tolist()

    @rule(data=st.data())
    def forget_a_ghost(self, data: st.DataObject) -> None:
        ghosts = sorted(
            (s for s in self.tree.segments() if not s.children and self.residency.extent(s) < s.length),
            key=lambda segment: segment.id,
        )
        if ghosts:
            ghost = data.draw(st.sampled_from(ghosts))
            chain, keep = self.tree.chain_of(ghost), self.residency.extent(ghost)
            depth = ghost.depth
            self.tree.truncate(ghost, keep)
            self.naive.forget(chain, depth + keep)
            self.chains = [c for c in self.chains if self.naive.walk(c) * 32 == len(c)]

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        self.residency.check_integrity()
        assert self.tree.blocks == len(self.naive.known)
        assert self.residency.resident_rows == len(self.naive.slots)
        assert self.residency.pinned_rows == len(self._held())

    def _held(self) -> set[int]:
        return {slot for slots in self.pinned for slot in slots.tolist()}


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_segment_splits_where_prompts_diverge_and_grows_where_they_do_not() -> None:
    tree = PrefixTree()
    tree.insert(chain_of([1, 1, 1, 1]))
    assert len(tree) == 1
    tree.insert(chain_of([1, 1, 1, 1, 2, 2]))
    assert len(tree) == 1, "a leaf nobody shares grows in place"
    tree.insert(chain_of([1, 1, 0]))
    assert sorted(segment.length for segment in tree.segments()) == [1, 2, 4]


def test_unpinning_more_often_than_pinned_raises() -> None:
    tree = PrefixTree()
    residency = Residency("test", tree, 8)
    slots = np.array([3], np.int32)
    residency.pin(slots)
    residency.unpin(slots)
    with pytest.raises(LeaseError):
        residency.unpin(slots)


def test_only_leaves_can_be_shortened() -> None:
    tree = PrefixTree()
    tree.insert(chain_of([1, 1]))
    tree.insert(chain_of([1, 2]))
    head = tree.walk(chain_of([1])).path[0]
    with pytest.raises(IntegrityError):
        tree.truncate(head, 0)


def test_the_virtual_clock_does_not_go_backwards() -> None:
    clock = VirtualClock(5.0)
    clock.advance_to(1.0)
    assert clock.now() == 5.0
    with pytest.raises(ValueError):
        clock.advance(-1.0)
