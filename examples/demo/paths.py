"""The demo's scenarios: each runs in a process of its own with one engine and returns plain JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.demo.conversation import OPENING_QUESTION, document_prompts, shared_tokens
from examples.demo.engine import DemoEngine
from examples.demo.report import Answer

ANSWER_TOKENS = 32
_SHORT_PROMPT_TOKENS = 64


def without_cache(model: str, questions: list[str], progress: str) -> dict[str, Any]:
    """Plain vLLM, prefix caching off: every question computes the whole document. The reference for all outputs."""
    with DemoEngine(model, kvtier=None, prefix_caching=False) as engine:
        prompts = document_prompts(engine.tokenizer, questions)
        # As long as the real prompts, so that the first question does not pay for first-time costs of this process.
        engine.warm_up(len(prompts[0]))
        answers = _ask_each(engine, prompts, progress)
        return {"cold": _result(engine, answers), "shared_tokens": shared_tokens(prompts)}


def first_process(model: str, questions: list[str], kvtier: dict[str, Any], progress: str) -> dict[str, Any]:
    """vLLM with kvtier: one other question brings the document in, then the questions hit the device and DRAM."""
    with DemoEngine(model, kvtier=kvtier, prefix_caching=True) as engine:
        opening, *prompts = document_prompts(engine.tokenizer, [OPENING_QUESTION, *questions])
        engine.ask(opening, ANSWER_TOKENS)
        hbm = _result(engine, _ask_each(engine, prompts, progress))
        dram = _result(engine, _ask_each(engine, prompts, progress, before_each=engine.forget_device_cache))
    dram["bytes_loaded"] = _difference(dram["bytes_loaded"], hbm["bytes_loaded"])
    return {"hbm": hbm, "dram": dram}


def new_process(model: str, question: str, kvtier: dict[str, Any], progress: str) -> dict[str, Any]:
    """vLLM with kvtier started again on the same NVMe folder: the first question about the document it gets."""
    with DemoEngine(model, kvtier=kvtier, prefix_caching=True) as engine:
        # Short: kvtier leaves only the question to compute, and must not find this prompt from an earlier process.
        engine.warm_up(_SHORT_PROMPT_TOKENS)
        return _result(engine, _ask_each(engine, document_prompts(engine.tokenizer, [question]), progress))


def _ask_each(
    engine: DemoEngine, prompts: Sequence[list[int]], progress: str, before_each: Callable[[], None] | None = None
) -> list[Answer]:
    answers = []
    for prompt in prompts:
        if before_each is not None:
            before_each()
        answers.append(engine.ask(prompt, ANSWER_TOKENS))
        with Path(progress).open("a") as marks:
            marks.write(".")  # the parent's progress bar counts these
    return answers


def _result(engine: DemoEngine, answers: list[Answer]) -> dict[str, Any]:
    return {"answers": [asdict(answer) for answer in answers], "bytes_loaded": engine.bytes_loaded()}


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {tier: count - before.get(tier, 0) for tier, count in after.items()}
