"""What the sizing engine predicts from a config is what real vLLM allocates: page by page, and tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import EngineMismatchError
from kvtier.model.layout import GroupLayout
from kvtier.model.sizing import Deployment, Ledger, Reconciled, kv_format, reconcile, spec_from_config
from tests.e2e import models
from tests.e2e.conftest import RunScenario

BLOCKS = 400

# Model, dtype of the engine and so of its cache, block size, kinds of cache.
CASES = [
    pytest.param(models.tiny_llama, "bfloat16", 32, {"full"}, id="full-bf16"),
    pytest.param(models.tiny_llama, "float32", 64, {"full"}, id="full-fp32"),
    pytest.param(models.tiny_mistral, "bfloat16", 32, {"sliding"}, id="sliding-bf16"),
    pytest.param(models.tiny_gemma, "float32", 32, {"full", "sliding"}, id="full-and-sliding-fp32"),
    pytest.param(models.tiny_mla, "bfloat16", 16, {"mla"}, id="mla-bf16"),
]


def read_pages(model: str, dtype: str, block_size: int) -> dict[str, Any]:
    """Start the engine; report its KV-cache groups as a connector would, and the bytes of the tensors behind them."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    from tests.e2e.engine import start_engine

    llm = start_engine(model, dtype=dtype, block_size=block_size, num_gpu_blocks_override=BLOCKS)
    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    groups = []
    for group in config.kv_cache_groups:
        specs = list(iter_layer_specs(group.kv_cache_spec))
        assert len({spec.page_size_bytes for spec in specs}) == 1
        spec = specs[0]
        groups.append([type(spec).__name__, spec.block_size, spec.page_size_bytes, list(group.layer_names)])
    return {
        "groups": groups,
        "blocks": config.num_blocks,
        "allocated": max(tensor.size for tensor in config.kv_cache_tensors),
        "tensor_bytes": [tensor.nbytes for tensor in core.model_executor.driver_worker.worker.model_runner.kv_caches],
        "hf_config": json.loads(json.dumps(llm.llm_engine.model_config.hf_config.to_dict(), default=str)),
    }


@pytest.mark.parametrize(("make", "dtype", "block_size", "kinds"), CASES)
def test_pages_equal_those_of_the_engine(
    run: RunScenario, make: Callable[[], Path], dtype: str, block_size: int, kinds: set[str]
) -> None:
    folder = make()
    found = run(read_pages, model=str(folder), dtype=dtype, block_size=block_size)
    groups = [GroupLayout(kind=k, block_tokens=b, page_bytes=p, layers=tuple(n)) for k, b, p, n in found["groups"]]
    deployment = Deployment(form=kv_format(dtype))

    on_disk = json.loads((Path(folder) / "config.json").read_text())
    for config in (on_disk, found["hf_config"]):
        spec = spec_from_config(config)
        agreed = reconcile(spec, groups, deployment)
        assert agreed.unsized == ()
        assert {block.kind for block in agreed.blocks} == kinds
        _check_against_groups(agreed, groups)
        per_layer = {layer for block in agreed.blocks for layer in block.layers}
        assert per_layer == set(range(len(spec.layers)))

    # The tensors themselves, one view a layer.
    pages = sorted(block.page_bytes for block in agreed.blocks for _ in block.layers)
    assert sorted(size // found["blocks"] for size in found["tensor_bytes"]) == pages

    # Another dtype must not pass.
    wrong_dtype = kv_format("bf16" if dtype == "float32" else "fp32")
    with pytest.raises(EngineMismatchError, match=f"{groups[0].page_bytes} B"):
        reconcile(spec_from_config(on_disk), groups, Deployment(form=wrong_dtype))

    # The whole model's blocks, as the ledger sums them, against what vLLM asked the allocator for.
    if len(groups) == 1:
        ledger = Ledger(
            spec_from_config(on_disk), Deployment(form=kv_format(dtype), block_tokens=groups[0].block_tokens)
        )
        assert ledger.bytes_per_block() == groups[0].page_bytes * len(groups[0].layers)
        assert found["allocated"] == ledger.bytes_per_block() * found["blocks"]


def _check_against_groups(agreed: Reconciled, groups: list[GroupLayout]) -> None:
    assert sum(block.rank_bytes for block in agreed.blocks) == sum(g.page_bytes * len(g.layers) for g in groups)
