"""What goes wrong below a running server: a flipped bit, beside SGLang's file backend; calls that fail or dawdle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.models import prompt_tokens
from tests.sglang.backends import BACKENDS, Backend
from tests.sglang.conftest import StartServer, kvtier_storage
from tests.sglang.server import PAGE_TOKENS

PROMPT_TOKENS = 1_203  # whole pages, a few tokens and the answer: the answer fills no page of its own
WHOLE = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
KV_BYTES_PER_TOKEN = 2 * 4 * 2 * 32 * 4  # K and V, layers, heads, dimensions, float32


@pytest.mark.timeout(1_200)
def test_a_flipped_bit_is_served_by_the_file_backend_and_not_by_kvtier(
    start: StartServer, tiny_llama: Path, tmp_path: Path
) -> None:
    """sglang#27504. The same server, the same damage; `benchmarks/sglang.py` measures the two side by side."""
    with start(tiny_llama) as server:
        for seed, name in enumerate(BACKENDS, start=40):
            prompt = prompt_tokens(seed, PROMPT_TOKENS)
            server.flush()
            with Backend(server, name, tmp_path / name) as backend:
                truth = server.cached_tokens(prompt)
                written = backend.wait_written(WHOLE // PAGE_TOKENS)
                assert written == WHOLE * KV_BYTES_PER_TOKEN, "every page once"
                server.flush()
                hit = server.cached_tokens(prompt)
                assert (hit["storage"], hit["output"]) == (WHOLE, truth["output"])
                backend.flip_a_bit(page=20)
                server.flush()
                damaged = server.cached_tokens(prompt)
                if name == "file":
                    assert damaged["storage"] == WHOLE
                    assert damaged["output"] != truth["output"], "the file backend serves the damaged page"
                else:
                    assert damaged["storage"] < WHOLE
                    assert damaged["output"] == truth["output"], "kvtier has the damaged page computed again"
                    server.wait_for(
                        server.metrics, lambda found: found.get("kvtier_faults_total{reason=corrupt,tier=nvme}") == 1
                    )


@pytest.mark.timeout(1_200)
def test_sglang_s_own_failure_injector(start: StartServer, tiny_llama: Path, tmp_path: Path) -> None:
    """Every storage call is delayed at random and fails three times in ten: no wrong token, no hang."""
    environment = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    }
    prompts = [prompt_tokens(60 + number, 400) for number in range(4)]
    with start(tiny_llama, storage=kvtier_storage(tmp_path / "nvme"), environment=environment) as server:
        truth = [server.cached_tokens(prompt)["output"] for prompt in prompts]
        from_storage = 0
        for _ in range(6):
            server.flush()
            for prompt, expected in zip(prompts, truth, strict=True):
                answer = server.cached_tokens(prompt)
                assert answer["output"] == expected
                from_storage += answer["storage"]
        assert 0 < from_storage < 24 * (400 // PAGE_TOKENS * PAGE_TOKENS), "some calls went through, some did not"
        server.wait_for(server.metrics, lambda found: found.get("kvtier_leases{}") == 0, timeout_s=60)
        metrics = server.metrics()
        misses = sum(value for key, value in metrics.items() if key.startswith("kvtier_miss_tokens_total"))
        assert metrics["kvtier_tokens_total{source=recompute}"] == misses
        # Not written is "seen before, and in no tier"; a read that failed is one that kvtier was not asked for.
        assert misses == sum(_missed(metrics, reason) for reason in ("evicted", "never_seen", "not_taken"))


def _missed(metrics: dict[str, float], reason: str) -> float:
    return metrics.get(f"kvtier_miss_tokens_total{{reason={reason}}}", 0.0)
