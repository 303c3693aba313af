"""The order in which vLLM's blocks leave the device: kvtier's keeps more of what comes back than vLLM's own."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="runs vLLM's KVCacheManager")

from tests.e2e.agent_stream import AgentStream
from tests.e2e.scheduler_without_model import SchedulerWithoutModel

BLOCKS, REQUESTS = 41, 200


def device_hits(seed: int, order: str) -> tuple[int, int]:
    """(prompt tokens found on the device, blocks moved) of one stream."""
    engine = SchedulerWithoutModel(BLOCKS, order)
    stream, draw, hits = AgentStream(seed, REQUESTS, agents=6), random.Random(seed), 0
    for at_s, prompt in stream:
        answer = [draw.randrange(256) for _ in range(8)]
        hits += engine.serve(at_s, prompt, answer)
        stream.answer(answer)
    engine.close()
    assert not engine.off
    return hits, engine.moved


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kvtiers_order_finds_at_least_as_much_on_the_device(seed: int) -> None:
    engine, moved = device_hits(seed, "engine")
    assert engine > 0
    assert moved == 0
    kvtier, moved = device_hits(seed, "kvtier")
    assert kvtier >= engine
    assert moved > 0
