"""What happens around a running server: new weights, attach and detach, the radix policy, KV events, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.models import prompt_tokens
from tests.sglang.conftest import StartServer, in_the_full_run, kvtier_storage
from tests.sglang.server import PAGE_TOKENS, ServerError, SGLangServer

PROMPT_TOKENS = 404  # whole pages, a few tokens and the answer: the answer fills no page of its own
WHOLE = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS


def from_storage(server: SGLangServer, prompt: list[int], **fields: str) -> int:
    """Ask after a flush; how many tokens came from the storage level."""
    server.flush()
    details = server.generate(prompt, **fields)["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("storage") or 0)


@in_the_full_run
@pytest.mark.timeout(1_200)
def test_new_weights_find_nothing_of_the_old_ones(start: StartServer, tiny_llama: Path, tmp_path: Path) -> None:
    """sglang#26792: also after the level was detached and attached again."""
    prompt, rows = prompt_tokens(70, PROMPT_TOKENS), 2 * WHOLE // PAGE_TOKENS
    with start(tiny_llama, storage=kvtier_storage(tmp_path / "nvme")) as server:
        assert from_storage(server, prompt) == 0
        server.wait_stored(rows)
        assert from_storage(server, prompt) == WHOLE
        weights = {"model_path": str(tiny_llama), "weight_version": "step-2"}
        server.when_idle(lambda: server.request("POST", "/update_weights_from_disk", weights))
        assert from_storage(server, prompt) == 0, "pages of the former weights are out of reach"
        server.wait_stored(2 * rows)
        assert from_storage(server, prompt) == WHOLE
        server.when_idle(lambda: server.request("DELETE", "/hicache/storage-backend"))
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(
                {"prefetch_threshold": 16, **kvtier_storage(tmp_path / "nvme")}
            ),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        server.when_idle(lambda: server.request("PUT", "/hicache/storage-backend", body))
        assert from_storage(server, prompt) == WHOLE, "the level attached again knows which weights are served"


@pytest.mark.timeout(1_200)
def test_the_radix_policy_and_the_event_listener(start: StartServer, tiny_llama: Path, tmp_path: Path) -> None:
    options = (
        "--radix-eviction-policy",
        "kvtier",
        "--kv-events-config",
        '{"publisher":"kvtier","endpoint":"inproc://kv"}',
    )
    core = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    prompts = [prompt_tokens(80 + number, 700) for number in range(12)]
    storage = kvtier_storage(tmp_path / "nvme", policy="kvtier")
    with start(tiny_llama, storage=storage, options=options, environment=core) as server:
        truth = [server.cached_tokens(prompt)["output"] for prompt in prompts]
        again = [server.cached_tokens(prompt) for prompt in reversed(prompts)]
        assert [answer["output"] for answer in reversed(again)] == truth
        assert sum(answer["device"] + answer["host"] for answer in again) > 0
        assert "evicting from a radix tree of 256 pages" in server.log()
        held = server.wait_for(server.metrics, lambda found: found.get("kvtier_resident_bytes{tier=hbm}", 0.0) > 0)
        page_bytes = 2 * 4 * 2 * 32 * 4 * PAGE_TOKENS  # K and V, layers, heads, dimensions, float32
        assert 0 < held["kvtier_resident_bytes{tier=hbm}"] <= 4_096 // PAGE_TOKENS * page_bytes
        assert held["kvtier_resident_bytes{tier=dram}"] > 0


@in_the_full_run
@pytest.mark.timeout(900)
def test_the_rust_tree_core_is_refused_in_words(start: StartServer, tiny_llama: Path) -> None:
    with pytest.raises(ServerError, match="SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python"):
        start(tiny_llama, options=("--radix-eviction-policy", "kvtier"))


@pytest.mark.timeout(900)
def test_a_wrong_key_is_a_start_up_error_that_names_the_right_one(
    start: StartServer, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match="did you mean nvme_bytes"):
        start(tiny_llama, storage=kvtier_storage(tmp_path / "nvme", nvme_byte="1GiB"))
