"""Configuration: sizes as people write them, and one clear line for everything that is wrong."""

from __future__ import annotations

import pytest

from kvtier.config import CacheConfig, parse_bytes
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32GiB", 32 << 30),
        ("500 GB", 500 * 10**9),
        ("1.5k", 1500),
        ("7", 7),
        (7, 7),
        ("2TiB", 2 << 40),
        ("3MB", 3 * 10**6),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes("dram_bytes", text) == size


@pytest.mark.parametrize("text", ["", "much", "12 apples", "-1GiB", None, True, [1], "1e9", float("nan"), -5, "2EiB2"])
def test_what_is_not_a_size_is_named(text: object) -> None:
    with pytest.raises(ConfigError, match="dram_bytes"):
        parse_bytes("dram_bytes", text)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dram_byte": 1}, "did you mean dram_bytes"),
        ({"zzz": 1}, "known keys: .*dram_bytes"),
        ({"nvme_path": "/x"}, "nvme_path and nvme_bytes go together"),
        ({"nvme_bytes": 5}, "nvme_path and nvme_bytes go together"),
        ({"cxl_path": "auto"}, "cxl_path and cxl_bytes go together"),
        ({"io_threads": 1}, "io_threads is 1"),
        ({"io_threads": "four"}, "int"),
        ({"load_deadline_s": 0}, "load_deadline_s"),
        ({"chunk_bytes": "1GiB"}, "chunk_bytes"),
        ({"gate": 3}, "bool"),
        ({"dedup": {"pool": 2}}, "dedup names the tier 'pool'"),
        ({"dedup": {"nvme": 0.5}}, "dedup is 0.5"),
    ],
)
def test_bad_values_say_what_to_change(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        CacheConfig.from_mapping(values)
    assert "\n" not in str(caught.value)


def test_defaults_are_complete_and_few() -> None:
    config = CacheConfig.from_mapping({"dram_bytes": "1GiB"})
    assert config.dram_bytes == 1 << 30
    assert config.policy == "kvtier"
    assert config.gate
    # 40, and two promises that cost something and so are asked for: memory_checks and dedup.
    assert len(CacheConfig.__struct_fields__) <= 42
