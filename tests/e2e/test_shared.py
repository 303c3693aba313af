"""Two real vLLM engines share blocks through one medium: outputs and bytes are the same as if each had computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e import scenarios_shared as scenarios
from tests.e2e.conftest import RunScenario
from tests.e2e.test_cache import POOL, same_bytes, tokens_from
from tests.pool_rig import needs_mooncake, running_pool

TOKENS = 300
WHOLE = TOKENS // 32 * 32


def exchange(run: RunScenario, model: str, folder: Path, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """What two engines with memory of their own and this medium in common saw."""
    kvtier = {"dram_bytes": "24MiB", "gate": False, "discover_deadline_s": 10.0, **shared}
    meeting = folder / "meeting"
    meeting.mkdir()

    def engine(number: int) -> dict[str, Any]:
        return run(
            scenarios.one_of_two,
            model=model,
            tokens=TOKENS,
            kvtier=kvtier,
            engine=POOL,
            folder=str(meeting),
            number=number,
        )

    with ThreadPoolExecutor(2) as both:
        return list(both.map(engine, (0, 1)))


def check(results: list[dict[str, Any]], tier: str) -> None:
    for mine, other in (results, results[::-1]):
        assert mine["computed_cached"] == 0
        counted = f"loaded by {mine['metrics']}, stored by {other['metrics']}"
        assert mine["found_cached"] == WHOLE, f"the other's blocks were found and loaded: {counted}"
        assert mine["found"] == other["computed"], "and the answer is the other's"
        assert same_bytes(other["computed_bytes"], mine["found_bytes"]) >= WHOLE // 32
        assert tokens_from(mine["metrics"], tier) == WHOLE
        assert mine["metrics"][f"kvtier_discovered_rows_total{{tier={tier}}}"] >= WHOLE // 32
        assert mine["leases"] == 0


def test_two_engines_share_a_file_system(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    shared = {"shared_fs_path": str(tmp_path / "shared"), "shared_fs_bytes": "64MiB"}
    check(exchange(run, tiny_llama, tmp_path, shared), "shared_fs")


@needs_mooncake
def test_two_engines_share_a_pool(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    with running_pool() as pool:
        shared = {"pool_master": pool.address, "pool_host": "127.0.0.1"}
        check(exchange(run, tiny_llama, tmp_path, shared), "pool")
