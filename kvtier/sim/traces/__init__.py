"""Request traces: one reader a file format, one record for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvtier.errors import TraceError
from kvtier.sim.traces.agent_sessions import read_agent_sessions
from kvtier.sim.traces.lines import decode, read_lines
from kvtier.sim.traces.mooncake import read_mooncake
from kvtier.sim.traces.records import TRACE_KEY_BYTES, Trace, TraceRequest, total_blocks, unique_blocks
from kvtier.sim.traces.requests_jsonl import read_requests_jsonl

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "READERS",
    "TRACE_KEY_BYTES",
    "Trace",
    "TraceRequest",
    "detect_format",
    "load_trace",
    "total_blocks",
    "unique_blocks",
]

DEFAULT_BLOCK_TOKENS = 512

READERS: dict[str, Callable[[Path, int], Trace]] = {
    "mooncake": read_mooncake,
    "agent-sessions": read_agent_sessions,
    "requests-jsonl": read_requests_jsonl,
}


def detect_format(path: Path) -> str:
    """The format of `path`, told from the fields of its first line. Raises TraceError if none fits."""
    for number, line in read_lines(path):
        fields = decode(msgspec.json.Decoder(dict[str, msgspec.Raw]), path, number, line).keys()
        if "hash_id_scope" in fields:
            return "agent-sessions"
        if {"timestamp", "hash_ids"} <= fields:
            return "mooncake"
        if "t" in fields and fields & {"tokens", "block_ids"}:
            return "requests-jsonl"
        raise TraceError(f"{path}:{number}: fields {', '.join(sorted(fields))} fit none of {', '.join(READERS)}")
    raise TraceError(f"{path}:1: the file is empty")


def load_trace(path: Path, format_name: str = "auto", block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Trace:
    """Read a trace file. Raises TraceError (naming file and line) if it is malformed or has no whole block."""
    if block_tokens <= 0:
        raise TraceError(f"{path}: a block of {block_tokens} tokens makes no sense")
    if format_name == "auto":
        format_name = detect_format(path)
    if format_name not in READERS:
        raise TraceError(f"{path}: no trace format {format_name!r}; choose auto or one of {', '.join(READERS)}")
    trace = READERS[format_name](path, block_tokens)
    if not trace.requests():
        raise TraceError(f"{path}: no request has a whole block of {block_tokens} tokens")
    return trace
