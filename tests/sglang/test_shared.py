"""Two SGLang servers over one medium: the second answers from what the first computed, and the other way round."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import prompt_tokens
from tests.pool_rig import needs_mooncake, running_pool
from tests.sglang.conftest import MLA_OPTIONS, kvtier_storage
from tests.sglang.server import PAGE_TOKENS, SGLangServer, sglang_python
from tests.sglang.test_levels import EVERYTHING, PROMPT_TOKENS, WHOLE, tokens_from


def shared_storage(**tier: Any) -> dict[str, Any]:
    """The storage level's configuration with a shared tier only."""
    found = kvtier_storage(Path(), discover_deadline_s=5.0, **tier)
    return {key: value for key, value in found.items() if not key.startswith("nvme")}


def exchange(model: Path, folder: Path, storage: dict[str, Any], tier: str, rows: int) -> None:
    """Each of two servers computes a prompt that the other then finds in storage."""
    folders = [folder / "first", folder / "second"]
    for own in folders:
        own.mkdir()
    options = MLA_OPTIONS if "mla" in model.name else ()
    with (
        SGLangServer(model, folders[0], storage=storage, options=options) as first,
        SGLangServer(model, folders[1], storage=storage, options=options) as second,
    ):
        servers = [first, second]
        prompts = [prompt_tokens(number, PROMPT_TOKENS) for number in range(2)]
        computed = [server.cached_tokens(prompt) for server, prompt in zip(servers, prompts, strict=True)]
        for server in servers:
            server.wait_stored(rows * WHOLE / PAGE_TOKENS)
        found = [server.cached_tokens(prompt) for server, prompt in zip(servers, prompts[::-1], strict=True)]
        for number, server in enumerate(servers):
            assert [computed[number][level] for level in ("device", "host", "storage")] == [0, 0, 0]
            assert [found[number][level] for level in ("device", "host", "storage")] == [0, 0, WHOLE]
            assert found[number]["output"] == computed[1 - number]["output"], "as if it had computed it itself"
            server.wait_counted(WHOLE, tier)
            metrics = server.metrics()
            misses = sum(value for key, value in metrics.items() if key.startswith("kvtier_miss_tokens_total"))
            assert tokens_from(metrics, "recompute") == misses
            # A busy machine may be slow to sync a file, and then says so; nothing else may go wrong.
            faults = [key for key in metrics if key.startswith("kvtier_faults_total") and "reason=slow" not in key]
            assert not faults
            assert tokens_from(metrics, tier) == WHOLE
            assert metrics[f"kvtier_discovered_rows_total{{tier={tier}}}"] >= rows * WHOLE / PAGE_TOKENS


@pytest.mark.parametrize(("model", "rows"), [("tiny_llama", 2), ("tiny_mla", 1)] if EVERYTHING else [("tiny_llama", 2)])
def test_two_servers_share_a_file_system(request: pytest.FixtureRequest, tmp_path: Path, model: str, rows: int) -> None:
    storage = shared_storage(shared_fs_path=str(tmp_path / "shared"), shared_fs_bytes="128MiB")
    exchange(request.getfixturevalue(model), tmp_path, storage, "shared_fs", rows)


@needs_mooncake
def test_two_servers_share_a_pool(tiny_llama: Path, tmp_path: Path) -> None:
    if subprocess.run([str(sglang_python()), "-c", "import mooncake.store"], capture_output=True).returncode:
        pytest.skip("Mooncake's client is not installed in SGLang's environment")
    with running_pool() as pool:
        storage = shared_storage(pool_master=pool.address, pool_host="127.0.0.1")
        exchange(tiny_llama, tmp_path, storage, "pool", 2)
