"""Rows of vLLM's caches as codecs see them, from vLLM's own specs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs vLLM")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: E402

from kvtier.config import CacheConfig  # noqa: E402
from kvtier.errors import ConfigError  # noqa: E402
from kvtier_vllm import rows  # noqa: E402


def configs(spec: Any, layout: str = "LBHNC", layers: int = 4, groups: int = 1, heads: int = 8) -> tuple[Any, Any]:
    """What `form_of` reads of vLLM's configuration."""
    model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=layout), model_config=model)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=names)
    return vllm_config, SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=10)


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16} | changes
    )


@pytest.mark.parametrize(
    ("layout", "blocks", "axes"),
    [
        ("LBHNC", 1, "lhtkd"),
        ("LBHNC", 2, "lbhtkd"),
        ("LBNHC", 1, "lthkd"),
        ("BLHNC", 4, "blhtkd"),
        ("BHLNC", 1, "hltkd"),
    ],
)
def test_layouts_on_a_device(monkeypatch: pytest.MonkeyPatch, layout: str, blocks: int, axes: str) -> None:
    monkeypatch.setattr(rows.current_platform, "is_cpu", lambda: False)
    found = rows.form_of(*configs(full(), layout), 0, blocks, 1)
    assert (found.form.axes, found.form.tokens, found.form.packing, found.refusal) == (axes, 32 * blocks, "", "")
    assert found.form.row_bytes == full().page_size_bytes * 4 * blocks


def test_layouts_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, packing in (("vec", "channels"), ("vec16", "channels"), ("amx", "amx"), ("neon", None)):
        monkeypatch.setattr(rows, "cpu_attention_kernel", lambda *_, kernel=kernel: kernel)
        monkeypatch.setattr(rows.current_platform, "is_cpu", lambda: True)
        found = rows.form_of(*configs(full()), 0, 2, 1)
        if packing is None:
            assert "'neon' packs it" in found.refusal
            assert found.form.kind == "opaque"
        else:
            assert (found.form.axes, found.form.packing) == ("lbhktd", packing)


def test_ranks_share_or_repeat_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.current_platform, "is_cpu", lambda: False)
    shared = rows.form_of(*configs(full(num_kv_heads=2), heads=8), 0, 1, 4)
    assert (shared.ranks, shared.replicas, shared.form.heads) == (4, 1, 2)
    repeated = rows.form_of(*configs(full(num_kv_heads=1), heads=2), 0, 1, 8)
    assert (repeated.ranks, repeated.replicas) == (8, 4)


@pytest.mark.parametrize(
    ("spec", "layout", "why"),
    [
        (full(dtype=torch.float8_e4m3fn), "LBHNC", "holds float8_e4m3fn numbers"),
        (full(page_size_padded=1 << 20), "LBHNC", "pads"),
        (full(head_size_v=32), "LBHNC", "different sizes"),
        (full(), "LHBNC", "lays its cache out as LHBNC"),
    ],
)
def test_what_cannot_be_read_is_opaque_with_the_reason(spec: Any, layout: str, why: str) -> None:
    found = rows.form_of(*configs(spec, layout), 0, 1, 1)
    assert found.form.kind == "opaque"
    assert why in found.refusal
    assert found.form.row_bytes == spec.page_size_bytes * 4


def test_a_latent_has_one_part() -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    found = rows.form_of(*configs(spec), 0, 1, 1)
    assert (found.form.kind, found.form.parts, found.form.head_dim) == ("mla", 1, 576)
    assert found.form.row_bytes == spec.page_size_bytes * 4


def test_blocks_split_for_kernels_are_refused() -> None:
    _, kv_cache_config = configs(full())
    rows.check_pages({"layer": torch.empty(10, 8, 32, 128)}, kv_cache_config)
    with pytest.raises(ConfigError, match="splits every block of layer into 2 for its kernels"):
        rows.check_pages({"layer": torch.empty(20, 8, 16, 128)}, kv_cache_config)


@pytest.mark.parametrize(
    ("codec", "cuda", "spec", "groups", "why"),
    [
        ("int8", False, full(), 1, "no CUDA device"),
        ("d4", True, full(), 1, "only int8"),
        ("int8", True, full(), 2, "several groups"),
        ("int8", True, full(page_size_padded=1 << 20), 1, "pads"),
        ("int8", True, full(), 1, ""),
        ("raw", False, full(), 2, ""),
    ],
)
def test_when_memory_can_be_encoded(
    monkeypatch: pytest.MonkeyPatch, codec: str, cuda: bool, spec: Any, groups: int, why: str
) -> None:
    monkeypatch.setattr(rows.current_platform, "is_cpu", lambda: not cuda)
    monkeypatch.setattr(rows.current_platform, "is_cuda", lambda: cuda)
    config = CacheConfig(codecs={"dram": codec})
    arguments = (*configs(spec, groups=groups), config, list(range(groups)), 1)
    if why:
        with pytest.raises(ConfigError, match=why):
            rows.memory_form(*arguments)
    else:
        assert (rows.memory_form(*arguments) is None) is (codec == "raw")


def test_memory_and_what_is_below_it_are_not_both_encoded() -> None:
    config = CacheConfig(codecs={"dram": "int8", "nvme": "zstd"})
    with pytest.raises(ConfigError, match="codecs names dram and nvme"):
        rows.encodings(*configs(full()), config, [0], 1, 1, 1 << 20)
    assert rows.encodings(*configs(full()), CacheConfig(codecs={"dram": "int8"}), [0], 1, 1, 1 << 20) == {}
