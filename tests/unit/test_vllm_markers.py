"""Chat markers: asked of the tokenizer, found for the families we know, and absent where it has none."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.model.request import InputType, StopReason
from kvtier.predict.roles import find_roles, stop_reason_of
from kvtier_vllm.markers import chat_markers

DEEPSEEK_CALL = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


class Vocabulary:
    """A tokenizer of whole words and some special tokens."""

    def __init__(self, *special: str) -> None:
        self.words = {text: 1000 + i for i, text in enumerate(special)}

    def get_vocab(self) -> dict[str, int]:
        return self.words

    def encode(self, text: str, **options: Any) -> list[int]:
        assert options == {"add_special_tokens": False}
        return [sum(map(ord, text)) % 1000]


@pytest.mark.parametrize(
    ("special", "call", "end"),
    [
        (("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"), "<tool_call>", "</tool_call>"),
        (("<|start_header_id|>", "<|python_tag|>"), "<|python_tag|>", None),
        (("[INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"), "[TOOL_CALLS]", None),
        (
            ("<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ],
    ids=["chatml", "llama3", "mistral", "deepseek"],
)
def test_a_tool_call_is_seen_in_the_output(special: tuple[str, ...], call: str, end: str | None) -> None:
    tokenizer = Vocabulary(*special)
    markers = chat_markers(tokenizer)
    output = [1, 2, tokenizer.words[call], 3, *([tokenizer.words[end]] if end else []), 4]
    assert stop_reason_of(output, markers, StopReason.END_TURN) is StopReason.TOOL_USE
    assert stop_reason_of([1, 2, 3, 4], markers, StopReason.END_TURN) is StopReason.END_TURN


def test_a_tool_result_is_told_from_a_users_words() -> None:
    tokenizer = Vocabulary("<|im_start|>", "<|im_end|>")
    markers, start = chat_markers(tokenizer), tokenizer.words["<|im_start|>"]

    def message(role: str) -> list[int]:
        return [start, *tokenizer.encode(role, add_special_tokens=False), 5, 6, 7]

    spoken = message("system") + message("user")
    assert find_roles(spoken, markers, 4).input_type is InputType.USER_TEXT
    assert find_roles(spoken + message("assistant") + message("tool"), markers, 4).input_type is InputType.TOOL_RESULT


def test_a_base_model_has_no_markers() -> None:
    markers = chat_markers(Vocabulary("<s>", "</s>"))
    assert markers.heads() == {}
    assert stop_reason_of([1, 2], markers, StopReason.LENGTH) is StopReason.LENGTH
