"""Scenarios about the tiny models themselves, on plain vLLM."""

from __future__ import annotations

from typing import Any

from tests.e2e.engine import answers, ask, cached_tokens, start_engine
from tests.e2e.models import prompt_tokens


def ask_varied_prompts(model: str, blocks: int, block_tokens: int, count: int) -> dict[str, Any]:
    """Answer `count` prompts; then each again from the device cache, alone, and with one block of it changed."""
    llm = start_engine(model, num_gpu_blocks_override=400)
    prompts = [prompt_tokens(index, blocks * block_tokens + 5) for index in range(count)]
    changed = [_with_other_block(prompt, index % blocks, block_tokens) for index, prompt in enumerate(prompts)]
    together = answers(ask(llm, prompts))
    alone = [ask(llm, [prompt]) for prompt in prompts]
    return {
        "together": together,
        "alone": [answers(output)[0] for output in alone],
        "alone_cached_tokens": [cached_tokens(output)[0] for output in alone],
        "changed": answers(ask(llm, changed)),
    }


def _with_other_block(prompt: list[int], block: int, block_tokens: int) -> list[int]:
    start = block * block_tokens
    other = prompt_tokens(10_000 + prompt[start], block_tokens)
    return prompt[:start] + other + prompt[start + block_tokens :]
