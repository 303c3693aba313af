"""Two SGLang servers over one medium: the second answers from what the first computed, and the other way round."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.models import prompt_tokens
from tests.pool_rig import needs_mooncake, running_pool
from tests.sglang.backends import attached
from tests.sglang.conftest import EVERYTHING, MLA_OPTIONS, kvtier_storage
from tests.sglang.server import PAGE_TOKENS, SGLangServer, sglang_python
from tests.sglang.test_levels import PROMPT_TOKENS, WHOLE, tokens_from

ROWS_OF_A_PAGE = {"tiny_llama": 2, "tiny_mla": 1}


@pytest.fixture(scope="module", params=list(ROWS_OF_A_PAGE) if EVERYTHING else ["tiny_llama"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SGLangServer]]:
    """Two servers of one model, without a storage level so far."""
    model: Path = getattr(models, request.param)()
    options = MLA_OPTIONS if request.param == "tiny_mla" else ()
    with ExitStack() as stack:
        yield [
            stack.enter_context(SGLangServer(model, tmp_path_factory.mktemp(name), options=options))
            for name in ("first", "second")
        ]


@pytest.fixture
def rows_of_a_page(request: pytest.FixtureRequest) -> int:
    return ROWS_OF_A_PAGE[request.node.callspec.params["servers"]]


def shared_storage(**tier: Any) -> dict[str, Any]:
    """The storage level's configuration with a shared tier only."""
    found = kvtier_storage(Path(), discover_deadline_s=5.0, **tier)
    return {key: value for key, value in found.items() if not key.startswith("nvme")}


def exchange(servers: Sequence[SGLangServer], storage: dict[str, Any], tier: str, rows: int, seed: int) -> None:
    """Each of two servers computes a prompt that the other then finds in storage."""
    with ExitStack() as stack:
        for server in servers:
            server.flush()
            stack.enter_context(attached(server, storage))
        prompts = [prompt_tokens(seed + number, PROMPT_TOKENS) for number in range(2)]
        computed = [server.cached_tokens(prompt) for server, prompt in zip(servers, prompts, strict=True)]
        for server in servers:
            server.wait_stored(rows * WHOLE / PAGE_TOKENS, f"kvtier_blocks_stored_total{{tier={tier}")
        found = [server.cached_tokens(prompt) for server, prompt in zip(servers, prompts[::-1], strict=True)]
        for number, server in enumerate(servers):
            assert [computed[number][level] for level in ("device", "host", "storage")] == [0, 0, 0]
            assert [found[number][level] for level in ("device", "host", "storage")] == [0, 0, WHOLE]
            assert found[number]["output"] == computed[1 - number]["output"], "as if it had computed it itself"
            server.wait_counted(WHOLE, tier)
            metrics = server.metrics()
            assert tokens_from(metrics, tier) == WHOLE
            misses = sum(value for key, value in metrics.items() if key.startswith("kvtier_miss_tokens_total"))
            assert tokens_from(metrics, "recompute") == misses
            # A busy machine may be slow to sync a file, and then says so; nothing else may go wrong.
            assert not [key for key in metrics if key.startswith("kvtier_faults_total") and "reason=slow" not in key]
            assert metrics[f"kvtier_discovered_rows_total{{tier={tier}}}"] >= rows * WHOLE / PAGE_TOKENS


def test_two_servers_share_a_file_system(servers: list[SGLangServer], rows_of_a_page: int, tmp_path: Path) -> None:
    storage = shared_storage(shared_fs_path=str(tmp_path / "shared"), shared_fs_bytes="128MiB")
    exchange(servers, storage, "shared_fs", rows_of_a_page, seed=0)


@needs_mooncake
def test_two_servers_share_a_pool(servers: list[SGLangServer], rows_of_a_page: int) -> None:
    if subprocess.run([str(sglang_python()), "-c", "import mooncake.store"], capture_output=True).returncode:
        pytest.skip("Mooncake's client is not installed in SGLang's environment: make env-sglang")
    with running_pool() as pool:
        storage = shared_storage(pool_master=pool.address, pool_host="127.0.0.1")
        exchange(servers, storage, "pool", rows_of_a_page, seed=2)
