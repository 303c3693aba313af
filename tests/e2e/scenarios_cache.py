"""Scenarios of kvtier in a real vLLM: where blocks come from, whether their bytes are the same, what goes wrong."""

from __future__ import annotations

import random
from typing import Any

from tests.e2e.engine import (
    answers,
    ask,
    cached_tokens,
    connector_of,
    device_bytes,
    device_rows,
    memory_rows,
    metrics,
    settle,
    start_engine,
    wipe_device,
)
from tests.e2e.models import prompt_tokens

MIB = 1 << 20


def round_trip(model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """One prompt, computed and then served by the device, by memory and by the tier below; KV bytes at each stage."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    prompt = prompt_tokens(1, tokens)
    stages: dict[str, Any] = {}

    def stage(name: str) -> None:
        output = ask(llm, [prompt])
        cache = settle(llm)
        rows = memory_rows(llm)
        stages[name] = {
            "answer": answers(output)[0],
            "cached": cached_tokens(output)[0],
            "bytes": device_bytes(llm),
            "rows": rows,
            "rows_on_device": len(device_rows() & set(rows.values())),
            "leases": cache.leases(),
        }

    stage("cold")
    stage("device")
    cache = settle(llm)
    wipe_device(llm)
    stage("memory")
    wipe_device(llm)
    cache.memory.clear()
    cache.epoch += 1
    stage("below")
    cache = settle(llm)
    cache.check_integrity()
    return {"stages": stages, "metrics": metrics("kvtier_")}


def memory_changes(
    model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any], part: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """A prompt is stored, then a bit flips in memory in every block from the third on, in one rank's part; the prompt
    is asked again, three times."""
    llm = start_engine(model, kvtier=kvtier, tensor_parallel_size=ranks, **engine)
    prompt = prompt_tokens(1, tokens)
    outputs = [ask(llm, [prompt])]
    cache = settle(llm)
    llm.reset_prefix_cache()
    for segment in cache.tree.segments():
        slots = cache.memory.residency.slots_of(cache.tree.walk(cache.tree.chain_of(segment)))
        for slot in slots[max(2, segment.depth) : segment.stop].ravel().tolist():
            if slot >= 0:
                row = cache.memory_row(slot)
                row[(2 * part + 1) * len(row) // (2 * ranks)] ^= 0x10
    for _ in range(3):
        outputs.append(ask(llm, [prompt]))
        cache = settle(llm)
        llm.reset_prefix_cache()
    cache.check_integrity()
    return {
        "answers": [answers(output)[0] for output in outputs],
        "cached": [cached_tokens(output)[0] for output in outputs],
        "metrics": metrics("kvtier_"),
        "leases": cache.leases(),
    }


def serve_once(model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """A new process: one prompt, whatever it can be served from."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    output = ask(llm, [prompt_tokens(1, tokens)])
    cache = settle(llm)
    return {
        "answer": answers(output)[0],
        "cached": cached_tokens(output)[0],
        "bytes": device_bytes(llm),
        "metrics": metrics("kvtier_"),
        "leases": cache.leases(),
    }


def crowd(
    model: str, requests: int, kvtier: dict[str, Any] | None, engine: dict[str, Any], seed: int = 0, below: int = 0
) -> dict[str, Any]:
    """Many requests at once that share prefixes, three rounds, on a device pool too small for them; then what they
    share, `below` times, when device and memory have forgotten it."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    draw = random.Random(seed)
    shared = [prompt_tokens(100 + i, 160) for i in range(5)]
    rounds = []
    for _ in range(3):
        prompts = [
            shared[draw.randrange(5)][: draw.randrange(64, 161)] + prompt_tokens(draw.randrange(40), 40)
            for _ in range(requests)
        ]
        rounds.append(answers(ask(llm, prompts, max_tokens=40)))
    for _ in range(below):
        if kvtier is not None:
            cache = settle(llm)
            wipe_device(llm)
            cache.memory.clear()
            cache.epoch += 1
        rounds.append(answers(ask(llm, shared)))
    result: dict[str, Any] = {"rounds": rounds, "preemptions": metrics("vllm:num_preemptions_total")}
    if kvtier is not None:
        cache = settle(llm)
        cache.check_integrity()
        scheduler = connector_of(llm).scheduler
        result |= {
            "leases": cache.leases(),
            "pinned": cache.memory.residency.pinned_rows,
            "unowned": cache.memory.tier.stats().used_rows - cache.memory.residency.resident_rows,
            "jobs": len(scheduler._jobs),
            "requests_left": len(scheduler._req_status),
            "metrics": metrics("kvtier_"),
        }
    return result


def abort_everywhere(model: str, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Abort a request after every number of engine steps from 0 to 12, cold and with its blocks in every tier."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    from vllm import SamplingParams

    core = llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = answers(ask(llm, [prompt_tokens(7, 300)]))[0]
    aborted = 0
    for source in ("device", "memory", "below", "cold"):
        for steps in range(12):
            cache = settle(llm)
            prompt = prompt_tokens(7, 300) if source != "cold" else prompt_tokens(1000 + steps, 300)
            if source != "device":
                llm.reset_prefix_cache()
            if source == "below":
                cache.memory.clear()
                cache.epoch += 1
            name = f"{source}-{steps}"
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
            for _ in range(steps):
                core.step()
            core.abort_request([name])
            aborted += 1
            for _ in range(3):
                core.step()
    cache = settle(llm)
    cache.check_integrity()
    llm.reset_prefix_cache()
    again = ask(llm, [prompt_tokens(7, 300)])
    cache = settle(llm)
    return {
        "aborted": aborted,
        "expected": expected,
        "answer": answers(again)[0],
        "leases": cache.leases(),
        "pinned": cache.memory.residency.pinned_rows,
        "unowned": cache.memory.tier.stats().used_rows - cache.memory.residency.resident_rows,
        "requests_left": len(connector_of(llm).scheduler._req_status),
    }


def reset_everything(model: str, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """`reset_prefix_cache(reset_connector=True)`, idle and with work under way: nothing cached before is found."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    prompt = prompt_tokens(3, 300)
    first = answers(ask(llm, [prompt]))[0]
    settle(llm)
    llm.reset_prefix_cache(reset_connector=True)
    second = ask(llm, [prompt])
    from vllm import SamplingParams

    core = llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    core.add_request("under-way", {"prompt_token_ids": prompt_tokens(4, 300)}, parameters)
    for _ in range(2):
        core.step()
    connector_of(llm).reset_cache()
    while core.has_unfinished_requests():
        core.step()
    cache = settle(llm)
    cache.check_integrity()
    return {
        "same": answers(second)[0] == first,
        "cached_after_reset": cached_tokens(second)[0],
        "leases": cache.leases(),
        "pinned": cache.memory.residency.pinned_rows,
        "unowned": cache.memory.tier.stats().used_rows - cache.memory.residency.resident_rows,
    }


def two_ranks(model: str, kvtier: dict[str, Any] | None, engine: dict[str, Any]) -> dict[str, Any]:
    """Tensor parallelism: each prompt computed, then asked again after the device cache was reset."""
    llm = start_engine(model, kvtier=kvtier, tensor_parallel_size=2, **engine)
    prompts = [prompt_tokens(i, 200 + 17 * i) for i in range(4)]
    first = answers(ask(llm, prompts))
    if kvtier is not None:
        settle(llm)
    llm.reset_prefix_cache()
    again = ask(llm, prompts)
    result = {"first": first, "again": answers(again), "cached": cached_tokens(again)}
    if kvtier is not None:
        cache = settle(llm)
        result |= {"leases": cache.leases(), "row_bytes": cache.memory.row_bytes}
    return result


def start_badly(model: str, kvtier: dict[str, Any], engine: dict[str, Any]) -> str:
    """Start with a configuration that cannot work; returns the error."""
    try:
        start_engine(model, kvtier=kvtier, **engine)
    except Exception as error:  # noqa: BLE001 - whatever comes out is what the test looks at
        return f"{type(error).__name__}: {error}"
    return "started"


def crowd_over_a_failing_tier(
    model: str, requests: int, kvtier: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """The crowd, while every second of the first calls into the tier below fails in one way or another, and the last
    of them hangs. One row a call, and a breaker that only a hang opens: a busy machine meets the faults of an idle one.
    """
    from kvtier.cache.tier_cache import TierCache
    from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier, Script
    from kvtier.tiers.health import BreakerLimits

    eio, enospc, short, flip = FaultKind.EIO, FaultKind.ENOSPC, FaultKind.SHORT, FaultKind.FLIP
    script = [Fault("write", 1 + 2 * i, kind) for i, kind in enumerate((eio, enospc, short, flip, enospc, flip))]
    script += [Fault("read", 1 + 2 * i, kind) for i, kind in enumerate((eio, flip, short, eio, flip))]
    script.append(Fault("read", 11, FaultKind.DELAY, delay_s=5.0))
    faulty: list[FaultyTier] = []
    opened = TierCache.__init__

    def over_a_failing_tier(
        self: TierCache, config: Any, geometry: Any, memory: Any, row: Any, lower: Any, **more: Any
    ) -> None:
        faulty.extend(FaultyTier(tier, Script(script)) for tier in lower)
        opened(self, config, geometry, memory, row, faulty, **more)
        for level in self.lower:
            level.health.breaker._limits = BreakerLimits(bad=1000)

    TierCache.__init__ = over_a_failing_tier  # type: ignore[method-assign]
    try:
        result = crowd(model, requests, kvtier, engine, below=2)
    finally:
        TierCache.__init__ = opened  # type: ignore[method-assign]
    (tier,) = faulty
    return {**result, "injected": {kind.value: n for kind, n in tier.injected.items() if n}, "calls": tier._calls}


def canaries(model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """A prompt asked three times, of which nothing is loaded because it shall be compared; then memory is spoilt."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    prompt, found = prompt_tokens(1, tokens), []
    for turn in range(3):
        if turn == 2:
            cache = settle(llm)
            for slot in range(4):
                cache.memory_row(slot)[:] = bytes(len(cache.memory_row(slot)))
        output = ask(llm, [prompt])
        cache = settle(llm)
        cache.check_integrity()
        found.append({"answer": answers(output)[0], "cached": cached_tokens(output)[0], "metrics": metrics("kvtier_")})
        wipe_device(llm)
    return {"turns": found, "leases": cache.leases()}
