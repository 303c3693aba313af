"""The document, the five questions, and the prompts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[1] / "documents" / "keepers-handbook.md"

QUESTIONS = (
    "In which year was the lighthouse lit for the first time?",
    "How many steps does the tower have?",
    "What is the name of the relief boat?",
    "Why must the lens never be cleaned with water?",
    "Where do the keepers meet if the tower must be left?",
)
OPENING_QUESTION = "What is this handbook about?"


def document_prompts(tokenizer: Any, questions: Sequence[str]) -> list[list[int]]:
    """Return one chat prompt of token ids per question; all begin with the whole document."""
    document = DOCUMENT.read_text()
    return [_chat(tokenizer, f"{document}\n\nAnswer in one sentence: {question}") for question in questions]


def unrelated_prompt(tokenizer: Any, length: int, seed: int) -> list[int]:
    """Return a prompt as long as the others that shares no block with them, nor with another seed's: for warming up."""
    return _chat(tokenizer, f"{seed} " + "The quick brown fox jumps over the lazy dog. " * length)[:length]


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the prefix all prompts have in common."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


def _chat(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return tokens
