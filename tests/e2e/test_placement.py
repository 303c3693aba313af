"""Placement in a real vLLM on the CPU: slow tiers declined, announced sessions served from memory, all hints."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from examples.demo.prepare_model import smollm2
from tests.e2e import scenarios_placement as scenarios
from tests.e2e.conftest import RunScenario

POOL = {"num_gpu_blocks_override": 300, "max_model_len": 1_024}


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"dram_bytes": "24MiB", "nvme_path": str(tmp_path / "nvme"), "nvme_bytes": "64MiB", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tokens_from(sources: dict[str, float], source: str) -> float:
    return sources.get(f"kvtier_tokens_total{{source={source}}}", 0.0)


def test_a_tier_a_hundred_times_too_slow_is_declined_and_costs_nothing(
    run: RunScenario, tmp_path: Path, tiny_llama: str
) -> None:
    kvtier = options(tmp_path)
    result = run(
        scenarios.crawling_tier, model=tiny_llama, tokens=600, pairs=30, slowdown=100.0, kvtier=kvtier, engine=POOL
    )
    counted = result["metrics"]
    declined = counted.get("kvtier_miss_tokens_total{reason=declined_recompute_cheaper}", 0.0)
    # Those the crawling writes had not reached, and those asked while the tier's breaker was open, count elsewhere.
    assert declined >= 15 * 576, "what was found there was computed instead"
    assert tokens_from(counted, "nvme") == 0.0
    print(f"found below, declined / unknown: {result['ratio']:.3f} (median of pairs), {result['new_s'] * 1e3:.1f} ms")
    # The bar is 5 % (measured: docs/placement.md); the median of thirty pairs moves by 2 % on a busy machine.
    assert result["ratio"] <= 1.06
    assert result["leases"] == 0


@pytest.mark.parametrize("hinted", [False, True])
def test_an_announced_session_is_served_from_memory_and_not_from_below(
    run: RunScenario, tmp_path: Path, tiny_llama: str, hinted: bool
) -> None:
    kvtier = options(tmp_path, dram_bytes="4MiB", gate=False, policy="lru", control=f"127.0.0.1:{free_port()}")
    result = run(scenarios.announced_session, model=tiny_llama, tokens=300, hinted=hinted, kvtier=kvtier, engine=POOL)
    assert result["cached"] == 288
    assert tokens_from(result["sources"], "dram" if hinted else "nvme") == 288
    assert result["outcome"] == ("accepted" if hinted else None)
    assert result["leases"] == result["hinted"] == 0


def test_hints_come_with_requests_and_bad_ones_cost_only_themselves(
    run: RunScenario, tmp_path: Path, tiny_llama: str
) -> None:
    result = run(scenarios.hinted_requests, model=tiny_llama, tokens=100, kvtier=options(tmp_path), engine=POOL)
    now, standing = result["now"], result["standing"]
    assert 20 < standing["a"]["returns_s"] - now <= 30
    assert standing["b"]["returns_s"] == 0
    assert 50 < standing["c"]["retained_until_s"] - now <= 60
    assert result["metrics"]["kvtier_hints_total{kind=message,outcome=rejected}"] == 2
    assert result["leases"] == 0


def test_a_burst_that_shares_a_prefix_is_not_slowed_down(run: RunScenario, tmp_path: Path) -> None:
    """A real model: what the cache decides is small beside what it spares."""
    arguments: dict[str, Any] = {"model": str(smollm2()), "requests": 32, "tokens": 512, "rounds": 2}
    plain, cached = (
        min(run(scenarios.shared_burst, kvtier=kvtier, engine=POOL, **arguments)["seconds"])
        for kvtier in (None, options(tmp_path, dram_bytes="256MiB", nvme_bytes="512MiB"))
    )
    assert cached <= 1.1 * plain, "the bar is 1; a busy machine needs some room"
