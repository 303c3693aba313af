"""Which requests belong to one conversation: by session id where the trace has one, else inferred from the tree.

Inference: if the deepest segment a prompt shares with the past lies on the latest prompt of exactly one conversation,
and they share at least half of that prompt, the request continues it (perhaps with its tail rewritten); otherwise it
opens a new one under a shared prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.traces import TraceRequest


def conversations(requests: Sequence[TraceRequest], trace: CompiledTrace) -> list[int]:
    """A conversation number for each request, dense from 0 in order of appearance."""
    if all(request.context.session_id for request in requests):
        numbers: dict[str, int] = {}
        return [numbers.setdefault(request.context.session_id, len(numbers)) for request in requests]
    return _inferred(trace)


def _inferred(trace: CompiledTrace) -> list[int]:
    previous, segments, starts = trace.previous_use().tolist(), trace.segment.tolist(), trace.starts.tolist()
    length: list[int] = trace.length.tolist()
    latest: list[list[int]] = []  # by conversation: the path of its latest prompt
    # By segment: how many conversations' latest prompts hold it, and the sum of their numbers. Where the count is 1,
    # the sum is the owner.
    count, owners = [0] * trace.length.size, [0] * trace.length.size
    found: list[int] = []
    for start, stop in itertools.pairwise(starts):
        path = segments[start:stop]
        known = sum(1 for used in previous[start:stop] if used >= 0)
        owner = owners[path[known - 1]] if known and count[path[known - 1]] == 1 else -1
        if owner >= 0 and 2 * _blocks(path[:known], length) >= _blocks(latest[owner], length):
            conversation, common = owner, known
            for segment in latest[conversation][common:]:
                count[segment] -= 1
                owners[segment] -= conversation
            latest[conversation] = path
        else:
            conversation, common = len(latest), 0
            latest.append(path)
        for segment in path[common:]:
            count[segment] += 1
            owners[segment] += conversation
        found.append(conversation)
    return found


def _blocks(path: Sequence[int], length: Sequence[int]) -> int:
    return sum(length[segment] for segment in path)
