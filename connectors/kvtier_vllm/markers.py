"""The marker tokens of a model's chat template, found by asking its tokenizer for the known ones.

vLLM's core sees token ids only: whether an output ends in a tool call, or a prompt in a tool's result, is told by them.
A family's markers count only where the tokenizer has its special token; a model with none has no markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvtier.predict.roles import ChatMarkers, Tokens

# Texts by role and family: ChatML, Llama 3, DeepSeek, Mistral, gpt-oss, Gemma, GLM.
_TEXTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "system": (
        ("<|im_start|>", "system"),
        ("<|start_header_id|>", "system"),
        ("[SYSTEM_PROMPT]", ""),
        ("<|start|>", "system"),
        ("<|start|>", "developer"),
        ("<|system|>", ""),
    ),
    "user": (
        ("<|im_start|>", "user"),
        ("<|start_header_id|>", "user"),
        ("<｜User｜>", ""),
        ("[INST]", ""),
        ("<|start|>", "user"),
        ("<start_of_turn>", "user"),
        ("<|user|>", ""),
    ),
    "assistant": (
        ("<|im_start|>", "assistant"),
        ("<|start_header_id|>", "assistant"),
        ("<｜Assistant｜>", ""),
        ("<|start|>", "assistant"),
        ("<start_of_turn>", "model"),
        ("<|assistant|>", ""),
    ),
    "tool": (
        ("<|im_start|>", "tool"),
        ("<|start_header_id|>", "ipython"),
        ("<｜tool▁outputs▁begin｜>", ""),
        ("[TOOL_RESULTS]", ""),
        ("<|observation|>", ""),
    ),
    "tool_result_in_user": (("<tool_response>", ""),),
    "tool_call": (
        ("<tool_call>", ""),
        ("<|python_tag|>", ""),
        ("<｜tool▁calls▁begin｜>", ""),
        ("[TOOL_CALLS]", ""),
        ("<|call|>", ""),
    ),
    "tool_call_end": (("</tool_call>", ""), ("<｜tool▁calls▁end｜>", "")),
}


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...


def chat_markers(tokenizer: Tokenizer) -> ChatMarkers:
    """The markers this tokenizer has: a special token, followed by the tokens of the role's name if there is one."""
    vocabulary = tokenizer.get_vocab()

    def sequences(texts: tuple[tuple[str, str], ...]) -> tuple[Tokens, ...]:
        found = []
        for special, name in texts:
            if special in vocabulary:
                role = tokenizer.encode(name, add_special_tokens=False) if name else []
                found.append((vocabulary[special], *role))
        return tuple(found)

    return ChatMarkers(**{role: sequences(texts) for role, texts in _TEXTS.items()})
