"""What the demo measured, as a table for people and as one JSON object for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

SOURCES = ("hbm", "dram", "nvme", "recompute")
PATH_TITLES = {
    "cold": "cold (plain vLLM)",
    "hbm": "HBM",
    "dram": "DRAM (device reset)",
    "nvme_restart": "NVMe (new process)",
}
MIN_SHARE_FROM_CACHE = 0.95


@dataclass(frozen=True)
class Answer:
    """One answered question: its tokens and text, and what its prompt cost."""

    tokens: list[int]
    text: str
    ttft_s: float
    prompt_tokens: int
    tokens_by_source: dict[str, int]


@dataclass(frozen=True)
class PathResult:
    """The same questions answered along one path, and the bytes kvtier read from each tier for it."""

    answers: list[Answer]
    bytes_loaded: dict[str, int]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PathResult:
        return cls([Answer(**answer) for answer in value["answers"]], value["bytes_loaded"])

    @property
    def ttft_s(self) -> float:
        """Median time to the first token."""
        return median(answer.ttft_s for answer in self.answers)

    @property
    def tokens_by_source(self) -> Counter[str]:
        """Prompt tokens of all questions by where their KV came from."""
        return sum((Counter(answer.tokens_by_source) for answer in self.answers), Counter())


@dataclass(frozen=True)
class DemoResult:
    """All paths, keyed as in PATH_TITLES."""

    model: str
    questions: tuple[str, ...]
    shared_tokens: int
    paths: dict[str, PathResult]

    @property
    def prompt_tokens(self) -> int:
        """Median length of a prompt."""
        return int(median(answer.prompt_tokens for answer in self.paths["cold"].answers))

    def same_outputs(self, path: str) -> bool:
        """Whether every answer along `path` equals, token by token, the one plain vLLM computed."""
        expected = [answer.tokens for answer in self.paths["cold"].answers]
        return [answer.tokens for answer in self.paths[path].answers] == expected

    def share_from_cache(self, path: str) -> float:
        """Part of the shared prefix, averaged over the questions, that was not recomputed."""
        answers = self.paths[path].answers
        cached = [
            min(answer.prompt_tokens - answer.tokens_by_source["recompute"], self.shared_tokens) for answer in answers
        ]
        return sum(cached) / (self.shared_tokens * len(answers))

    def shortcomings(self) -> list[str]:
        """What the run should have shown and did not; empty if all is well."""
        found = [f"{path}: the answers differ from plain vLLM's" for path in self.paths if not self.same_outputs(path)]
        for path in ("hbm", "dram", "nvme_restart"):
            share = self.share_from_cache(path)
            if share < MIN_SHARE_FROM_CACHE:
                found.append(f"{path}: only {share:.0%} of the shared prefix came from the cache")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the object `make demo ARGS=--json` prints; tokens and bytes are sums over all paths."""
        tokens = sum((result.tokens_by_source for result in self.paths.values()), Counter[str]())
        loaded = sum((Counter(result.bytes_loaded) for result in self.paths.values()), Counter[str]())
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": {path: round(result.ttft_s, 4) for path, result in self.paths.items()},
            "tokens_by_source": {source: tokens[source] for source in SOURCES},
            "outputs_identical": all(self.same_outputs(path) for path in self.paths),
            "bytes_loaded": {tier: loaded[tier] for tier in ("dram", "nvme")},
        }


def print_table(result: DemoResult, console: Console) -> None:
    """Show the run to a person."""
    cold_s = result.paths["cold"].ttft_s
    table = Table(
        title=f"{result.model}, float32, on this CPU: {len(result.questions)} questions about one document, "
        f"{result.shared_tokens:,} shared tokens in prompts of {result.prompt_tokens:,}",
        caption="TTFT: median time to the first token. Tokens: where the KV of all prompts' tokens came from.",
    )
    table.add_column("path")
    for heading in ("TTFT", "of cold", *SOURCES, "MB from DRAM", "MB from NVMe", "same output"):
        table.add_column(heading, justify="right")
    for path, title in PATH_TITLES.items():
        measured = result.paths[path]
        table.add_row(
            title,
            f"{measured.ttft_s * 1000:,.0f} ms",
            "1" if path == "cold" else f"1/{cold_s / measured.ttft_s:.1f}",
            *(f"{measured.tokens_by_source[source]:,}" for source in SOURCES),
            *(f"{measured.bytes_loaded.get(tier, 0) / 1e6:,.0f}" for tier in ("dram", "nvme")),
            "reference" if path == "cold" else "yes" if result.same_outputs(path) else "NO",
        )
    console.print(table)
    for question, answer in zip(result.questions, result.paths["nvme_restart"].answers, strict=True):
        console.print(f"{question}\n  {answer.text}", markup=False, highlight=False)
    console.print("These are the words of a model of 135 million parameters; what counts is that they do not change.")
