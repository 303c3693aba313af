"""The demo's verdict: what counts as the same answer, as served from the cache, and what the JSON object holds."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from examples.demo.conversation import shared_tokens
from examples.demo.report import Answer, DemoResult, PathResult, print_table

PROMPT = 1_000


def path_of(source: str, cached: int, ttft_s: float, tokens: list[list[int]], loaded: dict[str, int]) -> PathResult:
    by_source = {"hbm": 0, "dram": 0, "nvme": 0, "recompute": PROMPT - cached}
    by_source[source] += cached
    return PathResult([Answer(list(answer), "text", ttft_s, PROMPT, by_source) for answer in tokens], loaded)


@pytest.fixture
def paths() -> dict[str, PathResult]:
    tokens = [[1, 2], [3, 4]]
    return {
        "cold": path_of("recompute", 0, 5.0, tokens, {}),
        "hbm": path_of("hbm", 960, 0.1, tokens, {}),
        "dram": path_of("dram", 960, 0.2, tokens, {"dram": 100}),
        "nvme_restart": path_of("nvme", 960, 0.5, tokens, {"dram": 100, "nvme": 90}),
    }


def result_of(paths: dict[str, PathResult]) -> DemoResult:
    return DemoResult("model", ("first?", "second?"), 980, paths)


def test_the_json_object(paths: dict[str, PathResult]) -> None:
    assert result_of(paths).as_json() == {
        "model": "model",
        "prompt_tokens": 1_000,
        "ttft_s": {"cold": 5.0, "hbm": 0.1, "dram": 0.2, "nvme_restart": 0.5},
        "tokens_by_source": {"hbm": 1_920, "dram": 1_920, "nvme": 1_920, "recompute": 2_240},
        "outputs_identical": True,
        "bytes_loaded": {"dram": 200, "nvme": 90},
    }
    assert result_of(paths).shortcomings() == []


@pytest.mark.parametrize("path", ["hbm", "dram", "nvme_restart"])
def test_one_other_token_is_reported(paths: dict[str, PathResult], path: str) -> None:
    paths[path].answers[1].tokens[-1] = 99
    result = result_of(paths)
    assert result.as_json()["outputs_identical"] is False
    assert result.shortcomings() == [f"{path}: the answers differ from plain vLLM's"]


def test_a_path_that_recomputed_the_document_is_reported(paths: dict[str, PathResult]) -> None:
    paths["nvme_restart"] = path_of("nvme", 900, 0.5, [[1, 2], [3, 4]], {})
    result = result_of(paths)
    assert result.share_from_cache("nvme_restart") == pytest.approx(900 / 980)
    assert result.shortcomings() == ["nvme_restart: only 92% of the shared prefix came from the cache"]


def test_the_table_shows_every_path(paths: dict[str, PathResult]) -> None:
    screen = StringIO()
    print_table(result_of(paths), Console(file=screen, width=120))
    text = screen.getvalue()
    assert "1/10.0" in text
    assert text.count("yes") == 3
    assert max(len(line) for line in text.splitlines()) <= 120


def test_shared_tokens_stop_at_the_first_difference_and_the_shortest_prompt() -> None:
    assert shared_tokens([[1, 2, 3, 4], [1, 2, 9, 4]]) == 2
    assert shared_tokens([[1, 2], [1, 2, 3]]) == 2
    assert shared_tokens([[5], [6]]) == 0
