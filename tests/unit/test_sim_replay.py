"""The simulator's tier and replay loop, by hand-checkable examples and by their refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.policy import TierView, Victim
from kvtier.sim.compiled import NEVER, CompiledTrace
from kvtier.sim.experiment import RIVALS, Experiment, known_policies, online_policy
from kvtier.sim.lru_curve import LRUCurve
from kvtier.sim.replay import Replay, replay
from kvtier.sim.rivals import AgedLFU, Belady
from kvtier.sim.rivals.leafwise import LeafwisePolicy
from kvtier.sim.tier import SimTier
from kvtier.sim.traces.chains import pack
from kvtier.sim.traces.records import TRACE_KEY_BYTES, TraceRequest
from tests.sim.streams import request, stream

lru = online_policy("lru")


class Scripted(LeafwisePolicy):
    """Names what it was told to name."""

    name = "scripted"

    def __init__(self, view: TierView, script: Sequence[Sequence[tuple[int, int]]]) -> None:
        super().__init__(view)
        self._script = list(script)

    def victims(self, rows: int, now: float) -> list[Victim]:
        tree = self.view.tree
        return [Victim(tree.segment(segment_id), keep) for segment_id, keep in self._script.pop(0)]


def make_tier(capacity: int = 100) -> tuple[PrefixTree, SimTier]:
    tree = PrefixTree(key_bytes=TRACE_KEY_BYTES)
    return tree, SimTier(tree, capacity)


class TestSimTier:
    def test_a_split_divides_the_extent(self) -> None:
        tree, tier = make_tier()
        (leaf,) = tree.insert(pack([1, 2, 3, 4, 5, 6]))
        tier.admit([leaf])
        tier.evict(leaf, 4)
        head, other = tree.insert(pack([1, 2, 9]))
        assert (tier.extent(head), tier.extent(leaf), tier.extent(other)) == (2, 2, 0)
        assert list(tier.leaves()) == [leaf]
        tier.check_integrity()

    def test_a_split_beyond_the_extent_moves_the_leaf(self) -> None:
        tree, tier = make_tier()
        (leaf,) = tree.insert(pack([1, 2, 3, 4, 5, 6]))
        tier.admit([leaf])
        tier.evict(leaf, 2)
        head, _ = tree.insert(pack([1, 2, 3, 9]))
        assert (tier.extent(head), tier.extent(leaf)) == (2, 0)
        assert list(tier.leaves()) == [head]
        assert tier.leading([head, leaf]) == 2
        tier.check_integrity()

    def test_a_leaf_that_grows_keeps_its_extent(self) -> None:
        tree, tier = make_tier()
        tier.admit(tree.insert(pack([1, 2])))
        (leaf,) = tree.insert(pack([1, 2, 3]))
        assert tier.leading([leaf]) == 2
        assert tier.admit([leaf]) == [(leaf, 2)]
        assert tier.resident_rows == 3

    def test_parents_become_leaves_when_their_children_go(self) -> None:
        tree, tier = make_tier()
        tier.admit(tree.insert(pack([1, 2])))
        tier.admit(tree.insert(pack([1, 3])))
        head, three = tree.insert(pack([1, 3]))
        two = next(child for child in head.children.values() if child is not three)
        assert set(tier.leaves()) == {two, three}
        tier.evict(two, 0)
        assert list(tier.leaves()) == [three]
        tier.evict(three, 0)
        assert list(tier.leaves()) == [head]
        tier.check_integrity()

    def test_only_leaves_may_go_and_something_must(self) -> None:
        tree, tier = make_tier()
        tier.admit(tree.insert(pack([1, 2])))
        tier.admit(tree.insert(pack([1, 3])))
        head, three = tree.insert(pack([1, 3]))
        for segment, keep in ((head, 0), (three, 1), (three, -1)):
            with pytest.raises(IntegrityError, match="cannot be cut"):
                tier.evict(segment, keep)
        tier.check_integrity()

    def test_what_the_tree_forgets_is_not_resident(self) -> None:
        tree, tier = make_tier()
        tier.admit(tree.insert(pack([1, 2, 3, 4])))
        tier.admit(tree.insert(pack([1, 2, 9])))
        head, nine = tree.insert(pack([1, 2, 9]))
        tree.truncate(nine, 0)
        assert tier.resident_rows == 4
        tail = next(iter(head.children.values()))
        tree.truncate(tail, 1)
        assert tier.resident_rows == 3
        tree.truncate(tail, 0)
        assert list(tier.leaves()) == [head]
        tier.check_integrity()

    def test_integrity_check_sees_a_hole_in_a_path(self) -> None:
        tree, tier = make_tier()
        tier.admit(tree.insert(pack([1, 2])))
        tier.admit(tree.insert(pack([1, 3])))
        head, _ = tree.insert(pack([1, 3]))
        tier._extents[head.id] = 0
        with pytest.raises(IntegrityError, match="resident children"):
            tier.check_integrity()


class TestReplay:
    def test_a_prompt_hits_its_longest_resident_run(self) -> None:
        run = Replay(lru, 4)
        assert [run.step(each) for each in stream([[1, 2, 3], [1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4]])] == [0, 3, 2, 3]
        # the third request makes five blocks; the tail of the least recent leaf (block 4) goes
        result = run.result()
        assert (result.requests, result.blocks, result.hit_blocks, result.evicted_blocks) == (4, 14, 8, 2)
        assert result.hit_rate == 8 / 14

    def test_a_prompt_longer_than_the_tier_keeps_its_head(self) -> None:
        run = Replay(lru, 3)
        assert [run.step(each) for each in stream([[1, 2, 3, 4, 5]] * 3)] == [0, 3, 3]
        assert run.tier.resident_rows == 3

    def test_the_clock_is_the_traces(self) -> None:
        run = Replay(lru, 3)
        run.step(request([1], at_s=5.0))
        run.step(request([1], at_s=65.5))
        assert run.clock.now() == 65.5

    def test_empty_and_tiny(self) -> None:
        assert replay([], lru, 1).hit_rate == 0.0
        assert replay([], lru, 1).policy_us_per_request == 0.0
        assert replay(stream([[1], [1]]), lru, 1).hit_blocks == 1
        with pytest.raises(ValueError, match="at least one block"):
            Replay(lru, 0)

    def test_progress_adds_up(self) -> None:
        told: list[int] = []
        replay(stream([[1]] * 600), lru, 1, on_progress=told.append)
        assert sum(told) == 600
        assert len(told) > 1

    def test_policy_time_is_counted(self) -> None:
        assert replay(stream([[n] for n in range(50)]), lru, 3).policy_us_per_request > 0.0

    @pytest.mark.parametrize(
        ("script", "says"),
        [
            ([[]], "names no victims while 1 blocks must go"),
            ([[(1, 0)]], "cannot be cut"),  # block 1 still has resident children
            ([[(2, 1)]], "cannot be cut"),  # nothing would go
        ],
    )
    def test_a_policy_that_breaks_its_contract_is_caught(self, script: list[list[tuple[int, int]]], says: str) -> None:
        requests = stream([[1], [1, 2], [1, 3]])
        with pytest.raises(IntegrityError, match=says):
            replay(requests, lambda view: Scripted(view, script), 2)

    def test_a_policy_may_free_more_than_asked_and_in_several_rounds(self) -> None:
        requests = stream([[1, 2, 3], [9]])
        done = replay(requests, lambda view: Scripted(view, [[(1, 2)], [(1, 0)]]), 2)
        assert done.evicted_blocks == 3


class TestHindsight:
    def test_next_and_previous_use(self) -> None:
        trace = CompiledTrace(stream([[1, 2, 3], [7], [1, 2, 8]]))
        # the prompts are [1 2][3], [7], [1 2][8]
        assert trace.length[trace.segment].tolist() == [2, 1, 1, 2, 1]
        assert trace.next_use().tolist() == [2, NEVER, NEVER, NEVER, NEVER]
        assert trace.previous_use().tolist() == [-1, -1, -1, 0, -1]
        assert (trace.requests, trace.blocks, trace.unique_blocks) == (3, 7, 5)

    def test_blocks_appended_later_are_segments_of_their_own(self) -> None:
        trace = CompiledTrace(stream([[1], [1, 2], [1, 2, 3]]))
        assert trace.starts.tolist() == [0, 1, 3, 6]

    def test_belady_keeps_what_comes_back_first_and_may_decline_the_newcomer(self) -> None:
        requests = stream([[1], [2], [3], [2], [1], [3]])
        future = CompiledTrace(requests)
        run = Replay(lambda view: Belady(view, future), 2, future.tree)
        assert [run.step(each) for each in requests] == [0, 0, 0, 1, 1, 0]

    def test_lru_curve_by_hand(self) -> None:
        curve = LRUCurve(CompiledTrace(stream([[1, 2, 3], [9], [1, 2], [9]])))
        # before the third request the order is 9, 1, 2, 3; before the fourth 1, 2, 9, 3
        assert [curve.hit_blocks(c) for c in (0, 1, 2, 3, 4, 99)] == [0, 0, 1, 3, 3, 3]
        assert curve.best_hit_blocks == 3
        assert [curve.capacity_for(share) for share in (0.3, 0.6, 1.0)] == [2, 3, 3]

    def test_lru_curve_of_nothing(self) -> None:
        curve = LRUCurve(CompiledTrace([]))
        assert (curve.best_hit_blocks, curve.hit_rate(5)) == (0, 0.0)


def test_aged_lfu_lets_go_of_what_was_popular() -> None:
    once_popular = [[1]] * 5 + [[n] for n in range(2, 5)]
    later = [[100 + n // 2] for n in range(12)]  # each twice in a row
    run = Replay(AgedLFU, 1)
    hits = [run.step(each) for each in stream(once_popular + later)]
    # Without ageing block 1 would stay for good, and every newcomer would be declined.
    assert hits[:8] == [0, 1, 1, 1, 1, 0, 0, 0]
    assert sum(hits[8:]) > 0


class Silence:
    """A source of requests that do not depend on a seed."""

    name = "silence"
    seeded = False

    def __init__(self, strangers: int) -> None:
        self._prompts = [[1], [2], [1], *([n] for n in range(10, 10 + strangers))]

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        return stream(self._prompts)


def test_a_gap_under_half_a_point_is_no_yardstick() -> None:
    # Belady hits once, LRU never: of 103 accesses that is a point, of 303 a third of one.
    assert Experiment(Silence(100), 1).row("belady", 1, 1).gap_share == 1.0
    assert Experiment(Silence(300), 1).row("belady", 1, 1).gap_share is None


def test_every_rival_and_production_policy_is_known() -> None:
    assert {"lru", "belady", *RIVALS} <= set(known_policies())


def test_rivals_refuse_growth_so_that_history_is_uniform() -> None:
    for factory in RIVALS.values():
        tree, tier = make_tier()
        factory(tier)
        tree.insert(pack([1]))
        path = tree.insert(pack([1, 2]))
        assert [type(segment) for segment in path] == [Segment, Segment]
