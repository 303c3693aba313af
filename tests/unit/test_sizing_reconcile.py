"""What a block costs per group, how ranks share it, and that a live engine which disagrees is refused."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError, EngineMismatchError
from kvtier.model.catalogue import catalogue
from kvtier.model.layout import GroupLayout
from kvtier.model.sizing import Deployment, GroupBlock, Ledger, block_bytes, kv_format, reconcile, spec_from_config

LLAMA = "meta-llama/Llama-3.1-8B"
PAGE = 16 * 8 * 128 * 2 * 2  # one block of one layer of Llama-3.1-8B


def _names(indices: range | list[int], module: str = "self_attn.attn") -> tuple[str, ...]:
    return tuple(f"model.layers.{index}.{module}" for index in indices)


def _group(layers: tuple[str, ...], page_bytes: int, block_tokens: int = 16, kind: str = "full") -> GroupLayout:
    return GroupLayout(kind=kind, block_tokens=block_tokens, page_bytes=page_bytes, layers=layers)


def test_a_uniform_model_is_one_group() -> None:
    (block,) = block_bytes(spec_from_config(catalogue()[LLAMA]), Deployment())
    assert block == GroupBlock(
        kind="full",
        layers=tuple(range(32)),
        page_bytes=PAGE,
        rank_bytes=32 * PAGE,
        stored_bytes=32 * PAGE,
        copies=1,
    )


def test_heads_are_shared_then_replicated_and_stored_once() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    (shared,) = block_bytes(spec, Deployment(tp=4))
    assert (shared.page_bytes, shared.copies) == (PAGE // 4, 1)
    (replicated,) = block_bytes(spec, Deployment(tp=16))
    assert (replicated.page_bytes, replicated.copies) == (PAGE // 8, 2)
    assert replicated.stored_bytes == shared.stored_bytes == 32 * PAGE
    assert replicated.rank_bytes * 16 == 2 * replicated.stored_bytes


def test_a_latent_is_replicated_over_all_ranks_and_stored_once() -> None:
    (block,) = block_bytes(spec_from_config(catalogue()["deepseek-ai/DeepSeek-V3"]), Deployment(tp=8))
    assert block.copies == 8
    assert block.rank_bytes == block.stored_bytes == 61 * 16 * 1152


def test_dp_attention_replicates_nothing() -> None:
    (block,) = block_bytes(
        spec_from_config(catalogue()["deepseek-ai/DeepSeek-V3"]), Deployment(tp=8, dp_attention=True)
    )
    assert block.copies == 1


def test_groups_of_a_hybrid_model() -> None:
    blocks = block_bytes(spec_from_config(catalogue()["Qwen/Qwen3.5-27B"]), Deployment())
    assert {block.kind: len(block.layers) for block in blocks} == {"recurrent": 48, "full": 16}
    state = next(block for block in blocks if block.kind == "recurrent")
    assert state.stored_bytes == 153_944_064  # a snapshot, whatever the block size


@pytest.mark.parametrize("tp", [3, 5, 6])
def test_ranks_that_do_not_divide_the_heads_are_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match=f"tp = {tp}"):
        block_bytes(spec_from_config(catalogue()[LLAMA]), Deployment(tp=tp))


def test_ranks_that_cannot_replicate_the_heads_evenly_are_refused() -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ConfigError, match="not a multiple of 2 KV heads"):
        Ledger(spec_from_config(config), Deployment(tp=3)).per_rank_bytes(1)


@pytest.mark.parametrize("field", ["tp", "pp", "block_tokens", "page_alignment"])
@pytest.mark.parametrize("value", [0, -1, True, 1 << 40])
def test_absurd_deployments_are_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError):
        Deployment(**{field: value})


def test_an_engine_that_agrees() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    agreed = reconcile(spec, [_group(_names(range(32)), PAGE // 2)], Deployment(tp=2))
    assert agreed.unsized == ()
    assert [(b.kind, b.page_bytes, b.rank_bytes, b.stored_bytes) for b in agreed.blocks] == [
        ("full", PAGE // 2, 16 * PAGE, 32 * PAGE)
    ]


def test_the_groups_block_size_counts_not_the_deployments() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    agreed = reconcile(spec, [_group(_names(range(32)), 4 * PAGE, block_tokens=64)], Deployment(block_tokens=16))
    assert agreed.blocks[0].page_bytes == 4 * PAGE


def test_a_difference_names_the_layer_and_both_figures() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    with pytest.raises(EngineMismatchError) as caught:
        reconcile(spec, [_group(_names(range(32)), PAGE + 64)], Deployment())
    assert "model.layers.0.self_attn.attn" in str(caught.value)
    assert f"{PAGE + 64} B" in str(caught.value)
    assert f"{PAGE} B (full)" in str(caught.value)


def test_a_layer_the_engine_does_not_hold_is_a_difference() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    with pytest.raises(EngineMismatchError, match="layer 31"):
        reconcile(spec, [_group(_names(range(31)), PAGE)], Deployment())
    stage = reconcile(spec, [_group(_names(range(16)), PAGE)], Deployment(pp=2), layers=range(16))
    assert stage.blocks[0].layers == tuple(range(16))


def test_a_layer_met_twice_is_a_difference() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    twice = (*_names(range(32)), "model.layers.0.other_attn")
    with pytest.raises(EngineMismatchError, match="the config says nothing"):
        reconcile(spec, [_group(twice, PAGE)], Deployment())


def test_layers_of_a_draft_model_are_reported_not_sized() -> None:
    spec = spec_from_config(catalogue()[LLAMA])
    groups = [_group(_names(range(32)), PAGE), _group(_names([32]), 999), _group(("draft.norm",), 1)]
    assert reconcile(spec, groups, Deployment()).unsized == ("model.layers.32.self_attn.attn", "draft.norm")


def test_mtp_layers_follow_the_models_own() -> None:
    spec = spec_from_config(catalogue()["Qwen/Qwen3.5-27B"])
    row, state = 4 * 256 * 2 * 2, 153_944_064 // 48
    full = [index for index in range(64) if index % 4 == 3]
    linear = [index for index in range(64) if index % 4 != 3]
    groups = [
        _group((*_names(full), "mtp.layers.0.self_attn.attn"), 16 * row),
        _group(_names(linear, "linear_attn"), state, kind="mamba"),
    ]
    agreed = reconcile(spec, groups, Deployment())
    assert agreed.unsized == ()
    assert agreed.blocks[0].layers == (*full, 64)


def test_padded_pages_are_compared_by_their_content() -> None:
    """vLLM pads the pages of hybrid models to one size; its unpadded figure must still be ours."""
    spec = spec_from_config(catalogue()["Qwen/Qwen3-Next-80B-A3B-Instruct"])
    row, state = 2 * 256 * 2 * 2, 77_266_944 // 36
    full = [index for index in range(48) if index % 4 == 3]
    linear = [index for index in range(48) if index % 4 != 3]
    page = 1056 * row
    groups = [
        _group(_names(full), page, block_tokens=1056),
        _group(_names(linear, "linear_attn"), page, block_tokens=1056, kind="mamba"),
    ]
    with pytest.raises(EngineMismatchError, match=f"{state} B"):
        reconcile(spec, groups, Deployment())
    agreed = reconcile(spec, groups, Deployment(), content_bytes=dict.fromkeys(_names(linear, "linear_attn"), state))
    assert [block.page_bytes for block in agreed.blocks] == [page, page]
    assert [block.stored_bytes for block in agreed.blocks] == [12 * page, 36 * state]


def test_indexer_and_latent_of_one_layer_are_told_apart() -> None:
    spec = spec_from_config(catalogue()["deepseek-ai/DeepSeek-V3.2"])
    latent, indexer = _names(range(61)), _names(range(61), "self_attn.indexer.k_cache")
    fp8 = Deployment(form=kv_format("fp8"))
    apart = [_group(latent, 64 * 656, 64, "mla"), _group(indexer, 64 * 132, 64, "mla")]
    assert [block.kind for block in reconcile(spec, apart, fp8).blocks] == ["mla", "indexer"]
    # vLLM may put both into one group, of which only the mean page is known.
    mixed = [_group((*latent, *indexer), 64 * (656 + 132) // 2, 64, "uniform")]
    assert {block.kind: block.page_bytes for block in reconcile(spec, mixed, fp8).blocks} == {
        "mla": 64 * 656,
        "indexer": 64 * 132,
    }
    with pytest.raises(EngineMismatchError, match="on average"):
        reconcile(spec, mixed, Deployment())
