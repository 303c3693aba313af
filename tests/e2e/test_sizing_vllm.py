"""What the sizing engine predicts from a config is what real vLLM allocates: page by page, and tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import EngineMismatchError
from kvtier.model.catalogue import catalogue
from kvtier.model.layout import GroupLayout
from kvtier.model.sizing import Deployment, Ledger, Reconciled, kv_format, reconcile, spec_from_config
from tests.e2e import models
from tests.e2e.conftest import RunScenario

BLOCKS = 400
LLAMA, DEEPSEEK = "meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"

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


# --- vLLM's own arithmetic for layers and formats that its CPU kernels cannot run

STATES = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ["gdn", [16, 32, 128, 128, 4]],
    "Qwen/Qwen3.5-27B": ["gdn", [16, 48, 128, 128, 4]],
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ["mamba2", [64 * 64, 8, 64, 64, 128, 4]],
    "mistralai/Mamba-Codestral-7B-v0.1": ["mamba2", [8192, 8, 128, 64, 128, 4]],
    "ai21labs/Jamba-v0.1": ["mamba1", [8192, 16, 4]],
    "moonshotai/Kimi-K3": ["kda", [96, 128]],
}
RANKS = [1, 2, 4, 8, 16]
HEADS_FORMS = {"fp8": "fp8", "int8": "int8_per_token_head", "int4": "int4_per_token_head"}
LATENT_FORMS = {**HEADS_FORMS, "fp8_ds_mla": "fp8_ds_mla"}


def read_arithmetic(states: dict[str, Any], ranks: list[int], heads: dict[str, str], latent: dict[str, str]) -> Any:
    """State shapes by tensor-parallel size, and page sizes of quantised forms, from vLLM's functions and classes."""
    from math import prod

    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    def shapes(family: str, figures: list[int], tp: int) -> Any:
        if family == "gdn":
            return Shapes.gated_delta_net_state_shape(tp, *figures)
        if family == "mamba2":
            return Shapes.mamba2_state_shape(tp, *figures)
        if family == "mamba1":
            return Shapes.mamba1_state_shape(tp, *figures)
        return Shapes.kda_state_shape(tp, *figures)

    found: dict[str, Any] = {"states": {}, "heads": {}, "latent": {}}
    for name, (family, figures) in states.items():
        for tp in ranks:
            conv, recurrence = shapes(family, figures, tp)
            found["states"][f"{name} {tp}"] = prod(conv) * 2 + prod(recurrence) * 4
    for ours, theirs in heads.items():
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=8, head_size=128, dtype=STR_DTYPE_TO_TORCH_DTYPE[theirs],
            kv_quant_mode=get_kv_quant_mode(theirs),
        )  # fmt: skip
        found["heads"][ours] = TritonAttentionBackend.customize_spec(spec).page_size_bytes
    for ours, theirs in latent.items():
        packed = 656 if theirs == "fp8_ds_mla" else None
        row = MLAAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=576, dtype=STR_DTYPE_TO_TORCH_DTYPE[theirs],
            kv_quant_mode=get_kv_quant_mode(theirs), cache_dtype_str=theirs, state_content_bytes=packed,
        )  # fmt: skip
        found["latent"][ours] = MLACommonBackend.customize_spec(row).page_size_bytes
    index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=128 + 4, dtype=torch.uint8)
    found["indexer"] = index.page_size_bytes
    return found


def test_states_and_quantised_pages_equal_vllms_arithmetic(run: RunScenario) -> None:
    found = run(read_arithmetic, states=STATES, ranks=RANKS, heads=HEADS_FORMS, latent=LATENT_FORMS)
    for name in STATES:
        spec = spec_from_config(catalogue()[name])
        states = [cache for layer in spec.layers for cache in layer.caches if cache.kind == "recurrent"]
        for tp in RANKS:
            assert {cache.state_bytes(2, tp) for cache in states} == {found["states"][f"{name} {tp}"]}, (name, tp)
    for kind, config in (("heads", LLAMA), ("latent", DEEPSEEK)):
        layer = spec_from_config(catalogue()[config]).layers[0]
        for form, page in found[kind].items():
            assert layer.caches[0].row_bytes(kv_format(form), 1) * 16 == page, form
    sparse = spec_from_config(catalogue()["deepseek-ai/DeepSeek-V3.2"]).layers[0]
    assert sparse.caches[1].row_bytes(kv_format("fp8"), 1) * 16 == found["indexer"]
