"""The hbm tier in a real vLLM: the view is the pool, and steering changes what is computed again, never an answer."""

from __future__ import annotations

import pytest

from tests.e2e import scenarios_device as scenarios
from tests.e2e.conftest import RunScenario


@pytest.mark.timeout(600)
def test_steering_finds_more_on_the_device_and_changes_no_answer(run: RunScenario, tiny_llama: str) -> None:
    engine, kvtier = (
        run(scenarios.agent_stream, model=tiny_llama, seed=2, requests=150, hbm_policy=order)
        for order in ("engine", "kvtier")
    )
    assert kvtier["answers"] == engine["answers"]
    assert (engine["moved"], kvtier["off"]) == (0, "")
    assert kvtier["moved"] > 0
    name = "kvtier_tokens_total{source=hbm}"
    assert kvtier["metrics"][name] >= engine["metrics"][name] > 0
    for result in (engine, kvtier):
        assert result["view_rows"] == result["pool_rows"] > 0
        assert result["free"] == scenarios.POOL_BLOCKS - 1, "nothing is held"
        assert result["leases"] == 0
        assert result["metrics"]["kvtier_resident_bytes{tier=hbm}"] > 0
