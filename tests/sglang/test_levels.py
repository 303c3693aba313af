"""Every level of SGLang's cache with kvtier below it: device, host, storage, a restart. The same answers always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import prompt_tokens
from tests.sglang import scenarios
from tests.sglang.conftest import EVERYTHING, StartServer, in_the_full_run, kvtier_storage, run_in_sglang
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
    """What was computed again has one reason each, and nothing failed. What is slow on a busy machine did not fail."""
    misses = sum(value for key, value in metrics.items() if key.startswith("kvtier_miss_tokens_total"))
    assert tokens_from(metrics, "recompute") == misses
    assert not [key for key in metrics if key.startswith("kvtier_faults_total") and "reason=slow" not in key]


EVERY_SERVER = [(model, layout) for model in ("tiny_llama", "tiny_mla") for layout in scenarios.LAYOUTS]
# A server takes half a minute to start; the combinations left out here run without one, in `without_a_server`.
SERVERS = EVERY_SERVER if EVERYTHING else [("tiny_llama", "page_first")]


@pytest.fixture(scope="module")
def without_a_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every pool and layout in one process of SGLang's environment."""
    return run_in_sglang(scenarios.without_a_server, tmp_path_factory.mktemp("without-a-server"))


@pytest.mark.parametrize("layout", scenarios.LAYOUTS)
@pytest.mark.parametrize("pool", scenarios.POOLS)
def test_every_pool_and_layout_brings_back_the_same_bytes(without_a_server: Any, pool: str, layout: str) -> None:
    """From the host after eviction, from kvtier after a flush, and from kvtier by new objects over the same folder."""
    assert without_a_server["levels"][f"{pool}-{layout}"] == {
        "tokens": [scenarios.TOKENS] * 3,
        "prefetched": [scenarios.TOKENS] * 2,
        "same_bytes": [True] * 3,
        "in_place": layout != "layer_first",
        "leases": 0,
    }


def test_a_second_kind_of_state_is_refused_in_words(without_a_server: Any) -> None:
    """SGLang's v2 pools: the attach fails, says why, and leaves nothing open."""
    found = without_a_server["hybrid"]
    assert "keeps a second kind of state (swa)" in found["refusal"]
    assert found["levels_of_the_next"] == ["nvme"]


def test_pages_belong_to_salt_adapter_and_weights(without_a_server: Any) -> None:
    """LMCache#4825, vllm#44250, sglang#26792."""
    assert without_a_server["whose"] == {"salt": 0, "adapter": 0, "own": scenarios.TOKENS, "new weights": 0}


def test_requests_aborted_at_any_moment_leave_nothing_behind(without_a_server: Any) -> None:
    """LMCache#1034: no lease, no pinned row, and the next request finds the same bytes."""
    whole = {"fetched": scenarios.TOKENS, "found": scenarios.TOKENS}
    assert without_a_server["races"] == {**whole, "same_bytes": True, "leases": 0}


def test_calls_that_fail_at_random_give_no_wrong_byte(without_a_server: Any) -> None:
    """SGLang's own injector: every call is delayed, and three in ten fail, writes as well as questions and reads."""
    found = without_a_server["failures"]
    assert (found["wrong"], found["leases"], found["unexplained"]) == (0, 0, 0)
    rows = 2 * scenarios.TOKENS // PAGE_TOKENS
    assert {0, rows} <= set(found["kept"]), "some writes went through, some did not"
    assert {0, scenarios.TOKENS} <= set(found["loads"]), "some reads went through, some did not"
    not_written, read_failed = {"evicted", "never_seen"}, {"not_taken"}  # evicted: seen before, and in no tier
    assert read_failed < set(found["reasons"]) <= not_written | read_failed


def test_a_path_that_is_no_folder_is_one_clear_error(without_a_server: Any) -> None:
    assert "is not a directory; set it to a directory this process may write" in without_a_server["a file"]


def test_dead_shared_tiers_cost_themselves_and_not_the_start(without_a_server: Any) -> None:
    """A pool whose master is silent and a share that hangs: below 5 s, counted, and the nvme tier serves."""
    found = without_a_server["degraded"]
    assert found.pop("longer_s") < 5
    assert found == {
        "levels": ["nvme"],
        "missing": [["pool", "not_opened"], ["shared_fs", "not_opened"]],
        "found": scenarios.TOKENS,
        "same_bytes": True,
    }


@pytest.mark.parametrize(("model", "layout"), SERVERS)
def test_every_level_gives_the_same_answer(
    start: StartServer, request: pytest.FixtureRequest, tmp_path: Path, model: str, layout: str
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
    with start(folder, layout=layout, storage=storage) as server:
        seen["restart"] = server.cached_tokens(prompt)
        server.wait_counted(WHOLE, "nvme")
        assert_conserved(server.metrics())
        server.flush()
        server.generate(prompt, max_tokens=0)  # what a tool runner sends while the tool still runs (docs/sglang.md)
        assert server.cached_tokens([*prompt, *prompt_tokens(1, 100)])["device"] == WHOLE
    where = {name: [found[level] for level in ("device", "host", "storage")] for name, found in seen.items()}
    expected = {"cold": [0, 0, 0], "device": [WHOLE, 0, 0], "host": [0, WHOLE, 0], "storage": [0, 0, WHOLE]}
    assert where == expected | {"restart": [0, 0, WHOLE]}
    assert len({tuple(found["output"]) for found in seen.values()}) == 1, "the answer never depends on the level"


@in_the_full_run
def test_a_long_prompt_asks_in_parts(start: StartServer, tiny_llama: Path, tmp_path: Path) -> None:
    """More pages than one storage call takes (128), told what comes before and not told."""
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
