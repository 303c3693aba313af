"""Mooncake's request traces (FAST'25 release): one request a line, with real arrival times and no sessions.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`; one id for each 512-token
block of the prompt, the last of which is usually partial and is dropped: engines cache whole blocks only. Equal ids
mean equal prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.errors import TraceError
from kvtier.model.request import Outcome, RequestContext
from kvtier.sim.traces.chains import ChainBuilder, pack
from kvtier.sim.traces.lines import Count, Id, decode, id_array, read_lines
from kvtier.sim.traces.records import Session, Trace, TraceRequest

ID_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[Id]


def read_mooncake(path: Path, block_tokens: int) -> Trace:
    """Read a trace. Raises TraceError naming file and line, also if `block_tokens` is no multiple of 512."""
    if block_tokens % ID_TOKENS:
        raise TraceError(f"{path}: ids stand for {ID_TOKENS} tokens; blocks of {block_tokens} are no multiple of that")
    decoder = msgspec.json.Decoder(_Line)
    chains = ChainBuilder(block_tokens // ID_TOKENS)
    requests: list[TraceRequest] = []
    for number, text in read_lines(path):
        line = decode(decoder, path, number, text)
        whole = line.input_length // ID_TOKENS
        if len(line.hash_ids) < whole:
            raise TraceError(
                f"{path}:{number}: {len(line.hash_ids)} ids do not cover the {whole} whole blocks of "
                f"{line.input_length} tokens"
            )
        chain = chains.chain(id_array(line.hash_ids[:whole], path, number))
        if chain:
            at_s = line.timestamp / 1000.0
            requests.append(
                TraceRequest(
                    chain=pack(chain),
                    context=RequestContext(request_id=str(number), arrival_s=at_s, prompt_tokens=line.input_length),
                    outcome=Outcome(finished_s=at_s, output_tokens=line.output_length),
                )
            )
    return Trace(path.name, "mooncake", block_tokens, [Session(requests=tuple(requests), start_s=0.0)])
