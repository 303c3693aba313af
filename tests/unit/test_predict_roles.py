"""Roles from marker tokens."""

from __future__ import annotations

import itertools
import random

from kvtier.model.request import BlockType, InputType, StopReason, Transition
from kvtier.predict.roles import ChatMarkers, find_roles, stop_reason_of, transition_of

START, SYS, USR, AST, TOOL, CALL, CALL_END, RESPONSE, EOS = range(100, 109)
CHATML = ChatMarkers(
    system=((START, SYS),),
    user=((START, USR),),
    assistant=((START, AST),),
    tool=((START, TOOL),),
    tool_result_in_user=((RESPONSE,),),
    tool_call=((CALL,),),
    tool_call_end=((CALL_END,),),
)


def test_spans_of_whole_blocks() -> None:
    tokens = [START, SYS, *[1] * 6, START, USR, *[2] * 6, START, AST, *[3] * 2, START, TOOL, *[4] * 10, START, AST]
    roles = find_roles(tokens, CHATML, block_tokens=4)
    assert [(s.start_block, s.stop_block, s.type) for s in roles.spans] == [
        (0, 2, BlockType.SYSTEM_PROMPT),
        (2, 4, BlockType.USER_CONTEXT),
        (4, 5, BlockType.INTERMEDIATE_REASONING),
        (5, 8, BlockType.TOOL_CONTEXT),
    ]
    assert roles.input_type == InputType.TOOL_RESULT


def test_a_block_belongs_to_the_message_of_its_first_token() -> None:
    tokens = [START, SYS, 1, 1, 1, 1, START, USR, 2, 2, 2, 2]
    roles = find_roles(tokens, CHATML, block_tokens=4)
    assert [(s.start_block, s.stop_block, s.type) for s in roles.spans] == [
        (0, 2, BlockType.SYSTEM_PROMPT),
        (2, 3, BlockType.USER_CONTEXT),
    ]
    assert roles.input_type == InputType.USER_TEXT


def test_the_generation_prompt_is_no_message_and_a_tool_result_may_hide_in_a_user_turn() -> None:
    tokens = [5, 5, START, USR, RESPONSE, 4, 4, 4, START, AST]
    roles = find_roles(tokens, CHATML, block_tokens=2)
    assert [kind for _, kind in roles.messages] == [BlockType.SYSTEM_PROMPT, BlockType.TOOL_CONTEXT]
    assert roles.input_type == InputType.TOOL_RESULT


def test_no_markers_no_roles() -> None:
    assert find_roles([1, 2, 3, 4], CHATML, 2).spans == ()
    assert find_roles([], CHATML, 2).input_type == InputType.UNKNOWN
    assert find_roles([START], CHATML, 2).spans == ()


def test_spans_tile_the_blocks_for_any_prompt() -> None:
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.choice((START, SYS, USR, AST, TOOL, RESPONSE, 1, 2)) for _ in range(rng.randrange(60))]
        block = rng.randint(1, 7)
        spans = find_roles(tokens, CHATML, block).spans
        if spans:
            assert spans[0].start_block == 0
            assert spans[-1].stop_block <= len(tokens) // block
        for a, b in itertools.pairwise(spans):
            assert a.stop_block == b.start_block
            assert a.start_block < a.stop_block


def test_the_end_of_a_tool_call() -> None:
    assert stop_reason_of([1, CALL, 2, CALL_END, EOS], CHATML, StopReason.END_TURN) == StopReason.TOOL_USE
    assert stop_reason_of([1, 2, EOS], CHATML, StopReason.END_TURN) == StopReason.END_TURN
    assert stop_reason_of([1, CALL, 2], CHATML, StopReason.LENGTH) == StopReason.LENGTH
    assert stop_reason_of([1, CALL, 2], CHATML, StopReason.STOP_SEQUENCE) == StopReason.TOOL_USE
    assert stop_reason_of([], CHATML, StopReason.UNKNOWN) == StopReason.UNKNOWN


def test_transitions() -> None:
    tool = find_roles([START, USR, 1, START, TOOL, 2], CHATML, 1)
    user = find_roles([START, USR, 1], CHATML, 1)
    assert transition_of(tool, "grep", "grep") == Transition.SAME_TOOL_REPEAT
    assert transition_of(tool, "grep", "ls") == Transition.TOOL_SWITCH
    assert transition_of(tool) == Transition.UNKNOWN
    assert transition_of(user) == Transition.REASONING_STEP
