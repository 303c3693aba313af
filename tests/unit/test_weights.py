"""The weights' fingerprint: the same for the same content, another for anything else."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.cache.weights import weights_fingerprint


def folder(root: Path, name: str, weights: bytes, config: bytes = b"{}") -> str:
    path = root / name
    path.mkdir()
    (path / "config.json").write_bytes(config)
    (path / "model.safetensors").write_bytes(weights)
    return str(path)


def test_by_content_and_not_by_place_or_time(tmp_path: Path) -> None:
    weights = os.urandom(3 << 20)
    one, two = folder(tmp_path, "one", weights), folder(tmp_path, "two", weights)
    os.utime(Path(two) / "model.safetensors", (1, 1))
    assert weights_fingerprint(one, None) == weights_fingerprint(two, "ignored for folders")


def test_retrained_weights_of_the_same_size_are_others(tmp_path: Path) -> None:
    """sglang#26792: pages reused after the weights were updated in place."""
    weights = os.urandom(3 << 20)
    before = weights_fingerprint(folder(tmp_path, "before", weights), None)
    after = weights_fingerprint(folder(tmp_path, "after", os.urandom(3 << 20)), None)
    grown = weights_fingerprint(folder(tmp_path, "grown", weights + b"\0"), None)
    config = weights_fingerprint(folder(tmp_path, "config", weights, b'{"rope_theta": 2}'), None)
    assert len({before, after, grown, config}) == 4


def test_by_name_and_revision_for_a_hub_model() -> None:
    assert weights_fingerprint("org/model", None) == "org/model@main"
    assert weights_fingerprint("org/model", "abc") != weights_fingerprint("org/model", None)
