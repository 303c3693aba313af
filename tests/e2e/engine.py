"""Building blocks for scenarios: start vLLM in this process, with or without kvtier, ask it, read what it counted.

Call these inside a scenario's own process (see kvtier/testing/scenario.py). vLLM is imported by the functions, not by
this module: it takes seconds and leaves process-wide state, and pytest imports the modules that define scenarios.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

BLOCK_TOKENS = 32  # the CPU attention kernel needs a multiple of 32
MLA_BLOCK_TOKENS = 16  # the CPU MLA kernel exists for 16 only
CONNECTOR_NAME = "KVTierConnector"


def start_engine(model: str, *, kvtier: dict[str, Any] | None = None, **overrides: Any) -> LLM:
    """Start an in-process engine in float32, in which cached and computed answers agree to the token.

    `kvtier` is the connector's extra configuration (`{"dram_bytes": ..., "nvme_path": ...}`); None runs plain vLLM.
    `overrides` are arguments of `vllm.LLM`.
    """
    from vllm import LLM

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
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    requests = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    return llm.generate(requests, parameters, use_tqdm=False)


def answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the generated token ids of each request, as JSON can carry them."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    """Return how many prompt tokens of each request were not computed: device hits plus tokens kvtier loaded."""
    return [output.num_cached_tokens or 0 for output in outputs]


def metrics(prefix: str) -> dict[str, float]:
    """Return this process's Prometheus samples whose name starts with `prefix`, as `name{label=value,...}` -> value.

    Read from the registry because `LLM.get_metrics` leaves out every name that does not start with "vllm:".
    """
    found: dict[str, float] = {}
    for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
        if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
            labels = ",".join(
                f"{name}={sample.labels[name]}"
                for name in sorted(sample.labels)
                if name not in ("engine", "model_name")
            )
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def shut_down(llm: LLM) -> None:
    """End the engine as a server does on exit: kvtier finishes its writes, so that the next process finds them."""
    llm.llm_engine.engine_core.shutdown()


def connector_of(llm: LLM) -> Any:
    """Return the scheduler-side connector of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def settle(llm: LLM) -> Any:
    """Step until nothing is left to do and every row that moves has arrived; returns the engine's TierCache."""
    core = llm.llm_engine.engine_core.engine_core
    cache = connector_of(llm).manager.cache
    for _ in range(1_000):
        llm.llm_engine.step()  # not the core's own step: this one also takes in what the core counted
        cache.mover.drain(5.0)
        cache.poll()
        if not core.scheduler.has_requests() and not cache.busy:
            break
    return cache


def device_bytes(llm: LLM) -> dict[str, str]:
    """Return a digest of the bytes of every block in the device prefix cache, by block hash and group."""
    import torch

    core = llm.llm_engine.engine_core.engine_core
    pages = {
        name: layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
        for name, layer in core.vllm_config.compilation_config.static_forward_context.items()
        if getattr(layer, "kv_cache", None) is not None
    }
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    found: dict[str, str] = {}
    for block in core.scheduler.kv_cache_manager.block_pool.blocks:
        if block.block_hash is None or block.is_null:
            continue
        digest = hashlib.sha256()
        for layer in groups[int.from_bytes(block.block_hash[-4:], "big")].layer_names:
            digest.update(pages[layer][block.block_id].contiguous().view(torch.uint8).numpy().tobytes())
        found[block.block_hash.hex()] = digest.hexdigest()
    return found


def wipe_device(llm: LLM) -> None:
    """Empty the device prefix cache and overwrite every block, so that nothing old can pass for something loaded."""
    llm.reset_prefix_cache()
    for pages in _device_pages():
        pages[:] = 0x55


def memory_rows(llm: LLM) -> dict[str, str]:
    """Return a digest of every row in kvtier's memory tier, by position in its prompt, key and group."""
    cache = connector_of(llm).manager.cache
    payload = sum(pages.shape[1] for pages in _device_pages())
    found: dict[str, str] = {}
    for segment in cache.tree.segments():
        chain = cache.tree.chain_of(segment)
        slots = cache.memory.residency.slots_of(cache.tree.walk(chain))
        for block in range(segment.depth, segment.stop):
            for group, slot in enumerate(slots[block].tolist()):
                if slot >= 0:
                    key = chain[block * 32 : (block + 1) * 32].hex()
                    found[f"{block}/{key}/{group}"] = hashlib.sha256(cache.memory_row(slot)[:payload]).hexdigest()
    return found


def device_rows() -> set[str]:
    """Return a digest of every device block, over all its tensors, as a row of memory would hold it."""
    pages = _device_pages()
    return {
        hashlib.sha256(b"".join(tensor[block].tobytes() for tensor in pages)).hexdigest()
        for block in range(len(pages[0]))
    }


def _device_pages() -> list[Any]:
    """The device's KV tensors as the copy worker sees them: (blocks, page bytes) each."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().connector_worker.worker
    return getattr(worker, "inner", worker)._device
