"""Every level of SGLang's cache with kvtier below it: device, host, storage, a restart. The same answers always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import prompt_tokens
from tests.sglang.conftest import StartServer, kvtier_storage
from tests.sglang.server import PAGE_TOKENS, SGLangServer

PROMPT_TOKENS = 600
WHOLE = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
FILLERS = 8


def other_prompts(server: SGLangServer) -> None:
    """Push what the device holds out of it: more tokens than it has room for."""
    for number in range(FILLERS):
        server.generate(prompt_tokens(100 + number, 900), max_tokens=1)


def tokens_from(metrics: dict[str, float], source: str) -> float:
    return metrics.get(f"kvtier_tokens_total{{source={source}}}", 0.0)


def assert_conserved(metrics: dict[str, float]) -> None:
    """What was computed again has one reason each, and nothing failed."""
    misses = sum(value for key, value in metrics.items() if key.startswith("kvtier_miss_tokens_total"))
    assert tokens_from(metrics, "recompute") == misses
    assert not [key for key in metrics if key.startswith("kvtier_faults_total")]


@pytest.mark.parametrize(
    ("model", "layout", "restart"),
    [
        ("tiny_llama", "page_first", True),
        ("tiny_llama", "page_first_direct", False),
        ("tiny_llama", "layer_first", True),
        ("tiny_mla", "page_first_direct", True),
        ("tiny_mla", "layer_first", False),
    ],
)
def test_every_level_gives_the_same_answer(
    start: StartServer, request: pytest.FixtureRequest, tmp_path: Path, model: str, layout: str, restart: bool
) -> None:
    folder: Path = request.getfixturevalue(model)
    storage = kvtier_storage(tmp_path / "nvme")
    prompt = prompt_tokens(0, PROMPT_TOKENS)
    seen: dict[str, dict[str, Any]] = {}
    with start(folder, layout=layout, storage=storage) as server:
        seen["cold"] = server.cached_tokens(prompt)
        seen["device"] = server.cached_tokens(prompt)
        other_prompts(server)
        seen["host"] = server.cached_tokens(prompt)
        rows = 2 if model == "tiny_llama" and layout != "layer_first" else 1
        server.wait_stored(rows * (PROMPT_TOKENS + FILLERS * 900) // PAGE_TOKENS * 0.95)
        server.flush()
        seen["storage"] = server.cached_tokens(prompt)
        server.wait_counted(WHOLE, "nvme")
        metrics = server.metrics()
        assert_conserved(metrics)
        assert tokens_from(metrics, "nvme") == seen["storage"]["storage"]
        assert tokens_from(metrics, "recompute") == WHOLE + FILLERS * (900 // PAGE_TOKENS * PAGE_TOKENS)
        written = sum(v for k, v in metrics.items() if k.startswith("kvtier_bytes_total{direction=write"))
        assert written == metrics["kvtier_resident_bytes{tier=nvme}"], "every page was written once"
        assert metrics["kvtier_leases{}"] == 0
    if restart:
        with start(folder, layout=layout, storage=storage) as server:
            seen["restart"] = server.cached_tokens(prompt)
            server.wait_counted(WHOLE, "nvme")
            assert_conserved(server.metrics())
    where = {name: [found[level] for level in ("device", "host", "storage")] for name, found in seen.items()}
    expected = {"cold": [0, 0, 0], "device": [WHOLE, 0, 0], "host": [0, WHOLE, 0], "storage": [0, 0, WHOLE]}
    assert where == expected | ({"restart": [0, 0, WHOLE]} if restart else {})
    assert len({tuple(found["output"]) for found in seen.values()}) == 1, "the answer never depends on the level"


def test_a_long_prompt_asks_in_parts(start: StartServer, tiny_llama: Path, tmp_path: Path) -> None:
    """More pages than one storage call takes (128), with and without being told what comes before."""
    prompt = prompt_tokens(5, 3_000)
    whole = 3_000 // PAGE_TOKENS * PAGE_TOKENS
    for told in (False, True):
        storage = kvtier_storage(tmp_path / f"nvme-{told}", hicache_storage_pass_prefix_keys=told)
        with start(tiny_llama, storage=storage) as server:
            cold = server.cached_tokens(prompt)
            longer = server.cached_tokens([*prompt[:whole], *prompt_tokens(6, 200)])
            assert longer["device"] == whole
            server.wait_stored(2 * (whole + 192) / PAGE_TOKENS)
            server.flush()
            warm = server.cached_tokens(prompt)
            server.flush()
            again = server.cached_tokens([*prompt[:whole], *prompt_tokens(6, 200)])
            assert (warm["storage"], warm["output"]) == (whole, cold["output"])
            assert (again["storage"], again["output"]) == (whole + 192, longer["output"])
            server.wait_counted(2 * whole + 192, "nvme")
            assert_conserved(server.metrics())
