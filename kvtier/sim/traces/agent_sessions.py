"""Coding-agent sessions: a header line for each session, then one line for each of its requests.

Header: `{"id", "models", "block_size": 64, "hash_id_scope": "global"|"local", "tool_tokens", "system_tokens"}`, and
optionally `"start"`, the session's absolute start in seconds. Request: `t` seconds from the session's start, `a` agent
(0 main, anything else a sub-agent), `i` input tokens, `out` output tokens, `it` input types, `st` stop reason, `api`
seconds of service, and the prompt as a difference: its first `k` ids are those of the same agent's previous request,
the rest is `new`, run-length coded as [[first_id, count], ...]. Each id stands for `block_size` tokens.

Scope `global`: an id means the same content in every session. Scope `local`: ids are private to the session, except
that the leading (tool_tokens + system_tokens) // block_size ids are the shared head of all sessions with the same pair
of lengths, position by position. We take the first id a session's main agent shows at such a position as that shared
content: within a session equal ids always stay equal, and different ids different.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvtier.errors import TraceError
from kvtier.model.request import InputType, Outcome, RequestContext, StopReason
from kvtier.sim.traces.chains import ChainBuilder, IdArray, pack
from kvtier.sim.traces.lines import Count, Id, decode, read_lines
from kvtier.sim.traces.records import Session, Trace, TraceRequest

MAX_PROMPT_IDS = 1 << 22  # a run-length code may claim any length; no prompt has more than this many ids

MAX_ID = 2**64 - 1

STOP_REASONS = {
    "tool_use": StopReason.TOOL_USE,
    "tool_calls": StopReason.TOOL_USE,
    "end_turn": StopReason.END_TURN,
    "stop": StopReason.END_TURN,
    "max_tokens": StopReason.LENGTH,
    "length": StopReason.LENGTH,
    "stop_sequence": StopReason.STOP_SEQUENCE,
    "abort": StopReason.ABORTED,
    "aborted": StopReason.ABORTED,
}


class _Header(msgspec.Struct):
    id: str
    hash_id_scope: str
    block_size: Annotated[int, Meta(gt=0)] = 64
    tool_tokens: Count = 0
    system_tokens: Count = 0
    start: Annotated[float, Meta(ge=0)] | None = None


class _Request(msgspec.Struct):
    t: Annotated[float, Meta(ge=0)]
    i: Count
    k: Count
    new: list[tuple[Id, Count]]
    a: int | str = 0
    out: Count = 0
    it: list[str] = []
    st: str | None = ""
    api: float | None = 0.0


class _Shape(msgspec.Struct):
    """Enough of a line to tell a header from a request."""

    hash_id_scope: str | msgspec.UnsetType = msgspec.UNSET


class _AgentState:
    """An agent's latest prompt: its ids and the blocks they made."""

    __slots__ = ("block_ids", "content")

    def __init__(self) -> None:
        self.content: IdArray = np.zeros(0, dtype=np.uint64)
        self.block_ids: list[int] = []


class _LocalIds:
    """Ids of scope `local`, made unique over the trace."""

    def __init__(self) -> None:
        self._shared: dict[tuple[int, int, int], int] = {}
        self._used = 0

    def begin(self, header: _Header) -> None:
        """Start a session: forget the previous one's ids."""
        self._session: dict[int, int] = {}
        self._pair = (header.tool_tokens, header.system_tokens)
        self._head = (header.tool_tokens + header.system_tokens) // header.block_size
        self._shown: set[int] = set()

    def translate(self, content: IdArray, start: int, main: bool) -> IdArray:
        """Trace-wide ids of `content`, which begins `start` ids into the prompt of the main agent or of another."""
        known, out = self._session, np.empty_like(content)
        for offset, local in enumerate(content.tolist()):
            if local not in known:
                position = start + offset
                if main and position < self._head and position not in self._shown:
                    self._shown.add(position)
                    key = (*self._pair, position)
                    known[local] = self._shared[key] if key in self._shared else self._fresh()
                    self._shared[key] = known[local]
                else:
                    known[local] = self._fresh()
            out[offset] = known[local]
        return out

    def _fresh(self) -> int:
        self._used += 1
        return self._used


class _Reader:
    """State of one pass over a file."""

    def __init__(self, path: Path, block_tokens: int) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._shape = msgspec.json.Decoder(_Shape)
        self._headers = msgspec.json.Decoder(_Header)
        self._requests = msgspec.json.Decoder(_Request)
        self._chains: ChainBuilder | None = None
        self._id_tokens = 0
        self._local = _LocalIds()
        self._header: _Header | None = None
        self._agents: dict[int | str, _AgentState] = {}
        self._collected: list[TraceRequest] = []
        self.sessions: list[Session] = []

    def read(self) -> None:
        for number, line in read_lines(self._path):
            if decode(self._shape, self._path, number, line).hash_id_scope is msgspec.UNSET:
                self._request(number, decode(self._requests, self._path, number, line))
            else:
                self._close()
                self._open(number, decode(self._headers, self._path, number, line))
        self._close()

    def _open(self, number: int, header: _Header) -> None:
        where = f"{self._path}:{number}"
        if header.hash_id_scope not in ("global", "local"):
            raise TraceError(f"{where}: hash_id_scope is {header.hash_id_scope!r}; expected global or local")
        if self._block_tokens % header.block_size:
            raise TraceError(
                f"{where}: ids stand for {header.block_size} tokens; blocks of {self._block_tokens} are no multiple"
            )
        if self._chains is None:
            self._chains = ChainBuilder(self._block_tokens // header.block_size)
            self._id_tokens = header.block_size
            self._scope = header.hash_id_scope
        elif header.block_size != self._id_tokens or header.hash_id_scope != self._scope:
            raise TraceError(f"{where}: block_size and hash_id_scope must be the same for all sessions of a file")
        self._header, self._agents = header, {}
        self._local.begin(header)

    def _close(self) -> None:
        if self._header is not None:
            self.sessions.append(Session(requests=tuple(self._collected), start_s=self._header.start))
        self._header, self._collected = None, []

    def _request(self, number: int, line: _Request) -> None:
        where = f"{self._path}:{number}"
        if self._header is None or self._chains is None:
            raise TraceError(f"{where}: a request before the first session header")
        agent = self._agents.setdefault(line.a, _AgentState())
        if line.k > agent.content.size:
            raise TraceError(f"{where}: k is {line.k}, but the agent's previous prompt has {agent.content.size} ids")
        added = self._expand(where, line)
        if self._header.hash_id_scope == "local":
            added = self._local.translate(added, line.k, main=line.a == 0)
        content = np.concatenate([agent.content[: line.k], added])
        shared = line.k * self._id_tokens // self._block_tokens
        block_ids = self._chains.chain(content, agent.block_ids[:shared])
        agent.content, agent.block_ids = content, block_ids
        if block_ids:
            self._collected.append(self._record(number, line, self._header, block_ids))

    def _expand(self, where: str, line: _Request) -> IdArray:
        total = line.k + sum(count for _, count in line.new)
        if total > MAX_PROMPT_IDS or any(first + count > MAX_ID for first, count in line.new):
            raise TraceError(f"{where}: a prompt of {total} ids is beyond reason")
        runs = [np.arange(first, first + count, dtype=np.uint64) for first, count in line.new]
        return np.concatenate(runs) if runs else np.zeros(0, dtype=np.uint64)

    def _record(self, number: int, line: _Request, header: _Header, block_ids: list[int]) -> TraceRequest:
        kind = InputType.UNKNOWN
        if "tool_result" in line.it:
            kind = InputType.TOOL_RESULT
        elif "text" in line.it:
            kind = InputType.USER_TEXT
        return TraceRequest(
            chain=pack(block_ids),
            context=RequestContext(
                request_id=str(number),
                arrival_s=line.t,
                prompt_tokens=line.i,
                session_id=header.id if line.a == 0 else f"{header.id}/{line.a}",
                input_type=kind,
            ),
            outcome=Outcome(
                finished_s=line.t,
                stop_reason=STOP_REASONS.get(line.st or "", StopReason.UNKNOWN),
                output_tokens=line.out,
            ),
            service_s=line.api or 0.0,
        )


def read_agent_sessions(path: Path, block_tokens: int) -> Trace:
    """Read a trace. Raises TraceError naming file and line, also if `block_tokens` is no multiple of the id size."""
    reader = _Reader(path, block_tokens)
    reader.read()
    return Trace(path.name, "agent-sessions", block_tokens, reader.sessions)
