"""Encoded tiers in a real vLLM on the CPU: fewer bytes, who is served from them, what is refused at the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo.codec import CALIBRATION, compare, print_comparison
from examples.demo.conversation import QUESTIONS
from examples.demo.prepare_model import smollm2
from tests.e2e import models
from tests.e2e import scenarios_codec as scenarios
from tests.e2e.conftest import RunScenario

POOL = {"num_gpu_blocks_override": 300, "max_model_len": 1_024}
TOKENS = 300


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    tiers = {"dram_bytes": "24MiB", "nvme_path": str(tmp_path / "nvme"), "nvme_bytes": "64MiB"}
    return {**tiers, "gate": False, "allow_slow_codecs": True, **more}


@pytest.mark.timeout(900)
def test_the_demos_questions_answered_from_an_encoded_tier(tmp_path: Path) -> None:
    """d4 on the nvme tier: at most 0.3 of the bytes, and answers that begin as the exact ones do."""
    result = compare("d4", list(QUESTIONS), tmp_path, Path(smollm2()))
    assert result["raw_bytes"] > 20_000_000
    assert result["share"] <= result["share_of_bfloat16"] <= 0.3
    print_comparison(result, Console(width=140))
    answers = result["answers"]
    assert answers[0]["tokens_by_source"]["nvme"] >= 0.9 * sum(answers[0]["tokens_by_source"].values())
    agree, total = (sum(row[name] for row in answers) for name in ("agreeing_tokens", "answer_tokens"))
    # What a small model says after its first unsure token is another sentence: the KL is what the ledger judges.
    assert agree >= total / 3


def test_requests_that_want_exact_blocks_never_see_lossy_ones(run: RunScenario, tmp_path: Path) -> None:
    kvtier = options(tmp_path, codecs={"nvme": "int8"})
    result = run(scenarios.exact_and_lossy, model=str(models.tiny_llama()), tokens=TOKENS, kvtier=kvtier, engine=POOL)
    cached = {stage["stage"]: stage["cached"] for stage in result["stages"]}
    full = TOKENS // 32 * 32
    assert cached["lossy, computed"] == cached["exact, beside it"] == 0
    assert cached["lossy, from the device"] == cached["exact, from the device"] == full
    assert cached["lossy, from below"] == full
    assert cached["exact, with lossy blocks on the device"] == 0
    exact = [stage["answer"] for stage in result["stages"] if stage["stage"].startswith("exact")]
    assert exact[0] == exact[1] == exact[2]
    # Only what lossy requests computed lies below: the prompt's blocks, and not once more for the others.
    assert {stage["below"] for stage in result["stages"]} == {full // 32}
    assert result["leases"] == 0
    assert result["share"] < 0.3  # one byte for four of float32, and the scales
    assert result["inner_row_bytes"] < 0.3 * result["row_bytes"]
    assert result["decoded"] > 0
    assert any(name.startswith("kvtier_codec_bytes") for name in result["counted"])
    assert any(name.startswith("kvtier_codec_seconds") for name in result["counted"])


@pytest.mark.skipif(not os.environ.get("KVTIER_SOAK"), reason="starts three engines; set KVTIER_SOAK=1")
@pytest.mark.parametrize(
    ("model", "codec", "worst"),
    [("tiny-llama", "zstd", 0.0), ("tiny-gemma", "int8", 0.01), ("tiny-mla", "int8", 0.01)],
)
def test_numbers_come_back_from_every_kind_of_layout(
    run: RunScenario, tmp_path: Path, model: str, codec: str, worst: float
) -> None:
    kvtier = options(tmp_path, codecs={"nvme": codec}, lossy_requests="opt_out")
    folder = str(models.ALL_MODELS[model]())
    result = run(scenarios.same_numbers, model=folder, tokens=TOKENS, kvtier=kvtier, engine=POOL)
    assert result["rows"] >= 2
    assert result["error"] <= worst
    assert result["error"] > 0 or codec == "zstd"


@pytest.mark.skipif(not os.environ.get("KVTIER_SOAK"), reason="starts three engines; set KVTIER_SOAK=1")
@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("tiny-llama", {"codecs": {"nvme": "d4"}}, "run kvtier calibrate"),
        ("tiny-llama", {"codecs": {"nvme": "d4"}, "calibration": str(CALIBRATION)}, "is of model"),
        ("tiny-gemma", {"codecs": {"nvme": "d4"}}, "needs one cache for all layers; this model has"),
    ],
)
def test_a_codec_that_does_not_fit_the_model_stops_the_start(
    run: RunScenario, tmp_path: Path, model: str, more: dict[str, Any], message: str
) -> None:
    kvtier = options(tmp_path, **more)
    engine = POOL if model != "tiny-llama" else {**POOL, "block_size": 32}
    error = run(
        scenarios.refused,
        model=str(models.ALL_MODELS[model]()),
        kvtier=kvtier,
        engine=engine,
        environment={"XDG_CACHE_HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm")},
    )
    assert message in error
