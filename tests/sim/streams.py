"""Request streams for simulator tests: from lists of content ids, or of single blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtier.model.request import Outcome, RequestContext
from kvtier.sim.traces.chains import ChainBuilder, pack
from kvtier.sim.traces.records import TraceRequest


def request(chain: Sequence[int], at_s: float = 0.0, number: int = 0) -> TraceRequest:
    """A request whose prompt is exactly these block ids."""
    return TraceRequest(
        chain=pack(chain),
        context=RequestContext(request_id=str(number), arrival_s=at_s, prompt_tokens=512 * len(chain)),
        outcome=Outcome(finished_s=at_s),
    )


def stream(prompts: Sequence[Sequence[int]], gap_s: float = 1.0) -> list[TraceRequest]:
    """Requests `gap_s` apart whose prompts have these contents: equal prefixes become equal blocks."""
    chains = ChainBuilder(1)
    return [
        request(chains.chain(np.array(prompt, dtype=np.uint64)), at_s=number * gap_s, number=number)
        for number, prompt in enumerate(prompts)
    ]


def blocks_of(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """The block ids of every request."""
    return [np.frombuffer(each.chain, dtype="<u8").tolist() for each in requests]
