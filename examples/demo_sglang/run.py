"""Two servers, one after the other, and the same prompts answered from every level of their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.demo.conversation import DOCUMENT, QUESTIONS
from examples.demo.prepare_model import prepare
from kvtier.testing.scenario import run_scenario
from tests.sglang.server import PAGE_TOKENS, SGLangServer, Streamed

LEVELS = ("cold", "device", "host", "storage", "storage_restart")
TITLES = {
    "cold": "cold",
    "device": "device",
    "host": "host (device filled with other prompts)",
    "storage": "kvtier, NVMe (device and host flushed)",
    "storage_restart": "kvtier, NVMe (new server)",
}
_ANSWER_TOKENS = 16
_MIN_SHARE = 0.95


@dataclass
class Outcome:
    """What was measured: every prompt's answer, by level."""

    model: str
    prompt_tokens: int
    answers: dict[str, list[Streamed]] = field(default_factory=dict)

    @property
    def questions(self) -> int:
        """Prompts asked at each level."""
        return len(self.answers["cold"])

    def ttft_s(self, level: str) -> float:
        """Median time to the first token."""
        return median(answer.ttft_s for answer in self.answers[level])

    def cached_tokens(self, level: str) -> int:
        """Prompt tokens, over all prompts, that came from this level."""
        return sum(answer.cached[level.removesuffix("_restart")] for answer in self.answers[level])

    def same_outputs(self, level: str) -> bool:
        """Whether all answers are those of the cold run, to the token."""
        return all(a.output == b.output for a, b in zip(self.answers[level], self.answers["cold"], strict=True))

    def shortcomings(self) -> list[str]:
        """What did not go as it should, in words."""
        wrong = [f"the answers from {TITLES[level]} differ" for level in LEVELS if not self.same_outputs(level)]
        expected = _MIN_SHARE * self.prompt_tokens * self.questions
        return wrong + [
            f"only {self.cached_tokens(level):,} tokens came from {TITLES[level]}"
            for level in LEVELS[1:]
            if self.cached_tokens(level) < expected
        ]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "model": self.model,
            "questions": self.questions,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": {level: round(self.ttft_s(level), 4) for level in LEVELS},
            "cached_tokens": {level: self.cached_tokens(level) for level in LEVELS[1:]},
            "outputs_identical": all(self.same_outputs(level) for level in LEVELS),
        }


def run_demo(folder: Path, questions: int, model: Path | None, console: Console) -> Outcome:
    """Run both servers. Raises ServerError if one does not start or dies."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("preparing the model", total=len(LEVELS) * questions + 3)

        def step(title: str, done: int = 1) -> None:
            progress.update(task, description=title, advance=done)
            if not console.is_terminal and done:
                console.print(f"demo: {title}")

        path = model or Path(run_scenario(prepare, work_folder=folder))
        prompts = _prompts(path, questions)
        longest = max(map(len, prompts))
        outcome = Outcome(model=path.name, prompt_tokens=sum(map(len, prompts)) // questions)
        device_tokens = (longest * questions + 512) // PAGE_TOKENS * PAGE_TOKENS
        settings: dict[str, Any] = {
            "device_tokens": device_tokens,
            "host_ratio": 3.0,
            "storage": {
                "backend_name": "kvtier",
                "module_path": "kvtier_sglang",
                "class_name": "KVTierStorage",
                "interface_v1": 1,
                "nvme_path": str(folder / "nvme"),
                "nvme_bytes": "4GiB",
            },
        }
        step("starting SGLang")
        with SGLangServer(path, folder, **settings) as server:
            server.stream(_filler(longest, 0), 1)  # first touches, and what SGLang compiles at its first prompt
            outcome.answers["cold"] = [_ask(server, prompt, step, "cold") for prompt in prompts]
            outcome.answers["device"] = [_ask(server, prompt, step, "from the device") for prompt in prompts]
            for number in range(1, questions + 2):
                server.stream(_filler(longest, number), 1)
            outcome.answers["host"] = [_ask(server, prompt, step, "from host memory") for prompt in prompts]
            server.wait_stored(2 * sum(len(prompt) // PAGE_TOKENS for prompt in prompts))
            server.flush()
            outcome.answers["storage"] = [_ask(server, prompt, step, "from kvtier") for prompt in prompts]
        step("starting SGLang again")
        with SGLangServer(path, folder, **settings) as server:
            server.stream(_filler(longest, 99), 1)
            outcome.answers["storage_restart"] = [_ask(server, prompt, step, "after restart") for prompt in prompts]
        step("done")
    return outcome


def _ask(server: SGLangServer, prompt: Sequence[int], step: Any, title: str) -> Streamed:
    answer = server.stream(prompt, _ANSWER_TOKENS)
    step(title)
    return answer


def _prompts(model: Path, questions: int) -> list[list[int]]:
    """Prompts that begin differently, so that none finds another one's pages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    document = DOCUMENT.read_text()
    texts = [f"Copy {i + 1}.\n{document}\n\nAnswer in one sentence: {QUESTIONS[i]}" for i in range(questions)]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "system", "content": f"You keep copy {i + 1}."}, {"role": "user", "content": text}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )
        for i, text in enumerate(texts)
    ]


def _filler(length: int, seed: int) -> list[int]:
    """A prompt of this length that shares no page with any other."""
    return [100 + (seed * 7919 + i * 31) % 20_000 for i in range(length)]
