"""The tiny models are worth comparing outputs of: each answer depends on every block of its prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import scenarios_models
from tests.e2e.conftest import RunScenario
from tests.e2e.models import ALL_MODELS, VOCAB_SIZE, prompt_tokens

BLOCKS = 3
PROMPTS = 6


@pytest.mark.parametrize("name", ALL_MODELS)
def test_answers_vary_and_do_not_depend_on_the_batch(run: RunScenario, name: str) -> None:
    block_tokens = 16 if name == "tiny-mla" else 32
    result = run(
        scenarios_models.ask_varied_prompts,
        model=str(ALL_MODELS[name]()),
        blocks=BLOCKS,
        block_tokens=block_tokens,
        count=PROMPTS,
    )
    together = [tuple(answer) for answer in result["together"]]
    assert len(set(together)) == PROMPTS, "every prompt has its own answer"
    assert len({token for answer in together for token in answer}) > PROMPTS, "answers are not one repeated token"
    assert result["alone"] == result["together"], "the answer is the same alone, from the cache, and in a batch"
    assert all(before != after for before, after in zip(result["together"], result["changed"], strict=True)), (
        "changing one block of a prompt changes its answer, so a wrong block shows"
    )
    # vLLM turns prefix caching off for MLA on the CPU: there every reuse comes through a connector.
    expected_cached = 0 if name == "tiny-mla" else BLOCKS * block_tokens
    assert result["alone_cached_tokens"] == [expected_cached] * PROMPTS


@pytest.mark.parametrize("make", ALL_MODELS.values(), ids=ALL_MODELS)
def test_the_same_recipe_gives_the_same_weights(make: Callable[[Path], Path], tmp_path: Path) -> None:
    first, second = make(tmp_path / "first"), make(tmp_path / "second")
    assert first.name == second.name
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_prompts_are_reproducible_and_share_no_block() -> None:
    assert prompt_tokens(1, 40) == prompt_tokens(1, 40) == prompt_tokens(1, 80)[:40]
    assert prompt_tokens(1, 32) != prompt_tokens(2, 32)
    assert max(prompt_tokens(3, 400)) < VOCAB_SIZE
