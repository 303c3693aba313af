"""The contract of every engine with kvtier: the same sentences for each, whatever its connector looks like.

Two starts of a server an engine: the second one is the restart, and has a tier that cannot be opened.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.tiers.open import OPEN_TIMEOUT_S
from tests.contract.engine.harness import NVME_BYTES, Answer, EngineUnderTest, available
from tests.e2e.models import prompt_tokens
from tests.nvme_damage import flip_a_bit

PROMPT_TOKENS = 325  # whole blocks, a few tokens and the answer: the answer fills no block of its own
BYTES_PER_TOKEN = 2 * 4 * 2 * 32 * 4  # K and V, layers, heads, dimensions, float32
_SETTLE_S = 60.0
_NOT_KEPT = ("load_failed", "vanished", "corrupt")  # misses of what had been found

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


@pytest.fixture(scope="module")
def restarted(engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Answer]:
    """The server started again, beside a shared folder whose lock somebody took and never gives back. What was asked
    and answered before that."""
    before, folder = stored(engine, 206), tmp_path_factory.mktemp("dead")
    (folder / "kvtier").mkdir()
    with (folder / "kvtier" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        engine.restart(shared_fs_path=folder)
    return before


def whole_blocks(engine: EngineUnderTest) -> int:
    """Tokens of a prompt's full blocks."""
    return PROMPT_TOKENS // engine.block_tokens * engine.block_tokens


def stored(engine: EngineUnderTest, seed: int) -> tuple[list[int], Answer]:
    """A prompt that was answered once and is in the durable tier now."""
    prompt = prompt_tokens(seed, PROMPT_TOKENS)
    cold = engine.answer(prompt)
    engine.wait_stored(prompt)
    return prompt, cold


def all_at_once(engine: EngineUnderTest, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Answers to prompts that were asked side by side."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: engine.ask(prompt, max_tokens), prompts))


def settled(engine: EngineUnderTest, good: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The counters, once they are as they should be; after a minute as they are."""
    deadline_s = time.monotonic() + _SETTLE_S
    while not good(counters := engine.counters()) and time.monotonic() < deadline_s:
        time.sleep(0.3)
    return counters


def nothing_leased(counters: dict[str, float]) -> bool:
    return counters.get("kvtier_leases{}") == 0


def of(counters: dict[str, float], name: str) -> float:
    """A counter summed over its labels."""
    return sum(value for key, value in counters.items() if key.startswith(f"{name}{{"))


def from_nvme(counters: dict[str, float]) -> float:
    return counters.get("kvtier_tokens_total{source=nvme}", 0.0)


def test_what_was_computed_once_is_loaded_and_changes_no_token(engine: EngineUnderTest) -> None:
    prompt, cold = stored(engine, 200)
    before = from_nvme(engine.counters())
    warm = engine.answer(prompt)
    assert (cold.from_kvtier, warm.from_kvtier) == (0, whole_blocks(engine))
    assert warm.output == cold.output
    loaded = before + whole_blocks(engine)
    assert from_nvme(settled(engine, lambda found: from_nvme(found) == loaded)) == loaded


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


def test_no_lease_outlives_its_request(engine: EngineUnderTest) -> None:
    """LMCache#1034."""
    stored(engine, 205)
    assert nothing_leased(settled(engine, nothing_leased))


def test_clients_that_hang_up_leave_nothing_behind(engine: EngineUnderTest) -> None:
    """Aborted while a prompt is loaded, while one is computed, and while the answer is generated."""
    prompt, cold = stored(engine, 209)
    for number in range(12):
        engine.flush()
        unknown = prompt_tokens(300 + number, 2 * PROMPT_TOKENS)
        engine.abandon(unknown if number % 3 == 2 else prompt, 200, after_s=number * 0.01)
    warm = engine.answer(prompt)
    assert (warm.from_kvtier, warm.output) == (whole_blocks(engine), cold.output)
    assert nothing_leased(settled(engine, nothing_leased))


def test_requests_that_lose_their_memory_get_the_same_answers(engine: EngineUnderTest) -> None:
    """More than the device has room for, some loaded and some computed: the engine preempts, and takes up again."""
    # Three fit while they are prompts, and no longer when each has its answer.
    prompts = [prompt_tokens(400 + number, 4 * PROMPT_TOKENS) for number in range(6)]
    alone = [engine.ask(prompt, 100) for prompt in prompts]
    engine.flush()
    preemptions = engine.preemptions()
    assert all_at_once(engine, prompts, 100) == alone
    assert engine.preemptions() > preemptions, "the device is too small on purpose"
    assert nothing_leased(settled(engine, nothing_leased))


def test_damage_on_the_medium_is_a_miss_not_an_answer(engine: EngineUnderTest) -> None:
    """LMCache#4385, sglang#27504: one flipped bit; the block is computed again."""
    prompt, cold = stored(engine, 207)
    flip_a_bit(engine.nvme_path, "last")
    damaged = engine.answer(prompt)
    assert damaged.output == cold.output
    assert damaged.from_kvtier < whole_blocks(engine)
    name = "kvtier_faults_total{reason=corrupt,tier=nvme}"
    assert settled(engine, lambda found: name in found)[name] >= 1


def test_cleared_means_gone_and_stored_again_means_there(engine: EngineUnderTest) -> None:
    """sglang PR#40409."""
    prompt, cold = stored(engine, 208)
    engine.clear()
    assert engine.answer(prompt).from_kvtier == 0
    engine.wait_stored(prompt)
    warm = engine.answer(prompt)
    assert (warm.from_kvtier, warm.output) == (whole_blocks(engine), cold.output)


def test_cleared_under_a_running_request_changes_no_token(engine: EngineUnderTest) -> None:
    prompt = prompt_tokens(210, PROMPT_TOKENS)
    alone = engine.ask(prompt, 60)
    engine.flush()
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(engine.ask, prompt, 60)
        time.sleep(0.05)
        engine.clear()
        assert answer.result() == alone
    assert nothing_leased(settled(engine, nothing_leased))


def test_a_restart_keeps_what_was_stored(engine: EngineUnderTest, restarted: tuple[list[int], Answer]) -> None:
    """LMCache#2273."""
    prompt, cold = restarted
    warm = engine.answer(prompt)
    assert (warm.from_kvtier, warm.output) == (whole_blocks(engine), cold.output)
    assert of(engine.counters(), "kvtier_recovered_rows_total") > 0


@pytest.mark.usefixtures("restarted")
def test_a_tier_that_cannot_be_opened_costs_itself_and_not_the_engine(engine: EngineUnderTest) -> None:
    """It is counted, and the others serve. Clocks around a start say more about the machine than about kvtier, so what
    a start waits for is held here: all tiers open side by side within this time (`tests/unit/test_open.py`)."""
    assert OPEN_TIMEOUT_S < 5
    prompt, cold = stored(engine, 211)
    warm = engine.answer(prompt)
    assert (warm.from_kvtier, warm.output) == (whole_blocks(engine), cold.output)
    assert engine.counters()["kvtier_faults_total{reason=not_opened,tier=shared_fs}"] == 1


def test_what_was_promised_is_there_while_the_tier_overflows(engine: EngineUnderTest) -> None:
    """Promise = lease: prompts are asked again side by side while others push everything out that is not promised."""
    prompts = [prompt_tokens(500 + number, 4 * PROMPT_TOKENS) for number in range(24)]
    assert sum(map(len, prompts)) * BYTES_PER_TOKEN > NVME_BYTES
    alone = [engine.ask(prompt, 8) for prompt in prompts]
    before = engine.counters()
    for _ in range(2):
        for first in range(0, len(prompts), 4):
            engine.flush()
            assert all_at_once(engine, prompts[first : first + 4], 8) == alone[first : first + 4]
    after = settled(engine, nothing_leased)
    assert nothing_leased(after)
    broken = [f"kvtier_miss_tokens_total{{reason={reason}}}" for reason in _NOT_KEPT]
    assert {name: after.get(name, 0.0) - before.get(name, 0.0) for name in broken} == dict.fromkeys(broken, 0.0)
    assert from_nvme(after) > from_nvme(before), "some of it was found"
    assert of(after, "kvtier_evictions_total") > 0, "and the tier is full"


def test_the_cap_is_a_cap(engine: EngineUnderTest) -> None:
    """LMCache#4725: the folder never holds more than was allowed."""
    held = sum(path.stat().st_blocks * 512 for path in engine.nvme_path.rglob("*") if path.is_file())
    counters = engine.counters()
    assert 0 < held <= NVME_BYTES
    assert (
        0 < counters["kvtier_resident_bytes{tier=nvme}"] <= counters["kvtier_capacity_bytes{tier=nvme}"] <= NVME_BYTES
    )


def test_tokens_are_conserved_and_every_miss_has_a_reason(engine: EngineUnderTest) -> None:
    counters = settled(engine, nothing_leased)
    recomputed = counters.get("kvtier_tokens_total{source=recompute}", 0.0)
    assert recomputed == of(counters, "kvtier_miss_tokens_total") > 0
