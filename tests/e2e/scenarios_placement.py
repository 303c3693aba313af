"""Placement scenarios in a real vLLM: a crawling tier, an announced session, hints in requests, a shared burst."""

from __future__ import annotations

import json
import time
import urllib.request
from statistics import median
from typing import Any

from tests.e2e.engine import ask, cached_tokens, connector_of, metrics, settle, start_engine, wipe_device
from tests.e2e.models import prompt_tokens


def crawling_tier(
    model: str, tokens: int, pairs: int, slowdown: float, kvtier: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """Prompts that only a slowed tier has, against prompts nobody has: seconds to the first token of each, in turns."""
    import kvtier_vllm.spec as spec
    from kvtier.testing.faulty_tier import FaultyTier
    from kvtier.tiers.open import Opened, Site

    open_tiers = spec.open_lower_tiers

    def slowed(site: Site) -> Opened:
        opened = open_tiers(site)
        return Opened([FaultyTier(tier, slowdown=slowdown) for tier in opened.tiers], opened.missing)

    spec.open_lower_tiers = slowed  # type: ignore[assignment]
    llm = start_engine(model, kvtier=kvtier, **engine)
    for seed in range(4):  # teaches the gate what recompute costs
        ask(llm, [prompt_tokens(900 + seed, tokens)], max_tokens=1)
    cache = settle(llm)
    found, new = [], []
    for pair in range(pairs):
        known, unknown = prompt_tokens(pair, tokens), prompt_tokens(500 + pair, tokens)
        ask(llm, [known], max_tokens=1)
        cache = settle(llm)
        wipe_device(llm)
        cache.memory.clear()
        cache.epoch += 1
        for prompt, into in ((known, found), (unknown, new)) if pair % 2 else ((unknown, new), (known, found)):
            began = time.perf_counter()
            ask(llm, [prompt], max_tokens=1)
            into.append(time.perf_counter() - began)
    cache = settle(llm)
    return {
        "found_s": median(found),
        "new_s": median(new),
        # Of the two halves of a pair, a moment apart: what else the machine does meets both.
        "ratio": median(known_s / unknown_s for known_s, unknown_s in zip(found, new, strict=True)),
        "metrics": metrics("kvtier_"),
        "leases": cache.leases(),
    }


def announced_session(
    model: str, tokens: int, hinted: bool, kvtier: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """Two turns of a session with a crowd between them that fills memory; its return announced over HTTP or not."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    manager = connector_of(llm).manager
    said = {"kv_transfer_params": {"kvtier": {"session": "s"}}}
    ask(llm, [prompt_tokens(1, tokens)], extra_args=said)
    for seed in range(12):
        ask(llm, [prompt_tokens(100 + seed, tokens)], max_tokens=1)
    cache = settle(llm)
    answer = None
    if hinted:
        request = urllib.request.Request(
            f"http://127.0.0.1:{manager.control.server.port}/v1/hints",
            json.dumps({"session": "s", "returns_in": "0.5s"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as response:
            answer = json.load(response)["results"][0]["outcome"]
        time.sleep(1.0)  # the engine sleeps: nobody steps it
    wipe_device(llm)
    before = metrics("kvtier_tokens_total")
    output = ask(llm, [prompt_tokens(1, tokens)], extra_args=said)
    cache = settle(llm)
    after = metrics("kvtier_tokens_total")
    result = {
        "outcome": answer,
        "cached": cached_tokens(output)[0],
        "sources": {name: value - before.get(name, 0.0) for name, value in after.items()},
        "leases": cache.leases(),
        "hinted": len(cache.hinted),
    }
    manager.control.close()
    return result


def hinted_requests(model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Hints in a request's own parameters and in vLLM's envelope, good ones and bad ones."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    def parameters(**said: Any) -> SamplingParams:
        extra = {"kv_transfer_params": {"kvtier": said}}
        return SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, extra_args=extra)

    actions = [
        KvHintAction("1", "kvtier.retain_for", "1", {"seconds": 60}),
        KvHintAction("2", "kvtier.pin", "1", {"value": "soon"}),
        KvHintAction("3", "somebody.else", "1", {}),
    ]
    core = llm.llm_engine
    for name, said, envelope in (
        ("a", {"session": "a", "returns_in": "30s"}, None),
        ("b", {"session": "b", "returns_in": "whenever"}, None),
        ("c", {"session": "c"}, KvHintsEnvelope("1", "m", actions)),
    ):
        core.add_request(name, {"prompt_token_ids": prompt_tokens(3, tokens)}, parameters(**said), kv_hints=envelope)
        while core.has_unfinished_requests():
            core.step()
    cache = settle(llm)
    standing = {name: cache.hinted.standing(name)._asdict() for name in "abc"}
    now = cache.clock.now()
    connector_of(llm).manager.control.close()
    cache.hinted.clear()
    return {"standing": standing, "now": now, "metrics": metrics("kvtier_hints"), "leases": cache.leases()}


def shared_burst(
    model: str, requests: int, tokens: int, rounds: int, kvtier: dict[str, Any] | None, engine: dict[str, Any]
) -> dict[str, Any]:
    """Bursts that share one prefix, each on a device that has nothing of it any more: seconds of each round."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    shared = prompt_tokens(1, tokens)
    seconds, seed = [], 1000
    for _ in range(rounds + 1):
        llm.reset_prefix_cache()
        prompts = [shared + prompt_tokens(seed + i, 32) for i in range(requests)]
        seed += requests
        began = time.perf_counter()
        ask(llm, prompts, max_tokens=4)
        seconds.append(time.perf_counter() - began)
        if kvtier is not None:
            settle(llm)
    return {"seconds": seconds[1:]}
