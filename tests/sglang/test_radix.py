"""The radix eviction policy in SGLang's own tree, on a stream of agents; `benchmarks/radix.py` runs more of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.agents import PYTHON_CORE, some_agents
from tests.sglang.conftest import run_in_sglang


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("agents")
    return run_in_sglang(some_agents, folder, PYTHON_CORE)


def test_agents_find_more_on_the_device_than_under_lru(agents: Any) -> None:
    lru, kvtier = agents["hits"]
    assert lru["prompt"] == kvtier["prompt"]
    assert kvtier["device"] > lru["device"]
    assert kvtier["device"] + kvtier["host"] >= lru["device"] + lru["host"]


def test_a_policy_that_breaks_leaves_recency_and_a_running_scheduler(agents: Any) -> None:
    assert (agents["served"], agents["forecasts_on"]) == (120, False)
    assert agents["found"]["device"] > 0
