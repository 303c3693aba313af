"""Whose bytes are they: both connectors give another key space for everything that makes a block's bytes others.

Without a server: the key space is made of the engine's own configuration, which a test can write down. Tenants and
adapters are in the engines' block hashes, and in `test_engine_contract.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvtier.config import CacheConfig
from kvtier.model.keys import KeySpace

DIFFERENCES = (
    "other weights",
    "another revision of the weights",
    "weights the operator names",
    "weights changed in place, so another epoch",
    "another dtype",
    "another block size",
    "another layout",
    "more ranks",
    "another position encoding",
)


def vllm_key_space(difference: str, monkeypatch: pytest.MonkeyPatch) -> KeySpace:
    """The key space of a vLLM that differs from the plain one in one way."""
    torch = pytest.importorskip("torch")
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvtier_vllm.identity import key_space_of, layout_of

    def if_it_is(name: str, other: Any, plain: Any) -> Any:
        return other if difference == name else plain

    dtype = if_it_is("another dtype", torch.float16, torch.bfloat16)
    heads = if_it_is("another layout", 4, 8)
    spec = FullAttentionSpec(
        block_size=if_it_is("another block size", 64, 32), num_kv_heads=heads, head_size=64, dtype=dtype
    )
    group = KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn" for i in range(4)], spec)
    ranks = if_it_is("more ranks", 2, 1)
    layout = layout_of(KVCacheConfig(10, [], [group]), 4 * spec.page_size_bytes * ranks, ranks, str(dtype))
    theta = if_it_is("another position encoding", 500_000.0, 10_000.0)
    model = SimpleNamespace(
        model=if_it_is("other weights", "org/other", "org/model"),
        revision=if_it_is("another revision of the weights", "v2", None),
        tokenizer="org/model",
        tokenizer_revision=None,
        hf_text_config=SimpleNamespace(rope_parameters={"rope_theta": theta}),
    )
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256", calculate_kv_scales=False)
    engine: Any = SimpleNamespace(
        model_config=model, cache_config=cache, parallel_config=SimpleNamespace(tensor_parallel_size=ranks)
    )
    return key_space_of(engine, layout, _operator(difference), 1)


def sglang_key_space(difference: str, monkeypatch: pytest.MonkeyPatch) -> KeySpace:
    """The key space of an SGLang that differs from the plain one in one way."""
    from kvtier_sglang import identity
    from kvtier_sglang.pages import HostPages
    from tests.unit.test_sglang_adapter import PAGE, Pool, Settings, StorageConfig

    settings = {
        "other weights": {"model_path": "org/other"},
        "another revision of the weights": {"revision": "v2"},
        "another position encoding": {"json_model_override_args": '{"rope_theta": 500000.0}'},
    }
    pool = Pool("page_first_direct" if difference == "another layout" else "page_first")
    if difference == "another dtype":
        pool.dtype = "bfloat16"
    layout = identity.layout_of(pool, HostPages(pool))
    if difference == "another block size":
        group = msgspec.structs.replace(layout.groups[0], block_tokens=2 * PAGE)
        layout = msgspec.structs.replace(layout, groups=(group,) * len(layout.groups))
    monkeypatch.setattr(identity, "server_settings", lambda: replace(Settings(), **settings.get(difference, {})))
    ranks = StorageConfig(tp_size=2) if difference == "more ranks" else StorageConfig()
    return identity.key_space_of(ranks, layout, _operator(difference))


def _operator(difference: str) -> CacheConfig:
    """What the operator configured."""
    options: dict[str, Any] = {
        "weights the operator names": {"weights_fingerprint": "mine"},
        "weights changed in place, so another epoch": {"epoch": 1},
    }.get(difference, {})
    return CacheConfig(**options)


KeySpaceOf = Callable[[str, pytest.MonkeyPatch], KeySpace]


@pytest.fixture(params=["sglang", "vllm"])
def key_space_of(request: pytest.FixtureRequest) -> KeySpaceOf:
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed in this environment")
    return {"sglang": sglang_key_space, "vllm": vllm_key_space}[request.param]


def test_the_same_engine_started_again_has_the_same_keys(
    key_space_of: KeySpaceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (key_space_of("", monkeypatch) for _ in range(2))
    block = [bytes(range(32))]
    assert first.digest == second.digest
    assert first.adopt(block) == second.adopt(block)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_other_bytes_have_other_keys(
    key_space_of: KeySpaceOf, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    """lmdeploy#4930, sglang#26670, sglang#26792, sglang#38362."""
    plain, other = key_space_of("", monkeypatch), key_space_of(difference, monkeypatch)
    block = [bytes(range(32))]
    assert plain.digest != other.digest
    assert plain.adopt(block) != other.adopt(block)
