"""The version handshake with vLLM: what was proven is accepted, everything else is refused by name."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvtier.errors import EngineMismatchError
from kvtier_vllm.compat import check_version


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev3+cu130"])
def test_supported(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.3.2", "dev", ""])
def test_refused_with_both_versions_in_the_message(version: str) -> None:
    with pytest.raises(EngineMismatchError, match=r"vLLM 0\.32 to 0\.33"):
        check_version(version)


def test_the_entry_point_is_declared() -> None:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert {entry.value for entry in entries if entry.name == "kvtier"} == {"kvtier_vllm.plugin:register"}
