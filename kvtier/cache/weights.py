"""Names a model's weights, so that bytes computed with others are never found."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Protocol

_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10
_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".gguf"})


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def weights_fingerprint(model: str, revision: str | None) -> str:
    """By content for a local folder (size and samples of every weight file), by name and revision otherwise."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256(b"kvtier.weights\0")
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    for path in [folder / "config.json", *files]:
        if path.exists():
            digest.update(path.name.encode() + b"\0")
            sample(path, digest)
    return digest.hexdigest()


def sample(path: Path, digest: _Hash) -> None:
    """Add a file's size and evenly spread samples of its content to a digest. Raises OSError."""
    size = path.stat().st_size
    digest.update(struct.pack("<Q", size))
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
