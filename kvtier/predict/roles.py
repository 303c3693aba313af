"""Roles from token ids alone: what the spans of a prompt are, and whether an output ends in a tool call.

Chat templates put marker tokens at the head of every message (ChatML's `<|im_start|>` with the role's tokens, Llama's
`<|start_header_id|>`, …). Given the marker token sequences of a model, spans of system prompt, tool results, user text
and reasoning are found without any change of the client. Pure functions: whoever has a tokenizer (the connector)
resolves the markers once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.model.request import BlockType, InputType, RoleSpan, StopReason, Transition

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatMarkers:
    """Token sequences that begin a message of each type, and those that begin a tool call in an output.

    Several sequences may stand for one type (e.g. tool definitions and tool results). The longest sequence that fits
    at a position wins. `tool_result_in_user` lists sequences that turn a user message into a tool result (Qwen writes
    `<tool_response>` inside a user turn).
    """

    system: tuple[Tokens, ...] = ()
    user: tuple[Tokens, ...] = ()
    assistant: tuple[Tokens, ...] = ()
    tool: tuple[Tokens, ...] = ()
    tool_result_in_user: tuple[Tokens, ...] = ()
    tool_call: tuple[Tokens, ...] = ()
    tool_call_end: tuple[Tokens, ...] = ()
    _types: dict[Tokens, BlockType] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for sequences, block_type in (
            (self.system, BlockType.SYSTEM_PROMPT),
            (self.user, BlockType.USER_CONTEXT),
            (self.assistant, BlockType.INTERMEDIATE_REASONING),
            (self.tool, BlockType.TOOL_CONTEXT),
            (self.tool_result_in_user, BlockType.TOOL_CONTEXT),
        ):
            for sequence in sequences:
                if sequence:
                    self._types[sequence] = block_type

    def heads(self) -> dict[Tokens, BlockType]:
        """Every sequence that begins a span, with the type it begins."""
        return dict(self._types)


@dataclass(frozen=True, slots=True)
class PromptRoles:
    """What the markers say about a prompt."""

    spans: tuple[RoleSpan, ...]
    input_type: InputType
    messages: tuple[tuple[int, BlockType], ...]  # (first token, type)


def find_roles(tokens: Sequence[int] | npt.NDArray[np.int64], markers: ChatMarkers, block_tokens: int) -> PromptRoles:
    """The messages of a prompt, as spans of whole blocks: a block belongs to the message of its first token.

    The trailing generation prompt (an assistant head with nothing behind it) is no message. Tokens before the first
    marker count as system prompt. Without any marker there are no spans.
    """
    ids = np.asarray(tokens, np.int64)
    messages = _messages(ids, markers)
    if not messages:
        return PromptRoles((), InputType.UNKNOWN, ())
    if messages[0][0] > 0:
        messages.insert(0, (0, BlockType.SYSTEM_PROMPT))
    answered = [m for m in messages if m[1] != BlockType.INTERMEDIATE_REASONING]
    newest = answered[-1][1] if answered else BlockType.UNKNOWN
    kinds = {BlockType.TOOL_CONTEXT: InputType.TOOL_RESULT, BlockType.USER_CONTEXT: InputType.USER_TEXT}
    return PromptRoles(_spans(messages, len(ids), block_tokens), kinds.get(newest, InputType.UNKNOWN), tuple(messages))


def transition_of(roles: PromptRoles, tool: str = "", previous_tool: str = "") -> Transition:
    """How a request follows its session's previous one, as far as its roles and tools tell."""
    if roles.input_type == InputType.TOOL_RESULT:
        if tool and previous_tool and tool != previous_tool:
            return Transition.TOOL_SWITCH
        return Transition.SAME_TOOL_REPEAT if tool and tool == previous_tool else Transition.UNKNOWN
    return Transition.REASONING_STEP if roles.input_type == InputType.USER_TEXT else Transition.UNKNOWN


def stop_reason_of(output: Sequence[int], markers: ChatMarkers, default: StopReason) -> StopReason:
    """TOOL_USE if the output ends in a tool call: the last call's head is there and nothing but its end and special
    tokens follow it; else `default`."""
    ids = np.asarray(output, np.int64)
    last_head = _last(ids, markers.tool_call)
    if last_head < 0:
        return default
    if not markers.tool_call_end:
        return StopReason.TOOL_USE
    # A call that is not closed was cut short by a stop token that closes it, or by a limit; the default tells.
    if _last(ids, markers.tool_call_end) > last_head:
        return StopReason.TOOL_USE
    return default if default == StopReason.LENGTH else StopReason.TOOL_USE


def _messages(ids: npt.NDArray[np.int64], markers: ChatMarkers) -> list[tuple[int, BlockType]]:
    found: dict[int, tuple[int, BlockType, bool]] = {}
    inside_user = set(markers.tool_result_in_user)
    for sequence, block_type in markers.heads().items():
        for at in _positions(ids, sequence):
            if at not in found or len(sequence) > found[at][0]:
                found[at] = (len(sequence), block_type, sequence in inside_user)
    messages: list[tuple[int, BlockType]] = []
    for at in sorted(found):
        width, block_type, nested = found[at]
        if nested and messages and messages[-1][1] == BlockType.USER_CONTEXT:
            messages[-1] = (messages[-1][0], BlockType.TOOL_CONTEXT)
        elif not nested and not (block_type == BlockType.INTERMEDIATE_REASONING and at + width >= len(ids)):
            messages.append((at, block_type))
    return messages


def _spans(messages: Sequence[tuple[int, BlockType]], tokens: int, block_tokens: int) -> tuple[RoleSpan, ...]:
    spans: list[RoleSpan] = []
    blocks = tokens // block_tokens
    for n, (start, block_type) in enumerate(messages):
        stop = messages[n + 1][0] if n + 1 < len(messages) else blocks * block_tokens
        first, last = -(-start // block_tokens), min(blocks, -(-stop // block_tokens))
        if first >= last:
            continue
        if spans and spans[-1].type == block_type and spans[-1].stop_block == first:
            spans[-1] = RoleSpan(spans[-1].start_block, last, block_type)
        else:
            spans.append(RoleSpan(first, last, block_type))
    return tuple(spans)


def _positions(ids: npt.NDArray[np.int64], sequence: Tokens) -> list[int]:
    """Where a sequence begins in `ids`."""
    n = len(ids) - len(sequence) + 1
    if n <= 0:
        return []
    hits = np.flatnonzero(ids[:n] == sequence[0])
    for offset in range(1, len(sequence)):
        hits = hits[ids[hits + offset] == sequence[offset]]
    return [int(hit) for hit in hits]


def _last(ids: npt.NDArray[np.int64], sequences: Sequence[Tokens]) -> int:
    """The last position at which any of the sequences begins, -1 if none does."""
    return max((hits[-1] for sequence in sequences if (hits := _positions(ids, sequence))), default=-1)
