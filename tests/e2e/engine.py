"""Building blocks for scenarios: start vLLM in this process, with or without kvtier, ask it, read what it counted.

Imported by scenario modules inside their own child process (see kvtier/testing/scenario.py), never by test modules:
importing vLLM takes seconds and leaves process-wide state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams

BLOCK_TOKENS = 32  # the CPU attention kernel needs a multiple of 32
MLA_BLOCK_TOKENS = 16  # the CPU MLA kernel exists for 16 only
CONNECTOR_NAME = "KVTierConnector"


def start_engine(model: str, *, kvtier: dict[str, Any] | None = None, **overrides: Any) -> LLM:
    """Start an in-process engine in float32, in which cached and computed answers agree to the token.

    `kvtier` is the connector's extra configuration (`{"dram_bytes": ..., "nvme_path": ...}`); None runs plain vLLM.
    `overrides` are arguments of `vllm.LLM`.
    """
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": MLA_BLOCK_TOKENS if Path(model).name.startswith("tiny-mla") else BLOCK_TOKENS,
        "max_model_len": 2_048,
        "disable_log_stats": False,
        "seed": 0,
    }
    if kvtier is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": kvtier,
        }
    return LLM(model, **{**settings, **overrides})


def ask(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **sampling: Any) -> list[RequestOutput]:
    """Answer token prompts greedily with exactly `max_tokens` tokens each; all of them are submitted at once."""
    parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(requests, parameters, use_tqdm=False)


def answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the generated token ids of each request, as JSON can carry them."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    """Return how many prompt tokens of each request were not computed: device hits plus tokens kvtier loaded."""
    return [output.num_cached_tokens or 0 for output in outputs]


def counters(llm: LLM, prefix: str) -> dict[str, float]:
    """Return the engine's counters and gauges whose name starts with `prefix`, as `name{label=value,...}` -> value."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if metric.name.startswith(prefix) and value is not None:
            labels = {key: text for key, text in metric.labels.items() if key not in ("engine", "model_name")}
            text = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
            found[f"{metric.name}{{{text}}}"] = float(value)
    return found
