"""What the contract of an engine with kvtier is tested through: the few things a person can do with a running server.

An engine joins the suite by a harness of its own in `HARNESSES`; nothing in the tests names an engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """The tokens an engine generated, and how many prompt tokens kvtier's durable tiers spared it."""

    output: list[int]
    from_kvtier: int


class EngineUnderTest(Protocol):
    """A served model with one nvme tier. Greedy, so that equal caches give equal answers."""

    block_tokens: int
    nvme_path: Path

    def answer(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "") -> Answer:
        """Answer once nothing of the prompt is left in memory faster than kvtier's durable tiers.

        `tenant` is the engine's cache salt; `adapter` whatever makes two requests use different weights."""
        ...

    def wait_stored(self, prompt: Sequence[int]) -> None:
        """Wait until every full block of a prompt that was answered last is in the durable tier."""
        ...

    def counters(self) -> dict[str, float]:
        """kvtier's exported metrics: `name{label=value,...}` -> value, counters with their `_total`."""
        ...

    def restart(self) -> None:
        """Stop the server as an operator does, and start it again over the same folder."""
        ...

    def clear(self) -> None:
        """Have kvtier forget everything, the way this engine offers it."""
        ...

    def stop(self) -> None:
        """End the server. Idempotent."""
        ...


def available() -> dict[str, Callable[[Path], EngineUnderTest]]:
    """Harnesses that can run here, by name of the engine."""
    found: dict[str, Callable[[Path], EngineUnderTest]] = {}
    from tests.sglang.server import sglang_python

    if sglang_python() is not None:
        from tests.contract.engine.sglang import SGLangUnderTest

        found["sglang"] = SGLangUnderTest
    if importlib.util.find_spec("tests.contract.engine.vllm") and importlib.util.find_spec("vllm"):
        found["vllm"] = importlib.import_module("tests.contract.engine.vllm").VLLMUnderTest
    return found
