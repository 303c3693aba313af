"""Trace readers: what each makes of a tiny file, and where it says a broken one is broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TraceError
from kvtier.model.request import InputType, StopReason
from kvtier.sim.traces import Trace, detect_format, load_trace, total_blocks, unique_blocks
from kvtier.sim.traces.records import DAY_S
from tests.sim.streams import blocks_of

HEADER = {"id": "s", "block_size": 64, "hash_id_scope": "global", "tool_tokens": 0, "system_tokens": 0}


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def header(session: str, **changes: Any) -> dict[str, Any]:
    return {**HEADER, "id": session, **changes}


def turn(t: float, new: list[list[int]], k: int = 0, **fields: Any) -> dict[str, Any]:
    ids = k + sum(count for _, count in new)
    return {"t": t, "a": 0, "i": 64 * ids, "out": 9, "it": ["text"], "st": "end_turn", "k": k, "new": new, **fields}


def agent_trace(tmp_path: Path, *lines: dict[str, Any]) -> Trace:
    return load_trace(write(tmp_path / "agents.jsonl", lines))


def shared_run(trace: Trace, first: int, second: int) -> int:
    """How many leading blocks two requests have in common."""
    mine, theirs = (blocks_of(trace.requests())[index] for index in (first, second))
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


class TestMooncake:
    def test_drops_the_partial_block_and_orders_by_time(self, tmp_path: Path) -> None:
        lines = [
            {"timestamp": 2500, "input_length": 1300, "output_length": 7, "hash_ids": [5, 6, 8]},
            {"timestamp": 1000, "input_length": 1024, "output_length": 3, "hash_ids": [5, 6]},
            {"timestamp": 1000, "input_length": 511, "output_length": 3, "hash_ids": [9]},
        ]
        trace = load_trace(write(tmp_path / "m.jsonl", lines))
        first, second = trace.requests()
        assert (trace.format_name, trace.seeded) == ("mooncake", False)
        assert [first.arrival_s, second.arrival_s] == [1.0, 2.5]
        assert [first.blocks, second.blocks] == [2, 2]
        assert first.chain == second.chain
        assert (second.context.prompt_tokens, second.outcome.output_tokens) == (1300, 7)
        assert (total_blocks(trace.requests()), unique_blocks(trace.requests())) == (4, 2)

    def test_ids_of_any_64_bits(self, tmp_path: Path) -> None:
        line = {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [2**64 - 1, 2**63 + 1]}
        assert load_trace(write(tmp_path / "m.jsonl", [line])).requests()[0].blocks == 2

    def test_larger_blocks_group_ids(self, tmp_path: Path) -> None:
        line = {"timestamp": 0, "input_length": 512 * 5, "output_length": 0, "hash_ids": [1, 2, 3, 4, 5]}
        assert load_trace(write(tmp_path / "m.jsonl", [line]), block_tokens=1024).requests()[0].blocks == 2

    def test_gzip_is_recognised_by_content(self, tmp_path: Path) -> None:
        line = {"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [1]}
        path = tmp_path / "no-suffix"
        path.write_bytes(gzip.compress(json.dumps(line).encode()))
        assert len(load_trace(path).requests()) == 1


class TestAgentSessions:
    def test_eight_ids_make_a_block_and_a_remainder_is_dropped(self, tmp_path: Path) -> None:
        trace = agent_trace(tmp_path, HEADER, turn(0.0, [[1, 19]]), turn(5.0, [[100, 6]], k=18))
        first, second = trace.requests()
        assert [first.blocks, second.blocks] == [2, 3]
        assert shared_run(trace, 0, 1) == 2
        assert second.arrival_s - first.arrival_s == pytest.approx(5.0)

    def test_a_block_is_its_content_and_its_past(self, tmp_path: Path) -> None:
        trace = agent_trace(tmp_path, HEADER, turn(0.0, [[1, 16]]), turn(1.0, [[90, 8], [9, 8]]), turn(2.0, [[1, 16]]))
        assert (shared_run(trace, 0, 1), shared_run(trace, 0, 2)) == (0, 2)
        # ids 9..16 are in both, but below another prefix: not the same block
        assert unique_blocks(trace.requests()) == 4

    def test_a_change_inside_a_kept_block_changes_it(self, tmp_path: Path) -> None:
        trace = agent_trace(tmp_path, HEADER, turn(0.0, [[1, 16]]), turn(1.0, [[50, 4]], k=12))
        assert shared_run(trace, 0, 1) == 1

    def test_agents_of_a_session_keep_their_own_prompts(self, tmp_path: Path) -> None:
        trace = agent_trace(
            tmp_path,
            HEADER,
            turn(0.0, [[1, 8]]),
            turn(1.0, [[200, 8]], a="helper"),
            turn(2.0, [[300, 8]], k=8),
            turn(3.0, [[400, 8]], k=8, a="helper"),
        )
        assert [each.context.session_id for each in trace.requests()] == ["s", "s/helper", "s", "s/helper"]
        assert (shared_run(trace, 0, 2), shared_run(trace, 1, 3), shared_run(trace, 0, 3)) == (1, 1, 0)

    def test_global_ids_are_shared_between_sessions_local_ones_are_not(self, tmp_path: Path) -> None:
        def two(scope: str) -> Trace:
            session = [turn(0.0, [[1, 16]])]
            first, second = header("a", hash_id_scope=scope), header("b", hash_id_scope=scope)
            return agent_trace(tmp_path, first, *session, second, *session)

        assert shared_run(two("global"), 0, 1) == 2
        assert shared_run(two("local"), 0, 1) == 0

    def test_local_scope_shares_the_head_of_equal_tools_and_system_prompt(self, tmp_path: Path) -> None:
        def local(session: str, system_tokens: int) -> dict[str, Any]:
            return header(session, hash_id_scope="local", tool_tokens=512, system_tokens=system_tokens)

        trace = agent_trace(
            tmp_path,
            *(local("a", 512), turn(0.0, [[1, 24]])),
            *(local("b", 512), turn(0.0, [[71, 24]])),
            *(local("c", 511), turn(0.0, [[1, 24]])),
        )
        by_session = {each.context.session_id: i for i, each in enumerate(trace.requests())}
        assert shared_run(trace, by_session["a"], by_session["b"]) == 2
        assert shared_run(trace, by_session["a"], by_session["c"]) == 0

    def test_local_scope_head_is_the_main_agents(self, tmp_path: Path) -> None:
        def session(name: str) -> list[dict[str, Any]]:
            head = header(name, hash_id_scope="local", system_tokens=512)
            return [head, turn(0.0, [[1, 8]]), turn(1.0, [[50, 8]], a="sub"), turn(2.0, [[1, 8]], a="sub")]

        trace = agent_trace(tmp_path, *session("a"), *session("b"))
        chains = {(each.context.session_id, i % 3): each.chain for i, each in enumerate(sorted_by_line(trace))}
        assert chains["a", 0] == chains["b", 0] == chains["a/sub", 2]  # its own ids say it has the same head
        assert chains["a/sub", 1] != chains["b/sub", 1]

    def test_arrivals_are_drawn_by_the_seed_and_cut_after_a_day(self, tmp_path: Path) -> None:
        lines = [line for n in range(40) for line in (header(f"{n}"), turn(0.0, [[1, 8]]), turn(DAY_S / 2, [[1, 8]]))]
        trace = agent_trace(tmp_path, *lines)
        assert trace.seeded
        first, again, other = trace.requests(1), trace.requests(1), trace.requests(2)
        assert [each.arrival_s for each in first] == [each.arrival_s for each in again]
        assert [each.arrival_s for each in first] != [each.arrival_s for each in other]
        assert all(0.0 <= each.arrival_s < DAY_S for each in first)
        assert first == sorted(first, key=lambda each: each.arrival_s)
        assert 40 < len(first) < 80
        assert all(each.outcome.finished_s == each.context.arrival_s for each in first)

    def test_recorded_starts_are_kept(self, tmp_path: Path) -> None:
        trace = agent_trace(tmp_path, header("a", start=100.0), turn(1.0, [[1, 8]]), turn(2 * DAY_S, [[1, 8]]))
        assert not trace.seeded
        assert [each.arrival_s for each in trace.requests(7)] == [101.0, 100.0 + 2 * DAY_S]

    @pytest.mark.parametrize(
        ("st", "reason"),
        [
            ("tool_use", StopReason.TOOL_USE),
            ("end_turn", StopReason.END_TURN),
            ("max_tokens", StopReason.LENGTH),
            ("stop_sequence", StopReason.STOP_SEQUENCE),
            ("", StopReason.UNKNOWN),
            (None, StopReason.UNKNOWN),
            ("something_new", StopReason.UNKNOWN),
        ],
    )
    def test_stop_reasons(self, tmp_path: Path, st: str | None, reason: StopReason) -> None:
        trace = agent_trace(tmp_path, HEADER, turn(0.0, [[1, 8]], st=st))
        assert trace.requests()[0].outcome.stop_reason is reason

    @pytest.mark.parametrize(
        ("types", "kind"),
        [
            (["text"], InputType.USER_TEXT),
            (["text", "tool_result"], InputType.TOOL_RESULT),
            ([], InputType.UNKNOWN),
        ],
    )
    def test_input_types(self, tmp_path: Path, types: list[str], kind: InputType) -> None:
        trace = agent_trace(tmp_path, HEADER, turn(0.0, [[1, 8]], it=types, api=3.5))
        assert trace.requests()[0].context.input_type is kind
        assert trace.requests()[0].service_s == 3.5


def sorted_by_line(trace: Trace) -> list[Any]:
    return sorted(trace.requests(), key=lambda each: int(each.context.request_id))


class TestRequestsJsonl:
    def test_tokens_are_cut_into_blocks(self, tmp_path: Path) -> None:
        lines = [{"t": 1.0, "tokens": list(range(9))}, {"t": 2.0, "tokens": [*range(4), 99, 5, 6, 7]}]
        trace = load_trace(write(tmp_path / "r.jsonl", lines), block_tokens=4)
        assert [each.blocks for each in trace.requests()] == [2, 2]
        assert shared_run(trace, 0, 1) == 1
        assert trace.requests()[0].context.prompt_tokens == 9

    def test_every_field(self, tmp_path: Path) -> None:
        line = {
            "t": 1.5,
            "block_ids": [7, 7, 8],
            "session": "x",
            "tool": "grep",
            "input_type": "tool_result",
            "stop_reason": "tool_use",
            "next_tool": "edit",
            "input_length": 1600,
            "output_length": 12,
            "service_s": 2.0,
            "anything_else": [1],
        }
        (found,) = load_trace(write(tmp_path / "r.jsonl", [line])).requests()
        assert found.blocks == 3
        assert (found.arrival_s, found.service_s) == (1.5, 2.0)
        assert (found.context.session_id, found.context.tool, found.context.prompt_tokens) == ("x", "grep", 1600)
        assert found.context.input_type is InputType.TOOL_RESULT
        assert found.outcome.stop_reason is StopReason.TOOL_USE
        assert (found.outcome.next_tool, found.outcome.output_tokens) == ("edit", 12)


GOOD_MOONCAKE = {"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("lines", "line", "says"),
    [
        (["{"], 1, "truncated"),
        (["", '{"timestamp": 0}'], 2, "fit none of"),
        ([GOOD_MOONCAKE, {**GOOD_MOONCAKE, "hash_ids": "x"}], 2, "hash_ids"),
        ([GOOD_MOONCAKE, {**GOOD_MOONCAKE, "hash_ids": [-1]}], 2, "hash_ids"),
        ([GOOD_MOONCAKE, {**GOOD_MOONCAKE, "hash_ids": [2**64]}], 2, "64 bits"),
        ([GOOD_MOONCAKE, {**GOOD_MOONCAKE, "input_length": 1024}], 2, "do not cover"),
        ([GOOD_MOONCAKE, {"timestamp": 1}], 2, "input_length"),
        ([GOOD_MOONCAKE, {**GOOD_MOONCAKE, "timestamp": -1}], 2, "timestamp"),
        ([GOOD_MOONCAKE, "[1]"], 2, "object"),
        (["[1]"], 1, "object"),
        ([HEADER, turn(0.0, [[1, 8]]), turn(1.0, [[9, 8]], k=9)], 3, "k is 9"),
        ([HEADER, turn(0.0, [[1, 8]]), turn(1.0, [[9, 8]], k=8, a="sub")], 3, "k is 8"),
        ([header("s", hash_id_scope="odd")], 1, "odd"),
        ([header("s", block_size=48)], 1, "48 tokens"),
        ([header("s", block_size=0)], 1, "block_size"),
        ([HEADER, turn(0.0, [[1, 8]]), header("b", hash_id_scope="local")], 3, "same for all"),
        ([HEADER, {**turn(0.0, [[1, 8]]), "new": [[1]]}], 2, "new"),
        ([HEADER, turn(0.0, [[1, 2**40]])], 2, "beyond reason"),
        ([HEADER, turn(0.0, [[2**64 - 4, 8]])], 2, "beyond reason"),
        ([HEADER, turn(-1.0, [[1, 8]])], 2, "t"),
        ([{"t": 0.0, "tokens": [1], "block_ids": [1]}], 1, "either"),
        ([{"t": 0.0, "tokens": None, "block_ids": None}], 1, "either"),
        ([{"t": 0.0, "block_ids": [1]}, {"t": 0.0, "tokens": [1]}], 2, "throughout"),
        ([{"t": "now", "block_ids": [1]}], 1, "t"),
        ([], 1, "empty"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_file_and_line(
    tmp_path: Path, lines: list[dict[str, Any] | str], line: int, says: str
) -> None:
    path = write(tmp_path / "broken.jsonl", lines)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


def test_a_request_before_any_header(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [turn(0.0, [[1, 8]]), HEADER])
    with pytest.raises(TraceError, match=":1: a request before the first session header"):
        load_trace(path, "agent-sessions")


def test_a_cut_off_gzip_file(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({**GOOD_MOONCAKE, "hash_ids": [n]}) for n in range(5000))
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-2000])
    with pytest.raises(TraceError, match=r"cut\.gz:\d+: .*end-of-stream"):
        load_trace(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(TraceError, match="binary:1: "):
        load_trace(path)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match="directory"):
        load_trace(tmp_path)


def test_no_whole_block_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "short.jsonl", [{**GOOD_MOONCAKE, "input_length": 100}])
    with pytest.raises(TraceError, match="no request has a whole block of 512 tokens"):
        load_trace(path)


def test_block_sizes_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", [GOOD_MOONCAKE])
    with pytest.raises(TraceError, match="multiple"):
        load_trace(path, block_tokens=768)
    with pytest.raises(TraceError, match="no sense"):
        load_trace(path, block_tokens=0)


def test_an_explicit_format_must_exist_and_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", [GOOD_MOONCAKE])
    with pytest.raises(TraceError, match="no trace format 'csv'"):
        load_trace(path, "csv")
    with pytest.raises(TraceError, match=":1: "):
        load_trace(path, "agent-sessions")
    assert detect_format(path) == "mooncake"
