"""Agents below SGLang's own radix tree, pools and HiCache controller, without a model: run in SGLang's environment.

The tree is asked, loaded from host memory, locked, evicted from and inserted into as SGLang's scheduler does it, one
request at a time. What a model would have computed has no content here; which pages are kept is all that counts.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.testing.clock import VirtualClock
from tests.e2e.agent_stream import AgentStream
from tests.sglang.stack import PAGE_TOKENS, Stack, become_a_rank

POLICIES = ("lru", "kvtier")
PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
_ANSWER_TOKENS = 8


@dataclass
class Served:
    """A request as far as kvtier's policy looks at it; SGLang's own has two hundred fields more."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    finished_reason: Any = None

    def finished(self) -> bool:
        return bool(self.output_ids)


@dataclass(frozen=True)
class Scheduler:
    """What the policy reads of SGLang's scheduler."""

    page_size: int
    max_total_num_tokens: int


class Agents:
    """One rank of SGLang that evicts by `policy`, and what was found where so far."""

    def __init__(self, policy: str, device_tokens: int, host_ratio: float, guarded: bool = True) -> None:
        self.stack = Stack("mha", "page_first", device_tokens=device_tokens, host_ratio=host_ratio, policy=policy)
        self.found = {"prompt": 0, "device": 0, "host": 0}
        self._clock = VirtualClock()
        strategy = self.stack.tree.tree_core.eviction_strategy
        self._strategy = strategy if hasattr(strategy, "stepped") else None
        if self._strategy is not None:
            self._strategy.clock = self._clock
        self._scheduler = Scheduler(PAGE_TOKENS, device_tokens)

    def serve(self, at_s: float, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """One request from arrival to end."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree, allocator = self.stack.tree, self.stack.allocator
        self._clock.advance_to(at_s)
        request = Served(str(self.found["prompt"]), list(prompt))
        self._step(request)
        match = self.stack.match(list(prompt[:-1]))  # the last token of a prompt is computed in any case
        device, host = int(match.device_prefix_len), int(match.host_hit_length)
        if host and not self.stack.load(match):
            host = 0
        for name, tokens in (("prompt", len(prompt)), ("device", device), ("host", host)):
            self.found[name] += tokens
        match = self.stack.match(list(prompt[:-1]))
        lock = tree.lock(match.last_device_node)
        there = tree.path_device_indices(match.last_device_node)
        tokens = [*prompt, *answer[:-1]]  # of the last token that was generated no state exists
        tokens = tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]
        missing = len(tokens) - len(there)
        if missing > allocator.available_size():
            tree.evict(EvictParams(num_tokens=missing - allocator.available_size()))
        if missing:
            indices = torch.cat([there, allocator.alloc(missing)])
            key = RadixKey(array("q", tokens))
            tree.insert(InsertParams(key=key, value=indices, prev_prefix_len=len(there)))
        tree.unlock(lock)
        request.output_ids = list(answer)
        self._step(request)
        self.stack.until(lambda: not tree.ongoing_write_through)

    def _step(self, request: Served) -> None:
        if self._strategy is not None:
            self._strategy.stepped(self._scheduler, [request])


def some_agents(folder: str) -> dict[str, Any]:
    """One stream under both policies; then a policy whose forecast breaks halfway through a stream."""
    hits = radix_hits(folder, seeds=[1], requests=300, agents=6, device_tokens=1_280, host_ratio=2.0)
    agents, stream = Agents("kvtier", 1_280, 2.0), AgentStream(1, 120, 6)
    strategy, served = agents._strategy, 0
    for served, (at_s, prompt) in enumerate(stream, start=1):
        if served == 60:
            strategy._requests.policy.forecast = None
        agents.serve(at_s, prompt, [1] * _ANSWER_TOKENS)
        stream.answer([1] * _ANSWER_TOKENS)
    agents.stack.close()
    return {"hits": hits, "served": served, "forecasts_on": strategy._requests is not None, "found": agents.found}


def radix_hits(
    folder: str, seeds: list[int], requests: int, agents: int, device_tokens: int, host_ratio: float
) -> list[dict[str, Any]]:
    """For each seed and policy: tokens of all prompts, and how many of them were on the device and on the host."""
    from kvtier_sglang.plugin import install

    become_a_rank()
    install()
    rows = []
    for seed in seeds:
        for policy in POLICIES:
            served = Agents(policy, device_tokens, host_ratio)
            stream, answers = AgentStream(seed, requests, agents), random.Random(seed)
            for at_s, prompt in stream:
                answer = [answers.randrange(256) for _ in range(_ANSWER_TOKENS)]
                served.serve(at_s, prompt, answer)
                stream.answer(answer)
            served.stack.close()
            rows.append({"seed": seed, "policy": policy, **served.found})
    return rows
