"""The radix eviction policy in SGLang's own tree, on a stream of agents; `benchmarks/radix.py` runs more of them."""

from __future__ import annotations

from pathlib import Path

from tests.sglang.agents import PYTHON_CORE, radix_hits
from tests.sglang.conftest import run_in_sglang


def test_agents_find_more_on_the_device_than_under_lru(tmp_path: Path) -> None:
    lru, kvtier = run_in_sglang(
        radix_hits, tmp_path, PYTHON_CORE, seeds=[1], requests=300, agents=6, device_tokens=1_280, host_ratio=2.0
    )
    assert lru["prompt"] == kvtier["prompt"]
    assert kvtier["device"] > lru["device"]
    assert kvtier["device"] + kvtier["host"] >= lru["device"] + lru["host"]
