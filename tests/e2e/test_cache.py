"""kvtier in a real vLLM on the CPU: hits from every tier are byte-exact; load, aborts and faults change no answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.demo.prepare_model import smollm2
from tests.e2e import scenarios_cache as scenarios
from tests.e2e.conftest import RunScenario
from tests.e2e.engine import MLA_BLOCK_TOKENS
from tests.e2e.models import ALL_MODELS

POOL = {"num_gpu_blocks_override": 300, "max_model_len": 1_024}
PROMPT_TOKENS = 300


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """A memory tier for a few prompts and an NVMe tier in this test's folder. Without the gate: recomputing a prompt of
    these models takes milliseconds, and what is found must be loaded here."""
    tiers = {"dram_bytes": "24MiB", "nvme_path": str(tmp_path / "nvme"), "nvme_bytes": "64MiB"}
    return {**tiers, "gate": False, **more}


def tokens_from(metrics: dict[str, float], source: str) -> float:
    return metrics.get(f"kvtier_tokens_total{{source={source}}}", 0.0)


def same_bytes(one: dict[str, str], other: dict[str, str]) -> int:
    """Compare the blocks both have; returns how many, and fails on the first difference."""
    common = one.keys() & other.keys()
    for block in common:
        assert one[block] == other[block], f"block {block[:12]} differs"
    return len(common)


MODELS = {**ALL_MODELS, "smollm2": smollm2}


@pytest.mark.parametrize("name", MODELS)
def test_every_tier_gives_back_the_same_bytes(run: RunScenario, tmp_path: Path, name: str) -> None:
    """The device's blocks are overwritten before every load, so what is compared was really loaded."""
    kvtier = options(tmp_path)
    if name == "smollm2":
        kvtier |= {"dram_bytes": "64MiB"}
    arguments = {"model": str(MODELS[name]()), "tokens": PROMPT_TOKENS, "kvtier": kvtier, "engine": POOL}
    result = run(scenarios.round_trip, **arguments)
    stages = result["stages"]
    block = 16 if name == "tiny-mla" else 32
    full = PROMPT_TOKENS // block * block
    assert len({tuple(stage["answer"]) for stage in stages.values()}) == 1, "the answer is the same from every tier"
    assert stages["cold"]["cached"] == 0
    assert stages["memory"]["cached"] == stages["below"]["cached"] == full
    cold = stages["cold"]["bytes"]
    if name != "tiny-mla":  # vLLM hashes no device blocks for MLA on the CPU
        windows_only = name == "tiny-mistral"
        for stage in ("memory", "below"):
            assert same_bytes(cold, stages[stage]["bytes"]) >= (2 if windows_only else full // block)
    # Generated blocks are left out: computed again after a hit, they may differ in the last bit.
    rows = {row: digest for row, digest in stages["cold"]["rows"].items() if int(row.split("/")[0]) < full // block}
    blocks = 2 if name == "tiny-mistral" else full // block
    assert len(rows) >= blocks
    assert stages["cold"]["rows_on_device"] >= blocks, "memory holds what the device computed"
    for stage in ("memory", "below"):
        assert stages[stage]["rows_on_device"] >= blocks, "the device holds what memory held"
        assert same_bytes(rows, stages[stage]["rows"]) >= blocks
        assert stages[stage]["leases"] == 0
    assert tokens_from(result["metrics"], "nvme") >= full

    again = run(scenarios.serve_once, **arguments)
    assert again["answer"] == stages["cold"]["answer"], "a new process answers the same"
    assert again["cached"] == full
    assert tokens_from(again["metrics"], "nvme") == full
    assert same_bytes(cold, again["bytes"]) or name == "tiny-mla"
    assert again["leases"] == 0


def test_metrics_sum_to_the_prompt_tokens(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    result = run(scenarios.round_trip, model=tiny_llama, tokens=PROMPT_TOKENS, kvtier=options(tmp_path), engine=POOL)
    metrics = result["metrics"]
    sources = {m[1]: v for k, v in metrics.items() if (m := re.match(r"kvtier_tokens_total\{source=(\w+)\}", k))}
    assert sum(sources.values()) == 4 * PROMPT_TOKENS
    misses = sum(v for k, v in metrics.items() if k.startswith("kvtier_miss_tokens_total"))
    assert misses == sources["recompute"]
    assert sources["hbm"] == sources["dram"] == sources["nvme"] == 288


@pytest.mark.parametrize(
    ("name", "extra"),
    [("tiny-llama", {}), ("tiny-llama", {"blocks_per_chunk": 2}), ("tiny-gemma", {}), ("tiny-mla", {})],
    ids=["llama", "llama-2-blocks-a-chunk", "gemma", "mla"],
)
def test_a_crowd_gets_the_same_answers_with_and_without(
    run: RunScenario, tmp_path: Path, name: str, extra: dict[str, Any]
) -> None:
    model = str(ALL_MODELS[name]())
    blocks = {"tiny-mla": 120, "tiny-gemma": 90}.get(name, 60)
    engine = {"num_gpu_blocks_override": blocks, "max_model_len": 256, "max_num_seqs": 32}
    off = run(scenarios.crowd, model=model, requests=32, kvtier=None, engine=engine)
    kvtier = options(tmp_path, dram_bytes="6MiB", **extra)
    on = run(scenarios.crowd, model=model, requests=32, kvtier=kvtier, engine=engine)
    assert on["rounds"] == off["rounds"]
    assert sum(on["preemptions"].values()) > 0, "the pool is too small on purpose"
    loaded = tokens_from(on["metrics"], "dram") + tokens_from(on["metrics"], "nvme")
    assert loaded > 0, "something was served from below the device"
    assert (on["leases"], on["pinned"], on["unowned"], on["jobs"], on["requests_left"]) == (0, 0, 0, 0, 0)


def test_aborts_at_every_stage_leave_nothing_behind(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    result = run(scenarios.abort_everywhere, model=tiny_llama, kvtier=options(tmp_path), engine=POOL)
    assert result["aborted"] == 48
    assert result["answer"] == result["expected"]
    assert (result["leases"], result["pinned"], result["unowned"], result["requests_left"]) == (0, 0, 0, 0)


def test_after_a_reset_nothing_is_found(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    result = run(scenarios.reset_everything, model=tiny_llama, kvtier=options(tmp_path), engine=POOL)
    assert result["same"]
    assert result["cached_after_reset"] == 0
    assert (result["leases"], result["pinned"], result["unowned"]) == (0, 0, 0)


def test_two_ranks_share_one_row_and_one_decision(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    """Ranks only move bytes: residency is decided once (LMCache#1379)."""
    plain = run(scenarios.two_ranks, model=tiny_llama, kvtier=None, engine=POOL)
    found = run(scenarios.two_ranks, model=tiny_llama, kvtier=options(tmp_path), engine=POOL)
    assert found["first"] == found["again"] == plain["first"]
    assert found["cached"] == [(200 + 17 * i) // 32 * 32 for i in range(4)]
    assert found["leases"] == 0
    again = run(scenarios.two_ranks, model=tiny_llama, kvtier=options(tmp_path), engine=POOL)
    assert again["first"] == plain["first"], "a new process is served both halves of every row"


def test_a_latent_is_kept_once_for_two_ranks(run: RunScenario, tmp_path: Path, tiny_mla: str) -> None:
    """MLA under tensor parallelism: every rank computes the same latent, and a row has it once (vLLM's replicated
    layout). Both ranks are served from it."""
    found = run(scenarios.two_ranks, model=tiny_mla, kvtier=options(tmp_path), engine=POOL)
    layers = json.loads((Path(tiny_mla) / "config.json").read_text())["num_hidden_layers"]
    assert found["row_bytes"] == layers * MLA_BLOCK_TOKENS * (512 + 64) * 4, "float32 latents of one rank"
    assert found["first"] == found["again"], "computed, and loaded by both ranks"
    assert min(found["cached"]) >= 192
    assert found["leases"] == 0


def test_a_flipped_byte_is_recomputed_and_counted(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    arguments = {"model": tiny_llama, "tokens": PROMPT_TOKENS, "kvtier": options(tmp_path), "engine": POOL}
    first = run(scenarios.serve_once, **arguments)
    slab = next((tmp_path / "nvme").glob("*.slab"))
    damaged = _flip_every_page(slab)
    assert damaged > 9
    second = run(scenarios.serve_once, **arguments)
    assert second["answer"] == first["answer"]
    assert second["cached"] == 0, "no block whose bytes changed is served"
    assert second["metrics"]["kvtier_miss_tokens_total{reason=corrupt}"] > 0
    assert any(k.startswith("kvtier_faults_total") and v > 0 for k, v in second["metrics"].items())


@pytest.mark.parametrize("below", [True, False], ids=["nvme", "memory-only"])
def test_a_bit_that_flips_in_memory_is_never_served(
    run: RunScenario, tmp_path: Path, tiny_llama: str, below: bool
) -> None:
    """The worker finds it while it copies; the tier below serves what memory lost, or it is computed."""
    kvtier = options(tmp_path) if below else {"dram_bytes": "24MiB", "gate": False}
    found = run(scenarios.memory_changes, model=tiny_llama, tokens=PROMPT_TOKENS, kvtier=kvtier, engine=POOL)
    assert len(set(map(tuple, found["answers"]))) == 1
    assert found["metrics"]["kvtier_faults_total{reason=corrupt,tier=dram}"] > 0
    assert found["cached"][1] == (288 if below else 64)
    assert found["cached"][2] == 288, "what was computed or brought up again is whole"
    assert found["metrics"].get("kvtier_miss_tokens_total{reason=corrupt}", 0) == (0 if below else 224)
    assert found["leases"] == 0


def test_a_bit_that_flips_in_one_rank_is_never_served(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    kvtier = {"dram_bytes": "24MiB", "gate": False}
    arguments = {"model": tiny_llama, "tokens": PROMPT_TOKENS, "engine": POOL, "part": 1, "ranks": 2}
    found = run(scenarios.memory_changes, kvtier=kvtier, **arguments)
    assert len(set(map(tuple, found["answers"]))) == 1
    assert found["cached"] == [0, 64, 288, 288]
    assert found["leases"] == 0


def test_a_bit_that_flips_under_sliding_windows_is_never_served(run: RunScenario, tmp_path: Path) -> None:
    kvtier = {"dram_bytes": "24MiB", "gate": False}
    arguments = {"model": str(ALL_MODELS["tiny-gemma"]()), "tokens": PROMPT_TOKENS, "engine": POOL}
    found = run(scenarios.memory_changes, kvtier=kvtier, **arguments)
    assert len(set(map(tuple, found["answers"]))) == 1
    assert found["metrics"]["kvtier_faults_total{reason=corrupt,tier=dram}"] > 0
    # vLLM does not offer a second time what a request has found once: the next one stores it.
    assert found["cached"] == [0, 0, 0, 288]
    assert found["leases"] == 0


def test_other_weights_find_nothing(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    arguments = {"model": tiny_llama, "tokens": PROMPT_TOKENS, "engine": POOL}
    run(scenarios.serve_once, kvtier=options(tmp_path, nvme_bytes="160MiB"), **arguments)
    other = options(tmp_path, nvme_bytes="160MiB", weights_fingerprint="other")
    assert run(scenarios.serve_once, kvtier=other, **arguments)["cached"] == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dram_byts": "1GiB"}, "did you mean dram_bytes"),
        ({"dram_bytes": "much"}, "dram_bytes is 'much'"),
        ({"dram_bytes": "1PiB"}, "/dev/shm has"),
        ({"dram_bytes": 100}, "less than one block"),
        ({"nvme_path": "/proc/kvtier"}, "/proc/kvtier"),
        ({"nvme_bytes": "900PiB"}, "nvme_bytes|cap|free"),
        ({"policy": "best"}, "no eviction policy named 'best'"),
        ({"gate": "maybe"}, "gate"),
    ],
    ids=["typo", "no-size", "shm", "tiny", "unwritable", "medium", "policy", "type"],
)
def test_bad_configuration_stops_the_start_with_one_clear_line(
    run: RunScenario, tmp_path: Path, tiny_llama: str, change: dict[str, Any], says: str
) -> None:
    message = run(scenarios.start_badly, model=tiny_llama, kvtier={**options(tmp_path), **change}, engine=POOL)
    assert message.startswith("ConfigError")
    assert re.search(says, message)


def test_chunks_with_holes_are_refused_at_the_start(run: RunScenario, tmp_path: Path) -> None:
    """A window may have dropped the first blocks of a chunk that vLLM stores."""
    kvtier = {**options(tmp_path), "blocks_per_chunk": 2}
    message = run(scenarios.start_badly, model=str(ALL_MODELS["tiny-gemma"]()), kvtier=kvtier, engine=POOL)
    assert message.startswith("ConfigError")
    assert "remove blocks_per_chunk" in message


def _flip_every_page(slab: Path) -> int:
    """Flip one bit in every 4 KiB page after the superblock that holds anything."""
    data = bytearray(slab.read_bytes())
    flipped = 0
    for page in range(1, len(data) // 4096):
        begin = page * 4096
        if any(data[begin : begin + 4096]):
            data[begin + 100] ^= 1
            flipped += 1
    slab.write_bytes(data)
    return flipped


def test_a_crowd_over_a_failing_tier_gets_the_same_answers(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    """The fault matrix in a real engine."""
    arguments = {"model": tiny_llama, "requests": 10, "engine": {"num_gpu_blocks_override": 40, "max_model_len": 512}}
    plain = run(scenarios.crowd, kvtier=None, below=2, **arguments)
    small = options(tmp_path, dram_bytes="1MiB", load_deadline_s=1.0, chunk_bytes=4096)
    failing = run(scenarios.crowd_over_a_failing_tier, kvtier=small, **arguments)
    assert failing["rounds"] == plain["rounds"]
    assert failing["injected"] == {"eio": 3, "enospc": 2, "short": 2, "flip": 4, "delay": 1}, failing["calls"]
    assert failing["leases"] == failing["unowned"] == failing["jobs"] == failing["requests_left"] == 0
    faults = {key: value for key, value in failing["metrics"].items() if key.startswith("kvtier_faults_total")}
    for reason, least in (("io_error", 5), ("full", 2), ("corrupt", 2)):
        assert faults.get(f"kvtier_faults_total{{reason={reason},tier=nvme}}", 0) >= least, f"{reason}: {faults}"
    # A call that hangs is a stall if the engine takes a step meanwhile, and slow when it comes back.
    hung = [f"kvtier_faults_total{{reason={reason},tier=nvme}}" for reason in ("stall", "slow")]
    assert any(faults.get(name) for name in hung), faults


def test_canaries_compute_again_and_find_what_is_wrong(run: RunScenario, tmp_path: Path, tiny_llama: str) -> None:
    kvtier = options(tmp_path, canary_share=1.0)
    result = run(scenarios.canaries, model=tiny_llama, tokens=PROMPT_TOKENS, kvtier=kvtier, engine=POOL)
    first, second, third = result["turns"]
    assert first["answer"] == second["answer"] == third["answer"]
    assert second["cached"] == third["cached"] == 0

    def count(turn: dict[str, Any], outcome: str) -> float:
        return float(turn["metrics"].get(f"kvtier_canaries_total{{outcome={outcome}}}", 0.0))

    assert count(first, "same") == count(first, "close") == 0
    assert count(second, "same") + count(second, "close") >= 4
    assert count(second, "wrong") == 0
    assert count(third, "wrong") >= 1
    assert result["leases"] == 0
