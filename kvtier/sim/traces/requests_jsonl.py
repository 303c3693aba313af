"""kvtier's own request format: what to export from a server's log. One JSON object a line, fields beyond these ignored.

| field | meaning |
|---|---|
| `t` | arrival in seconds from any origin (required) |
| `tokens` | the prompt's token ids; blocks are cut from them (this or `block_ids` is required) |
| `block_ids` | or an id for each whole block of the prompt: equal ids mean equal content, wherever they stand |
| `session`, `tool` | the conversation, and the tool whose result opens the newest part, if known |
| `input_type` | `user_text` or `tool_result` |
| `stop_reason` | `end_turn`, `tool_use`, `length`, `stop_sequence` or `aborted` (and engines' usual synonyms) |
| `next_tool` | the tool the response calls |
| `input_length`, `output_length` | tokens; the input length defaults to what the blocks or tokens say |
| `service_s` | seconds from arrival to the end of the response |
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.errors import TraceError
from kvtier.model.request import InputType, Outcome, RequestContext, StopReason
from kvtier.sim.traces.agent_sessions import STOP_REASONS
from kvtier.sim.traces.chains import ChainBuilder, pack
from kvtier.sim.traces.lines import Count, Id, decode, id_array, read_lines
from kvtier.sim.traces.records import Session, Trace, TraceRequest

INPUT_TYPES = {"user_text": InputType.USER_TEXT, "text": InputType.USER_TEXT, "tool_result": InputType.TOOL_RESULT}


class _Line(msgspec.Struct):
    t: Annotated[float, Meta(ge=0)]
    tokens: list[Id] | None = None
    block_ids: list[Id] | None = None
    session: str = ""
    tool: str = ""
    input_type: str = ""
    stop_reason: str = ""
    next_tool: str = ""
    input_length: Count | None = None
    output_length: Count = 0
    service_s: Annotated[float, Meta(ge=0)] = 0.0


def read_requests_jsonl(path: Path, block_tokens: int) -> Trace:
    """Read a trace. Raises TraceError naming file and line."""
    decoder = msgspec.json.Decoder(_Line)
    by_token, by_block = ChainBuilder(block_tokens), ChainBuilder(1)
    requests: list[TraceRequest] = []
    uses_tokens: bool | None = None
    for number, text in read_lines(path):
        line = decode(decoder, path, number, text)
        if (line.tokens is None) == (line.block_ids is None):
            raise TraceError(f"{path}:{number}: give either tokens or block_ids")
        if uses_tokens is not None and uses_tokens != (line.tokens is not None):
            raise TraceError(f"{path}:{number}: a file uses either tokens or block_ids throughout")
        uses_tokens = line.tokens is not None
        if line.tokens is not None:
            chain, length = by_token.chain(id_array(line.tokens, path, number)), len(line.tokens)
        else:
            ids = line.block_ids or []
            chain, length = by_block.chain(id_array(ids, path, number)), len(ids) * block_tokens
        if chain:
            requests.append(_record(number, line, pack(chain), length))
    return Trace(path.name, "requests-jsonl", block_tokens, [Session(requests=tuple(requests), start_s=0.0)])


def _record(number: int, line: _Line, chain: bytes, length: int) -> TraceRequest:
    return TraceRequest(
        chain=chain,
        context=RequestContext(
            request_id=str(number),
            arrival_s=line.t,
            prompt_tokens=length if line.input_length is None else line.input_length,
            session_id=line.session,
            input_type=INPUT_TYPES.get(line.input_type, InputType.UNKNOWN),
            tool=line.tool,
        ),
        outcome=Outcome(
            finished_s=line.t,
            stop_reason=STOP_REASONS.get(line.stop_reason, StopReason.UNKNOWN),
            output_tokens=line.output_length,
            next_tool=line.next_tool,
        ),
        service_s=line.service_s,
    )
