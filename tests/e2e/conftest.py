"""Fixtures of the end-to-end tests: the tiny models, and scenarios run in processes of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvtier.testing.scenario import run_scenario
from tests.e2e import models

HERE = Path(__file__).parent


class RunScenario(Protocol):
    """`run(scenario, timeout_s=..., environment=..., **arguments)` returns what the scenario returned."""

    def __call__(
        self,
        scenario: Callable[..., Any],
        *,
        timeout_s: float = ...,
        environment: dict[str, str] = ...,
        **arguments: Any,
    ) -> Any: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder e2e, and skip them where vLLM is not installed."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed in this environment"))


@pytest.fixture
def run(tmp_path: Path) -> RunScenario:
    """Run a scenario in a fresh process whose files lie in this test's temporary folder."""

    def call(
        scenario: Callable[..., Any],
        *,
        timeout_s: float = 300.0,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Any:
        return run_scenario(
            scenario, work_folder=tmp_path, arguments=arguments, environment=environment, timeout_s=timeout_s
        )

    return call


@pytest.fixture(scope="session")
def tiny_llama() -> str:
    """Folder of a random Llama: one group of full attention."""
    return str(models.tiny_llama())


@pytest.fixture(scope="session")
def tiny_mistral() -> str:
    """Folder of a random Mistral: one sliding-window group."""
    return str(models.tiny_mistral())


@pytest.fixture(scope="session")
def tiny_gemma() -> str:
    """Folder of a random Gemma 3: two sliding-window groups and one of full attention."""
    return str(models.tiny_gemma())


@pytest.fixture(scope="session")
def tiny_mla() -> str:
    """Folder of a random DeepSeek: multi-head latent attention."""
    return str(models.tiny_mla())
