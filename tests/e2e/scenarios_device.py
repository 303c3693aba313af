"""Scenarios of the hbm tier in a real vLLM: which blocks stay on the device, and what it costs to keep them there."""

from __future__ import annotations

import time
from typing import Any

from kvtier.testing.clock import VirtualClock
from tests.e2e.agent_stream import AgentStream
from tests.e2e.engine import answers, ask, connector_of, metrics, settle, start_engine

POOL_BLOCKS = 41  # one of them is never used
ENGINE = {"num_gpu_blocks_override": POOL_BLOCKS, "max_model_len": 512, "max_num_batched_tokens": 512}


def agent_stream(
    model: str, seed: int, requests: int, hbm_policy: str, agents: int = 6, singles: float = 0.45
) -> dict[str, Any]:
    """Serve a stream one request at a time, in its own time: kvtier's clock jumps from arrival to arrival."""
    from kvtier.cache import tier_cache

    clock = VirtualClock()
    tier_cache.MonotonicClock = lambda: clock  # type: ignore[assignment,misc]
    kvtier = {"dram_bytes": "32MiB", "hbm_policy": hbm_policy, "gate": False}
    llm = start_engine(model, kvtier=kvtier, **ENGINE)
    stream = AgentStream(seed, requests, agents, singles)
    said: list[list[int]] = []
    prompt_total = 0
    began_s = time.perf_counter()
    for at_s, prompt in stream:
        clock.advance_to(at_s)
        output = ask(llm, [prompt], max_tokens=8)
        said.append(answers(output)[0])
        stream.answer(said[-1])
        prompt_total += len(prompt)
    wall_s = time.perf_counter() - began_s
    cache = settle(llm)
    cache.check_integrity()
    device = connector_of(llm)._device
    while not device.watch.refresh():
        pass
    device.watch.view.check_integrity()
    pool = device.watch._pool
    cached = {block.block_hash for block in pool.blocks if block.block_hash is not None}
    cache.gauges()
    return {
        "answers": said,
        "prompt_tokens": prompt_total,
        "wall_s": wall_s,
        "metrics": metrics("kvtier_"),
        "view_rows": device.watch.view.residency.resident_rows,
        "pool_rows": len(cached),
        "free": pool.get_num_free_blocks(),
        "moved": device.steering.moved if device.steering else 0,
        "off": device.steering.off if device.steering else "",
        "leases": cache.leases(),
    }
