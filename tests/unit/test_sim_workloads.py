"""Generated workloads: seeded, in order, and true to the parameters they were given."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter

import pytest

from kvtier.errors import ConfigError
from kvtier.model.request import InputType, StopReason, Transition
from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.lru_curve import LRUCurve
from kvtier.sim.traces import TraceRequest
from kvtier.sim.workloads import (
    WORKLOADS,
    AgentWorkload,
    BurstWorkload,
    ChatWorkload,
    RAGWorkload,
    Tool,
    Workload,
    parse_workload,
)
from tests.sim.streams import blocks_of

SMALL: list[Workload] = [
    AgentWorkload(sessions=10),
    BurstWorkload(hours=0.3, clients=4, fanout=10),
    ChatWorkload(sessions=30),
    RAGWorkload(queries=100),
]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.kind)
def test_equal_seeds_equal_requests_in_order_of_time(workload: Workload) -> None:
    first, again, other = workload.requests(1), workload.requests(1), workload.requests(2)
    assert first == again
    assert first != other
    arrivals = [each.arrival_s for each in first]
    assert arrivals == sorted(arrivals)
    assert all(each.blocks > 0 and each.outcome.finished_s == each.arrival_s for each in first)


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.kind)
def test_role_spans_cover_the_prompt_without_gaps(workload: Workload) -> None:
    for each in workload.requests(1):
        edges = [(span.start_block, span.stop_block) for span in each.context.role_spans]
        assert edges[0][0] == 0
        assert edges[-1][1] == each.blocks
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


def test_agents_call_tools_by_the_matrix() -> None:
    workload = AgentWorkload(sessions=400, finish=0.1)
    names = [tool.name for tool in workload.tools]
    counts: Counter[tuple[str, str]] = Counter()
    for each in workload.requests(seed=11):
        if each.context.tool and each.outcome.next_tool:
            counts[each.context.tool, each.outcome.next_tool] += 1
    for i, used in enumerate(names):
        trials = sum(counts[used, following] for following in names)
        assert trials > 200
        for j, following in enumerate(names):
            expected = workload.matrix[i][j]
            error = math.sqrt(expected * (1.0 - expected) / trials)
            assert abs(counts[used, following] / trials - expected) < 4.5 * error


def test_an_agents_requests_tell_one_story() -> None:
    workload = AgentWorkload(sessions=20)
    by_session: dict[str, list[TraceRequest]] = {}
    for each in workload.requests(seed=4):
        by_session.setdefault(each.context.session_id, []).append(each)
    pauses = {StopReason.TOOL_USE: [], StopReason.END_TURN: []}
    for story in by_session.values():
        for before, after in itertools.pairwise(story):
            assert after.context.tool == before.outcome.next_tool
            expected = InputType.TOOL_RESULT if before.outcome.next_tool else InputType.USER_TEXT
            assert after.context.input_type is expected
            assert after.chain.startswith(before.chain)
            if after.context.transition is Transition.SAME_TOOL_REPEAT:
                assert after.context.tool == before.context.tool
            pauses[before.outcome.stop_reason].append(after.arrival_s - before.arrival_s)
        assert story[-1].outcome.stop_reason is StopReason.END_TURN
    mean = {reason: sum(seen) / len(seen) for reason, seen in pauses.items()}
    assert mean[StopReason.END_TURN] > 5 * mean[StopReason.TOOL_USE]


def test_tools_keep_their_durations_and_sizes() -> None:
    tools = (Tool("quick", 1.0, 1.0, 0.1), Tool("slow", 20.0, 100.0, 0.1))
    workload = AgentWorkload(sessions=60, tools=tools, matrix=((0.5, 0.5), (0.5, 0.5)))
    seen: dict[str, list[tuple[float, int]]] = {"quick": [], "slow": []}
    last: dict[str, TraceRequest] = {}
    for each in workload.requests(seed=2):
        before = last.get(each.context.session_id)
        if before is not None and each.context.tool:
            added = each.blocks - before.blocks - before.outcome.output_tokens // 512
            seen[each.context.tool].append((each.arrival_s - before.arrival_s, added))
        last[each.context.session_id] = each
    for tool in tools:
        took, added = zip(*seen[tool.name], strict=True)
        assert sorted(took)[len(took) // 2] == pytest.approx(tool.duration_s, rel=0.1)
        assert sum(added) / len(added) == pytest.approx(tool.result_blocks, rel=0.25)


def test_chats_grow_and_share_few_system_prompts() -> None:
    requests = ChatWorkload(sessions=60, assistants=3, system_blocks=4).requests(seed=1)
    assert len({tuple(chain[:4]) for chain in blocks_of(requests)}) == 3
    turns = Counter(each.context.session_id for each in requests)
    assert len(turns) == 60
    assert 3.0 < len(requests) / 60 < 8.0


def test_rag_hits_the_first_documents_only() -> None:
    workload = RAGWorkload(queries=400, documents=50)
    requests = workload.requests(seed=1)
    trace = CompiledTrace(requests)
    infinite = LRUCurve(trace).best_hit_blocks / trace.blocks
    assert 0.3 < infinite < 0.8
    heads = {tuple(chain[: workload.system_blocks]) for chain in blocks_of(requests)}
    assert len(heads) == 1


def test_rag_with_a_single_document_still_ends() -> None:
    assert len(RAGWorkload(queries=5, documents=1, retrieved=3).requests(1)) == 5


def test_bursts_share_within_and_not_between() -> None:
    requests = BurstWorkload(hours=1.0, clients=1, fanout=30, shared_blocks=10).requests(seed=1)
    bursts: dict[str, set[tuple[int, ...]]] = {}
    for each, chain in zip(requests, blocks_of(requests), strict=True):
        if each.context.session_id.startswith("burst"):
            bursts.setdefault(each.context.session_id.split("-")[1], set()).add(tuple(chain[:10]))
    assert len(bursts) > 3
    assert all(len(heads) == 1 for heads in bursts.values())
    assert len(set.union(*bursts.values())) == len(bursts)


def test_a_workload_is_named_by_what_differs_from_its_defaults() -> None:
    assert parse_workload("workload:agent").name == "workload:agent"
    assert parse_workload("workload:agent?sessions=7&finish=0.25").name == "workload:agent?sessions=7&finish=0.25"
    assert parse_workload("workload:chat", block_tokens=64).block_tokens == 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workload:unheard", "choose one of agent, bursts, chat, rag"),
        ("workload:agent?colour=1", "colour"),
        ("workload:agent?sessions=many", "sessions"),
        ("workload:agent?sessions=0", "sessions"),
        ("workload:agent?finish=0", "finish"),
        ("workload:bursts?period_s=0", "period_s"),
        ("workload:bursts?hours=inf", "hours"),
        ("workload:chat?sessions", "sessions"),
    ],
)
def test_what_does_not_exist_is_an_error(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_workload(text)


def test_a_matrix_must_fit_its_tools() -> None:
    with pytest.raises(ValueError, match="rows that sum to 1"):
        AgentWorkload(matrix=((1.0,),))
    with pytest.raises(ValueError, match="rows that sum to 1"):
        AgentWorkload(tools=(Tool("a", 1.0, 1.0),), matrix=((0.5,),))


def test_requests_do_not_depend_on_the_process() -> None:
    """Neither on hash randomisation nor on memory addresses."""
    program = (
        "import hashlib\n"
        "from kvtier.sim.workloads import WORKLOADS\n"
        "from kvtier.sim.replay import replay\n"
        "from kvtier.sim.experiment import known_policies, online_policy\n"
        "requests = WORKLOADS['agent'](sessions=8).requests(3)\n"
        "print(hashlib.sha256(b''.join(each.chain for each in requests)).hexdigest())\n"
        "for name in known_policies():\n"
        "    if name != 'belady':\n"
        "        done = replay(requests, online_policy(name), 120)\n"
        "        print(name, done.hit_blocks, done.evicted_blocks)\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "77")
    }
    assert len(told) == 1
    assert "lru" in told.pop()


def test_every_kind_is_reachable_by_name() -> None:
    assert {workload.kind for workload in SMALL} == set(WORKLOADS)
