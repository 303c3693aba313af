"""The SGLang adapter without SGLang: configuration, pages of a host pool, key spaces, the version handshake."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError, EngineMismatchError
from kvtier.model.keys import KeySpace
from kvtier.tiers.open import Share
from kvtier_sglang import compat, identity, site
from kvtier_sglang.above import PagesAbove
from kvtier_sglang.options import cache_config
from kvtier_sglang.pages import HostPages

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
GIVEN = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KVTierStorage", "interface_v1": 1}


class Tensor:
    """As much of a torch tensor as the adapter touches, over numpy."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.array.flags["C_CONTIGUOUS"])


class Pool:
    """A host pool that names its pages as SGLang's do (mha.py and mla.py, get_page_buffer_meta)."""

    dtype = "float16"
    layer_num, head_num, head_dim, start_layer = LAYERS, HEADS, DIM, 0

    def __init__(self, layout: str, *, latent: bool = False, tokens: int = 32) -> None:
        self.layout, self.page_size, self.size, self.latent = layout, PAGE, tokens, latent
        halves = 1 if latent else 2
        shape = (LAYERS, tokens, HEADS, DIM) if layout == "layer_first" else (tokens, LAYERS, HEADS, DIM)
        self.memory = np.random.default_rng(0).integers(0, 2**16, (halves, *shape)).astype(np.uint16)
        self.kv_buffer = Tensor(self.memory)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        token = HEADS * DIM * 2
        half = self.memory[0].nbytes
        pointers, base = [], self.kv_buffer.data_ptr()
        halves = range(self.memory.shape[0])
        for index in np.asarray(indices).tolist()[::PAGE]:
            if self.layout == "layer_first":
                pointers += [
                    base + h * half + layer * self.size * token + index * token
                    for layer in range(LAYERS)
                    for h in halves
                ]
            else:
                pointers += [base + h * half + index * LAYERS * token for h in halves]
        size = PAGE * token * (1 if self.layout == "layer_first" else LAYERS)
        return pointers, [size] * len(pointers)

    def page(self, number: int) -> bytes:
        tokens = slice(number * PAGE, (number + 1) * PAGE)
        return (self.memory[:, :, tokens] if self.layout == "layer_first" else self.memory[:, tokens]).tobytes()


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_travel_bit_exact(layout: str, latent: bool) -> None:
    source, target = Pool(layout, latent=latent), Pool(layout, latent=latent)
    target.memory[:] = 0
    reader, writer = HostPages(source), HostPages(target)
    assert reader.groups * reader.row_bytes == len(source.page(0))
    there, here = np.arange(2 * PAGE, 5 * PAGE), np.arange(4 * PAGE, 7 * PAGE)
    rows = writer.to_write_to(here)
    for row, content in zip(rows, reader.to_read_from(there), strict=True):
        for piece, value in zip(row, content, strict=True):
            piece[:] = value
    writer.filled(here, rows, [True, False, True])
    assert target.page(4) == source.page(2)
    assert target.page(6) == source.page(4)
    if writer.staged:
        assert target.page(5) == bytes(len(target.page(5))), "a page that did not arrive is not touched"
    assert target.page(0) == target.page(7) == bytes(len(target.page(0)))


def test_the_page_first_layouts_are_not_copied() -> None:
    for layout in ("page_first", "page_first_direct"):
        pool = Pool(layout)
        pages = HostPages(pool)
        assert (pages.groups, pages.staged) == (2, False)
        pages.to_write_to(np.arange(PAGE))[0][0][:2] = b"\x01\x02"
        assert pool.page(0)[:2] == b"\x01\x02"
        assert pages.batches(1000) == [slice(0, 1000)]
    assert HostPages(Pool("layer_first")).staged


def test_a_page_outside_the_pool_is_refused() -> None:
    pool = Pool("page_first")
    with pytest.raises(EngineMismatchError, match="outside its own buffers"):
        HostPages(pool).to_read_from(np.arange(pool.size, pool.size + PAGE))


def test_a_pool_without_pages_is_refused() -> None:
    class Strange(Pool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            raise ValueError("Unsupported layout: page_head")

    with pytest.raises(EngineMismatchError, match="page_first"):
        HostPages(Strange("page_head"))


def test_configuration_is_checked_strictly(tmp_path: Any) -> None:
    nvme = {"nvme_path": str(tmp_path), "nvme_bytes": "1MiB"}
    assert cache_config({**GIVEN, **nvme, "prefetch_threshold": 16}).nvme_bytes == 1 << 20
    with pytest.raises(ConfigError, match="did you mean nvme_bytes"):
        cache_config({**GIVEN, **nvme, "nvme_byte": 1})
    with pytest.raises(ConfigError, match="interface_v1"):
        cache_config({**GIVEN, **nvme, "interface_v1": 0})
    with pytest.raises(ConfigError, match="hicache-size"):
        cache_config({**GIVEN, **nvme, "dram_bytes": "1GiB"})
    for key, value in (
        ("look_ahead", False),
        ("canary_share", 0.1),
        ("control", ":7077"),
    ):
        with pytest.raises(ConfigError, match=f"{key} has no effect under SGLang"):
            cache_config({**GIVEN, **nvme, key: value})
    assert cache_config({**GIVEN, **nvme, "look_ahead": True, "canary_share": 0.0}).look_ahead
    with pytest.raises(ConfigError, match="no tier"):
        cache_config(GIVEN)
    with pytest.raises(ConfigError):
        cache_config(None)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12.post1", "0.5.23", "0.5.23+cpu"])
def test_supported_versions_are_taken(version: str) -> None:
    assert compat.check_version(version) == version


@pytest.mark.parametrize("version", ["0.4.9", "0.5.8", "0.5.24", "0.6.0", "1.0", "main"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(EngineMismatchError, match=r"0\.5\.9 to 0\.5\.23"):
        compat.check_version(version)


@dataclass
class StorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str = "m"
    should_split_heads: bool = False
    tp_lcm_size: int | None = None


@dataclass
class Settings:
    model_path: str = "org/model"
    revision: str | None = None
    kv_cache_dtype: str = "auto"
    served_model_name: str = "m"
    json_model_override_args: str = "{}"
    speculative_algorithm: str | None = None


def digest(
    config: StorageConfig | SimpleNamespace,
    settings: Settings,
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> bytes:
    monkeypatch.setattr(identity, "server_settings", lambda: settings)
    layout = identity.layout_of(pool, HostPages(pool))
    return identity.key_space_of(config, layout, CacheConfig(**options)).digest


def test_every_part_of_the_identity_changes_the_key_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """lmdeploy#4930, sglang#26670, sglang#38362: dtype, layout, ranks and weights are in the key."""
    config, settings, pool = StorageConfig(), Settings(), Pool("page_first")
    other_dtype, other_page = Pool("page_first"), Pool("page_first")
    other_dtype.dtype = "bfloat16"
    other_page.page_size = 2 * PAGE
    monkeypatch.setattr(other_page, "get_page_buffer_meta", Pool("page_first").get_page_buffer_meta)
    other_page.kv_buffer = other_page.get_page_buffer_meta.__self__.kv_buffer  # type: ignore[attr-defined]
    spaces = [
        digest(config, settings, pool, monkeypatch),
        digest(config, settings, other_dtype, monkeypatch),
        digest(config, settings, other_page, monkeypatch),
        digest(config, settings, Pool("page_first_direct"), monkeypatch),
        digest(config, settings, Pool("layer_first"), monkeypatch),
        digest(config, settings, Pool("page_first", latent=True), monkeypatch),
        digest(config, settings, pool, monkeypatch, epoch=1),
        digest(config, settings, pool, monkeypatch, weights_fingerprint="mine"),
        *(
            digest(replace(config, **change), settings, pool, monkeypatch)
            for change in (
                {"tp_size": 2},
                {"tp_rank": 1, "tp_size": 2},
                {"pp_size": 2},
                {"attn_cp_rank": 1, "attn_cp_size": 2},
                {"model_name": "m#fp4"},
                {"should_split_heads": True, "tp_lcm_size": 4},
            )
        ),
        *(
            digest(config, replace(settings, **change), pool, monkeypatch)
            for change in (
                {"model_path": "org/other"},
                {"revision": "v2"},
                {"kv_cache_dtype": "fp8_e4m3"},
                {"json_model_override_args": '{"rope": 2}'},
                {"speculative_algorithm": "EAGLE"},
            )
        ),
    ]
    assert len(set(spaces)) == len(spaces)


def test_what_does_not_change_the_bytes_does_not_change_the_key_space(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("page_first", latent=True)
    latent = StorageConfig(is_mla_model=True, tp_size=2)
    named = Settings(served_model_name="public name")
    assert digest(latent, Settings(), pool, monkeypatch) == digest(
        replace(latent, tp_rank=1), Settings(), pool, monkeypatch
    ), "latent pages are the same on every tensor-parallel rank"
    assert digest(latent, Settings(), pool, monkeypatch) == digest(
        replace(latent, model_name="public name"), named, pool, monkeypatch
    )


def test_latent_pages_on_several_ranks_need_shared_tiers_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the first rank writes them: a tier of one process would show nothing to the others."""
    monkeypatch.setattr(site, "server_settings", lambda: None)
    space = KeySpace(weights="w", kv_dtype="f", block_tokens=16, layout="l")
    latent = StorageConfig(is_mla_model=True, tp_size=2, tp_rank=1)
    shared = {"shared_fs_path": str(tmp_path), "shared_fs_bytes": 1 << 30}
    found = site.site_of(CacheConfig(**shared), latent, space, "l", 4096)
    assert found.share == Share(2, "rank-0-0-0-1")
    own = CacheConfig(**shared, nvme_path=str(tmp_path), nvme_bytes=1 << 30)
    with pytest.raises(EngineMismatchError, match=r"a tier of one process \(nvme\) .* configure shared tiers only"):
        site.site_of(own, latent, space, "l", 4096)


def test_an_old_version_s_configuration_is_read_tolerantly(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.9 has neither context-parallel fields nor tp_lcm_size, and its process may have no settings to read."""

    class Old:
        tp_rank, tp_size, pp_rank, pp_size, is_mla_model, model_name = 0, 1, 0, 1, False, "org/model"

    pool = Pool("page_first")
    monkeypatch.setattr(identity, "server_settings", lambda: None)
    layout = identity.layout_of(pool, HostPages(pool))
    assert identity.key_space_of(Old(), layout, CacheConfig()).weights == "org/model@main"


def test_weights_changed_under_the_server_change_the_key_space(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("page_first")
    monkeypatch.setattr(identity, "server_settings", lambda: Settings())
    space = identity.key_space_of(StorageConfig(), identity.layout_of(pool, HostPages(pool)), CacheConfig())
    first, second = identity.updated_weights(space, "step-1"), identity.updated_weights(space, "step-2")
    assert len({space.digest, first.digest, second.digest}) == 3
    assert identity.updated_weights(space, "step-1").digest == first.digest


def test_pages_above_follow_the_events() -> None:
    @dataclass
    class BlockStored:
        block_hashes: list[int]
        medium: object = None

    @dataclass
    class BlockRemoved(BlockStored):
        pass

    class AllBlocksCleared:
        pass

    class StorageMedium(str, Enum):  # noqa: UP042 - the kind under test
        """As SGLang writes it: its str() is not its value."""

        GPU = "GPU"

    above = PagesAbove()
    above.take(BlockStored([1, 2, 3], StorageMedium.GPU))
    above.take(BlockStored([1, 2], "CPU_PINNED"))
    above.take(BlockStored([9], "DISK"))
    above.take(BlockRemoved([3, 4], "GPU"))
    assert above.counts() == {"hbm": 2, "dram": 2}
    above.take(AllBlocksCleared())
    assert above.counts() == {"hbm": 0, "dram": 0}


# The fields of HiCacheStorageConfig and their defaults, as the wheels of these versions define them.
_FIRST = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "is_mla_model": False, "model_name": "m"}
_FIRST |= {"is_page_first_layout": True, "extra_config": None}
_NEXT = {"attn_cp_rank": 0, "attn_cp_size": 1, "enable_storage_metrics": False}
_NEXT |= {"tp_lcm_size": None, "should_split_heads": False}
_LATEST = {"dp_rank": 0, "dcp_size": 1, "dcp_rank": 0, "logical_page_size": None}
CONFIG_OF = {
    "0.5.9": _FIRST,
    "0.5.12.post1": _FIRST | _NEXT,
    "0.5.18": _FIRST | _NEXT,
    "0.5.23": _FIRST | _NEXT | _LATEST,
}


@pytest.mark.parametrize("version", CONFIG_OF)
def test_every_version_s_configuration_object_gives_keys(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older version does not say is what it cannot do: one rank. So an upgrade keeps what is stored."""
    config = SimpleNamespace(**CONFIG_OF[version])
    here = digest(config, Settings(), Pool("page_first"), monkeypatch)
    latest = digest(SimpleNamespace(**CONFIG_OF["0.5.23"]), Settings(), Pool("page_first"), monkeypatch)
    assert here == latest
    config.tp_rank, config.tp_size = 1, 2
    assert digest(config, Settings(), Pool("page_first"), monkeypatch) != here
