"""What the analyser says about traces small enough to count by hand."""

from __future__ import annotations

import msgspec
import pytest

from kvtier.errors import ConfigError
from kvtier.model.request import StopReason
from kvtier.sim.analysis import Analysis, analyze, parse_tiers
from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.conversations import conversations
from kvtier.sim.traces import TraceRequest
from kvtier.sim.workloads import AgentWorkload
from tests.sim.streams import stream


def told(requests: list[TraceRequest], sessions: str, stops: dict[int, StopReason] | None = None) -> list[TraceRequest]:
    """The same requests, of sessions named by one letter each."""
    replace = msgspec.structs.replace
    return [
        replace(
            each,
            context=replace(each.context, session_id=session),
            outcome=replace(each.outcome, stop_reason=(stops or {}).get(i, StopReason.END_TURN)),
        )
        for i, (each, session) in enumerate(zip(requests, sessions, strict=True))
    ]


def study(requests: list[TraceRequest], tiers: str = "") -> Analysis:
    return analyze("t", requests, seed=1, block_tokens=512, tiers=parse_tiers(tiers))


def test_where_hits_come_from() -> None:
    # session a: [1 2 3], then [1 2 3 4]; session b: [1 2 9] in between. 10 accesses, 5 hits.
    found = study(told(stream([[1, 2, 3], [1, 2, 9], [1, 2, 3, 4]]), "aba"))
    assert (found.requests, found.conversations, found.blocks, found.unique_blocks) == (3, 2, 10, 5)
    assert not found.conversations_inferred
    assert found.infinite_hit_rate == pytest.approx(0.5)
    assert found.sharing.hits_from_other_conversations == pytest.approx(0.2)  # b on [1 2]
    assert found.sharing.hits_from_own_history == pytest.approx(0.3)  # a on [1 2 3]
    assert found.sharing.shared_access_share == pytest.approx(0.6)  # [1 2], three times


def test_positions_and_hot_runs() -> None:
    found = study(told(stream([[1, 2, 3, 4, 5, 6]] * 3 + [[1, 2, 3, 4, 5, 7]]), "aabb"))
    near, far = found.depths[:2]
    assert (near.start_block, near.stop_block, near.unique_blocks, near.accesses) == (0, 4, 4, 16)
    assert (far.unique_blocks, far.accesses) == (3, 8)
    assert near.reuse_share == pytest.approx(12 / 17)
    assert far.reuse_share == pytest.approx(5 / 17)
    hottest = found.hottest[0]
    assert (hottest.depth_blocks, hottest.length_blocks, hottest.uses, hottest.conversations) == (0, 5, 4, 2)
    assert sum(run.reuse_share for run in found.hottest) == pytest.approx(1.0)


def test_returns_by_stop_reason() -> None:
    stops = {0: StopReason.TOOL_USE, 1: StopReason.TOOL_USE}
    requests = told(stream([[1], [1, 2], [9], [1, 2, 3], [8]], gap_s=10.0), "aabac", stops)
    end_turn, tool_use = study(requests).returns
    assert (end_turn.stop_reason, end_turn.requests, end_turn.returned, end_turn.p50_s) == ("end_turn", 3, 0.0, None)
    assert (tool_use.stop_reason, tool_use.requests, tool_use.returned) == ("tool_use", 2, 1.0)
    assert tool_use.p50_s == pytest.approx(15.0)
    assert tool_use.p10_s == pytest.approx(11.0)


def test_lru_targets() -> None:
    found = study(told(stream([[1, 2, 3], [9], [1, 2, 3], [9]]), "abab"))
    assert [(target.share, target.capacity_blocks) for target in found.lru_targets] == [(0.3, 3), (0.6, 4), (0.9, 4)]
    assert found.lru_targets[0].footprint_share == pytest.approx(0.75)


def test_each_tier_is_worth_what_it_adds() -> None:
    requests = AgentWorkload(sessions=10).requests(5)
    found = study(requests, "hbm=100,dram=300,nvme=100000")
    assert [tier.cumulative_blocks for tier in found.tiers] == [100, 400, 100400]
    assert sum(tier.lru_gain for tier in found.tiers) == pytest.approx(found.infinite_hit_rate)
    for tier in found.tiers:
        assert 0.0 <= tier.lru_gain <= tier.lru_hit_rate <= tier.best_hit_rate <= found.infinite_hit_rate
    saved = sum(tier.saved_tokens_per_hour for tier in found.tiers)
    assert saved == pytest.approx(found.infinite_hit_rate * found.blocks * 512 * 3600 / found.span_s)


def test_conversations_are_found_without_session_ids() -> None:
    a, b = [1, 2, 10, 11, 12], [1, 2, 20, 21, 22]
    assert infer([a, b, [*a, 13], [*b, 23], [*a, 13, 14], [5]]) == [0, 1, 0, 1, 0, 2]


def test_a_conversation_that_rewrites_its_tail_stays_one() -> None:
    assert infer([[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 9, 9]]) == [0, 0, 0]


def test_a_branch_below_a_shared_prefix_is_another_conversation() -> None:
    a, b = [1, 10, 11, 12], [1, 20, 21, 22]
    assert infer([a, b, [1]]) == [0, 1, 2]  # where two conversations part, neither is continued
    assert infer([a, b, [1, 20, 30, 31, 32], [1, 20, 21, 22, 23]]) == [0, 1, 1, 2]  # half is kept, then less than half


def infer(prompts: list[list[int]]) -> list[int]:
    requests = stream(prompts)
    return conversations(requests, CompiledTrace(requests))


def test_inference_agrees_with_the_session_ids_of_agents() -> None:
    requests = AgentWorkload(sessions=30, projects=3).requests(6)
    trace = CompiledTrace(requests)
    known = conversations(requests, trace)
    nameless = [msgspec.structs.replace(each, context=_nameless(each)) for each in requests]
    inferred = conversations(nameless, trace)
    same = sum(1 for a, b in zip(_links(known), _links(inferred), strict=True) if a == b)
    assert same / len(requests) > 0.95


def _nameless(request: TraceRequest) -> object:
    return msgspec.structs.replace(request.context, session_id="")


def _links(numbers: list[int]) -> list[int]:
    """For each request the index of its conversation's previous one."""
    last: dict[int, int] = {}
    links = []
    for i, number in enumerate(numbers):
        links.append(last.get(number, -1))
        last[number] = i
    return links


@pytest.mark.parametrize(
    ("text", "block_bytes", "tiers"),
    [
        ("", 0, []),
        ("hbm=5, dram=20", 0, [("hbm", 5), ("dram", 20)]),
        ("hbm=1GiB,dram=2TB", 2**20, [("hbm", 1024), ("dram", 1_907_348)]),
        ("hbm=1.5MiB", 1024, [("hbm", 1536)]),
        ("hbm=4096B", 1024, [("hbm", 4)]),
    ],
)
def test_tier_sizes(text: str, block_bytes: int, tiers: list[tuple[str, int]]) -> None:
    assert parse_tiers(text, block_bytes) == tiers


@pytest.mark.parametrize(
    ("text", "block_bytes", "says"),
    [
        ("hbm", 0, "name=size"),
        ("hbm=-3", 0, "name=size"),
        ("hbm=3Gi", 1, "name=size"),
        ("hbm=1GiB", 0, "--block-bytes"),
        ("hbm=1KiB", 2048, "no room for one block"),
        ("hbm=0", 0, "no room for one block"),
    ],
)
def test_tier_sizes_that_mean_nothing(text: str, block_bytes: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_tiers(text, block_bytes)
