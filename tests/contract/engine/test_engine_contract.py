"""The contract of every engine with kvtier: the same sentences for each, whatever its connector looks like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.contract.engine.harness import Answer, EngineUnderTest, available
from tests.e2e.models import prompt_tokens
from tests.nvme_damage import flip_a_bit

PROMPT_TOKENS = 325  # whole blocks, a few tokens and the answer: the answer fills no block of its own
_SETTLE_S = 60.0

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """One server for all tests of this file: every test asks about prompts of its own."""
    harness = available().get(request.param)
    if harness is None:
        pytest.skip(f"no harness for {request.param} can run in this environment")
    found = harness(tmp_path_factory.mktemp(request.param))
    try:
        yield found
    finally:
        found.stop()


def whole_blocks(engine: EngineUnderTest) -> int:
    """Tokens of a prompt's full blocks."""
    return PROMPT_TOKENS // engine.block_tokens * engine.block_tokens


def stored(engine: EngineUnderTest, seed: int) -> tuple[list[int], Answer]:
    """A prompt that was answered once and is in the durable tier now."""
    prompt = prompt_tokens(seed, PROMPT_TOKENS)
    cold = engine.answer(prompt)
    engine.wait_stored(prompt)
    return prompt, cold


def settled(engine: EngineUnderTest, good: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The counters, once they are as they should be; after a minute as they are."""
    deadline_s = time.monotonic() + _SETTLE_S
    while not good(counters := engine.counters()) and time.monotonic() < deadline_s:
        time.sleep(0.3)
    return counters


def of(counters: dict[str, float], name: str) -> float:
    """A counter summed over its labels."""
    return sum(value for key, value in counters.items() if key.startswith(f"{name}{{"))


def test_what_was_computed_once_is_loaded_and_changes_no_token(engine: EngineUnderTest) -> None:
    prompt, cold = stored(engine, 200)
    warm = engine.answer(prompt)
    assert (cold.from_kvtier, warm.from_kvtier) == (0, whole_blocks(engine))
    assert warm.output == cold.output


def test_a_shared_prefix_is_loaded_and_the_rest_computed(engine: EngineUnderTest) -> None:
    prompt, _ = stored(engine, 201)
    half = whole_blocks(engine) // 2 // engine.block_tokens * engine.block_tokens
    branch = [*prompt[:half], *prompt_tokens(202, PROMPT_TOKENS - half)]
    assert engine.answer(branch).from_kvtier == half


@pytest.mark.parametrize("kind", ["tenant", "adapter"])
def test_tenants_and_adapters_are_kept_apart(engine: EngineUnderTest, kind: str) -> None:
    """LMCache#4825, vllm#44250: same tokens, other salt or adapter, no hit."""
    prompt, _ = stored(engine, {"tenant": 203, "adapter": 204}[kind])
    assert engine.answer(prompt, **{kind: "b"}).from_kvtier == 0
    engine.wait_stored(prompt)
    assert engine.answer(prompt, **{kind: "b"}).from_kvtier == whole_blocks(engine)
    assert engine.answer(prompt, **{kind: "c"}).from_kvtier == 0


def test_tokens_are_conserved_and_every_miss_has_a_reason(engine: EngineUnderTest) -> None:
    counters = settled(engine, lambda found: found.get("kvtier_leases{}") == 0)
    recomputed = counters.get("kvtier_tokens_total{source=recompute}", 0.0)
    assert recomputed == of(counters, "kvtier_miss_tokens_total") > 0


def test_no_lease_outlives_its_request(engine: EngineUnderTest) -> None:
    """LMCache#1034."""
    stored(engine, 205)
    assert settled(engine, lambda found: found.get("kvtier_leases{}") == 0)["kvtier_leases{}"] == 0


def test_the_cap_is_a_cap(engine: EngineUnderTest) -> None:
    """LMCache#4725: the folder never holds more than was allowed."""
    counters = engine.counters()
    held = sum(path.stat().st_blocks * 512 for path in engine.nvme_path.rglob("*") if path.is_file())
    assert 0 < held <= counters["kvtier_capacity_bytes{tier=nvme}"]


def test_a_restart_keeps_what_was_stored(engine: EngineUnderTest) -> None:
    """LMCache#2273."""
    prompt, cold = stored(engine, 206)
    engine.restart()
    warm = engine.answer(prompt)
    assert (warm.from_kvtier, warm.output) == (whole_blocks(engine), cold.output)
    assert of(engine.counters(), "kvtier_recovered_rows_total") > 0


def test_damage_on_the_medium_is_a_miss_not_an_answer(engine: EngineUnderTest) -> None:
    """LMCache#4385, sglang#27504: one flipped bit; the block is computed again."""
    prompt, cold = stored(engine, 207)
    flip_a_bit(engine.nvme_path, "last")
    damaged = engine.answer(prompt)
    assert damaged.output == cold.output
    assert damaged.from_kvtier < whole_blocks(engine)
    name = "kvtier_faults_total{reason=corrupt,tier=nvme}"
    assert settled(engine, lambda found: name in found)[name] >= 1


def test_cleared_means_gone(engine: EngineUnderTest) -> None:
    """sglang PR#40409."""
    prompt, _ = stored(engine, 208)
    engine.clear()
    assert engine.answer(prompt).from_kvtier == 0
