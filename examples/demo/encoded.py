"""Scenarios of `examples.demo.codec`: each runs in a process of its own with one engine and returns plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from examples.demo.conversation import OPENING_QUESTION, document_prompts
from examples.demo.engine import DemoEngine

ANSWER_TOKENS = 32


def keep(model: str, kvtier: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Bring the document in with an opening question; the bytes that lie in the nvme tier afterwards."""
    with DemoEngine(model, kvtier=kvtier, prefix_caching=True, dtype=dtype) as engine:
        [opening] = document_prompts(engine.tokenizer, [OPENING_QUESTION])
        engine.ask(opening, 1)
        return {"bytes": engine.bytes_kept()}


def answer(model: str, kvtier: dict[str, Any], dtype: str, questions: list[str]) -> dict[str, Any]:
    """Answer the questions in a new process; the document comes from the nvme tier, once."""
    with DemoEngine(model, kvtier=kvtier, prefix_caching=True, dtype=dtype) as engine:
        prompts = document_prompts(engine.tokenizer, questions)
        return {"answers": [asdict(engine.ask(prompt, ANSWER_TOKENS)) for prompt in prompts]}
