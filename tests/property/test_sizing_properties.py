"""What must hold for every architecture: monotone in tokens, no rank forgotten, no token lost to rounding."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, KVTierError, ModelConfigError
from kvtier.model.sizing import FORMATS, Deployment, Ledger, ModelSpec, kv_format, size_model, spec_from_config
from kvtier.model.sizing.cache import HeadsCache

FORMS = st.sampled_from(sorted(FORMATS)).map(kv_format)
TOKENS = st.integers(1, 300_000)
BLOCKS = st.sampled_from([1, 2, 16, 17, 32, 64, 128, 1056])
TP = st.sampled_from([1, 2, 4, 8, 16, 32])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, object]:
    """Configs of every family, with dimensions that tensor parallelism up to 32 can share or replicate."""
    kind = draw(
        st.sampled_from(["uniform", "mla", "dsa", "sliding", "chunked", "gdn", "mamba2", "mamba1", "kv-shared"])
    )
    layers = draw(st.integers(1, 12))
    heads = draw(st.sampled_from([32, 64]))
    base: dict[str, object] = {
        "model_type": "any",
        "num_hidden_layers": layers,
        "hidden_size": heads * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4, 8, 32])),
        "head_dim": draw(st.sampled_from([32, 64, 128, 192])),
    }
    if draw(st.booleans()):
        base["v_head_dim"] = draw(st.sampled_from([64, 128]))
    words = {
        "sliding": ["full_attention", "sliding_attention"],
        "chunked": ["full_attention", "chunked_attention"],
        "gdn": ["full_attention", "linear_attention"],
        "mamba2": ["attention", "mamba", "moe"],
        "mamba1": ["attention", "mamba"],
        "kv-shared": ["full_attention", "sliding_attention"],
    }
    if kind in words:
        base["layer_types"] = draw(st.lists(st.sampled_from(words[kind]), min_size=layers, max_size=layers))
    if kind in ("mla", "dsa"):
        base |= {
            "kv_lora_rank": draw(st.sampled_from([128, 256, 512])),
            "qk_rope_head_dim": draw(st.sampled_from([0, 64])),
        }
        base.pop("v_head_dim", None)
    if kind == "dsa":
        base |= {"index_head_dim": 128, "index_topk_freq": draw(st.integers(1, 4))}
    if kind in ("sliding", "kv-shared"):
        base["sliding_window"] = draw(st.integers(1, 5000))
    if kind == "kv-shared":
        base["num_kv_shared_layers"] = _shareable(base["layer_types"], draw(st.integers(0, layers)))
    if kind == "chunked":
        base["attention_chunk_size"] = draw(st.integers(1, 5000))
    if kind == "gdn":
        base |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                 "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}  # fmt: skip
    if kind == "mamba2":
        base |= {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4,
                 "mamba_n_groups": draw(st.sampled_from([1, 8]))}  # fmt: skip
    if kind == "mamba1":
        base |= {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
    return base


def _shareable(words: object, wanted: int) -> int:
    """The largest tail up to `wanted` whose kinds all occur before it."""
    assert isinstance(words, list)
    fits = [tail for tail in range(wanted + 1) if set(words[len(words) - tail :]) <= set(words[: len(words) - tail])]
    return max(fits)


SPECS = configs().map(spec_from_config)


@given(spec=SPECS, form=FORMS, block=BLOCKS, first=TOKENS, more=st.integers(0, 5000), tp=TP)
def test_bytes_never_shrink_with_tokens(spec: ModelSpec, form, block: int, first: int, more: int, tp: int) -> None:
    ledger = Ledger(spec, Deployment(tp=tp, form=form, block_tokens=block))
    for figure in (ledger.logical_bytes, ledger.sequence_bytes, ledger.physical_bytes, ledger.per_rank_bytes):
        assert figure(first) <= figure(first + more)


@given(spec=SPECS, form=FORMS, block=BLOCKS, tokens=TOKENS, tp=TP, pp=st.integers(1, 4))
def test_ranks_hold_at_least_one_copy_and_exactly_one_when_nothing_is_replicated(
    spec: ModelSpec, form, block: int, tokens: int, tp: int, pp: int
) -> None:
    pp = min(pp, len(spec.layers))
    ledger = Ledger(spec, Deployment(tp=tp, pp=pp, form=form, block_tokens=block))
    everywhere, once = ledger.all_ranks_bytes(tokens), ledger.physical_bytes(tokens)
    assert everywhere >= once
    assert (everywhere == once) == (ledger.replication() == 1 or once == 0)
    assert ledger.per_rank_bytes(tokens) * tp * pp >= everywhere


@given(spec=SPECS, form=FORMS, tokens=TOKENS, tp=TP)
def test_dp_attention_keeps_a_sequence_whole_on_its_owner(spec: ModelSpec, form, tokens: int, tp: int) -> None:
    ledger = Ledger(spec, Deployment(tp=tp, dp_attention=True, form=form))
    assert ledger.all_ranks_bytes(tokens) == ledger.per_rank_bytes(tokens) == ledger.physical_bytes(tokens)
    assert ledger.replication() == 1


@given(spec=SPECS, form=FORMS, block=BLOCKS, tokens=TOKENS, alignment=st.sampled_from([1, 512, 576, 4096]))
def test_rounding_never_loses_a_token(spec: ModelSpec, form, block: int, tokens: int, alignment: int) -> None:
    ledger = Ledger(spec, Deployment(form=form, block_tokens=block, page_alignment=alignment))
    for layer in spec.layers:
        for cache in layer.caches:
            assert cache.peak_blocks(tokens, block) * block >= cache.held_tokens(tokens)
            assert cache.held_tokens(tokens) <= tokens
            assert ledger.page_bytes(cache, 1) >= block * cache.row_bytes(form, 1)
    assert ledger.logical_bytes(tokens) <= ledger.sequence_bytes(tokens) <= ledger.physical_bytes(tokens)


@given(window=st.integers(1, 300), block=st.integers(1, 64), tokens=st.integers(1, 2000), chunked=st.booleans())
def test_bounded_layers_have_room_for_whatever_position_they_are_at(
    window: int, block: int, tokens: int, chunked: bool
) -> None:
    """Brute force: at every length, the blocks that hold a needed token fit in the peak."""
    from kvtier.model.sizing.chunked import ChunkedAttention
    from kvtier.model.sizing.sliding import SlidingWindow

    cache: HeadsCache
    if chunked:
        cache = ChunkedAttention(heads=1, key_dim=1, value_dim=1, chunk=window)
    else:
        cache = SlidingWindow(heads=1, key_dim=1, value_dim=1, window=window)
    for length in {1, window, window + 1, tokens} & set(range(1, tokens + 1)):
        first = (length - 1) // window * window if chunked else max(0, length - window)
        needed = (length - 1) // block - first // block + 1
        assert needed <= cache.peak_blocks(tokens, block)


@given(spec=SPECS, form=FORMS, block=BLOCKS, budget=st.integers(1, 1 << 34), tp=TP, tokens=st.integers(1, 100_000))
@settings(max_examples=60)
def test_what_fits_fits_and_one_more_does_not(
    spec: ModelSpec, form, block: int, budget: int, tp: int, tokens: int
) -> None:
    ledger = Ledger(spec, Deployment(tp=tp, form=form, block_tokens=block))
    if ledger.per_rank_bytes(tokens) == 0:
        with pytest.raises(ConfigError, match="keeps nothing"):
            ledger.max_batch(budget, tokens)
        return
    batch = ledger.max_batch(budget, tokens)
    assert batch * ledger.per_rank_bytes(tokens) <= budget < (batch + 1) * ledger.per_rank_bytes(tokens)
    longest = ledger.max_tokens(budget)
    if longest is None:
        assert ledger.per_rank_bytes(1 << 40) <= budget
    elif longest == 0:
        assert ledger.per_rank_bytes(1) > budget
    else:
        assert ledger.per_rank_bytes(longest) <= budget < ledger.per_rank_bytes(longest + 1)


@given(spec=SPECS, pp=st.integers(1, 12))
def test_pipeline_stages_hold_every_layer_once(spec: ModelSpec, pp: int) -> None:
    from kvtier.model.sizing import pipeline_stages

    if pp > len(spec.layers):
        with pytest.raises(ConfigError, match="pp"):
            pipeline_stages(spec.layers, pp)
        return
    stages = pipeline_stages(spec.layers, pp)
    assert [layer for stage in stages for layer in stage] == list(spec.layers)
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(config=configs(), data=st.data())
@settings(max_examples=400)
def test_a_damaged_config_is_sized_or_refused_in_one_line(config: dict[str, object], data: st.DataObject) -> None:
    """Whatever replaces a field: never another exception, never a negative or absurd figure."""
    key = data.draw(st.sampled_from(sorted(config)))
    config = {**config, key: data.draw(JSON)}
    message = ""
    try:
        sized = size_model("damaged", spec_from_config(config), Deployment())
    except ModelConfigError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        return
    assert min(sized.bytes_per_token, sized.bytes_per_block, sized.logical_bytes, sized.state_bytes_per_sequence) >= 0


@given(raw=st.dictionaries(st.text(max_size=12), JSON, max_size=6) | JSON)
@settings(max_examples=300)
def test_any_json_is_sized_or_refused(raw: object) -> None:
    message = ""
    try:
        spec_from_config(raw)  # type: ignore[arg-type]
    except KVTierError as error:
        message = str(error)
    assert "\n" not in message


@given(config=configs(), missing=st.sampled_from(["num_hidden_layers", "num_attention_heads"]))
def test_a_missing_field_is_named(config: dict[str, object], missing: str) -> None:
    needs = "kv_lora_rank" not in config or missing == "num_hidden_layers"
    words = config.get("layer_types")
    if isinstance(words, list):
        attends = any(
            word in ("attention", "full_attention", "sliding_attention", "chunked_attention") for word in words
        )
        needs = attends and missing == "num_attention_heads"  # the list says how many layers there are
    if not needs:
        return
    del config[missing]
    with pytest.raises(ModelConfigError, match=missing):
        spec_from_config(config)


def test_pairs_of_growing_lengths_are_strictly_ordered_for_full_attention() -> None:
    spec = spec_from_config({"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1})
    ledger = Ledger(spec, Deployment())
    assert all(a < b for a, b in pairwise(ledger.logical_bytes(tokens) for tokens in range(1, 50)))
