"""kvtier below `vllm serve`: found by its entry point in every process, answering over HTTP, seen on /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.models import prompt_tokens
from tests.e2e.server import vllm_server

PROMPT_TOKENS = 325
CACHED_TOKENS = PROMPT_TOKENS // 32 * 32


@pytest.mark.timeout(900)
def test_a_request_is_served_from_kvtier_after_a_reset_of_the_device_cache(tiny_llama: str, tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    options = {"dram_bytes": "32MiB", "nvme_path": str(nvme), "nvme_bytes": "64MiB", "gate": False}
    prompt = prompt_tokens(1, PROMPT_TOKENS)
    with vllm_server(tiny_llama, options, tmp_path) as server:
        first = server.complete(prompt)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        server.reset_device_cache()
        second = server.complete(prompt)
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS

        server.complete(prompt_tokens(2, 40))  # its steps carry out what the engine counted for the request before
        metrics = server.metrics("kvtier_")
        loaded = [value for name, value in metrics.items() if name.startswith("kvtier_tokens_total") and "dram" in name]
        assert loaded == [CACHED_TOKENS]
        assert all("model_name=" in name for name in metrics)
    left = [path.name for path in Path("/dev/shm").iterdir() if server.engine_id in path.name]
    assert not left, "no shared memory outlives the server"
