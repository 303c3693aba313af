"""`make demo` with two of its five questions: a real model, every path, and what the README promises about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1_500)
def test_the_demo_serves_the_document_from_every_tier() -> None:
    command = [sys.executable, "-m", "examples.demo", "--json", "--questions", "2"]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1_400)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)  # stdout holds the object and nothing else
    assert set(result) == {"model", "prompt_tokens", "ttft_s", "tokens_by_source", "outputs_identical", "bytes_loaded"}
    assert result["outputs_identical"] is True
    asked = 2 * result["prompt_tokens"]
    for source in ("hbm", "dram", "nvme"):
        assert result["tokens_by_source"][source] >= 0.95 * asked
    assert sum(result["tokens_by_source"].values()) == pytest.approx(4 * asked, abs=8)
    ttft_s = result["ttft_s"]
    assert ttft_s["dram"] <= ttft_s["cold"] / 5
    assert ttft_s["nvme_restart"] <= ttft_s["cold"] / 5
    assert min(result["bytes_loaded"].values()) > 0
