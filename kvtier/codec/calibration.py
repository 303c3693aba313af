"""What was measured on a model, once and offline, and is needed to encode its KV well.

One JSON file per model. Everything that changes how bytes are decoded is part of `digest`, which every encoded row
carries: bytes written under another calibration are foreign, never decoded.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

SCHEMA = 1
SENSITIVITY_SOURCES = ("loo", "local", "ema", "uniform")


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a codec cost on the calibration text: mean KL to the unencoded cache in nats a token, bits an element."""

    kl_mean: float
    bits_per_element: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Measurements of one model. Arrays are little-endian bytes (base64 in the file), see the accessors.

    `model` is the fingerprint of its weights and config, `text` that of what it was measured on. `inverse_frequencies`
    are the rotary ones, one per pair of channels. `sensitivity` maps a source ("loo", "local", "ema") to float32
    [layers, 2, heads]; `key_means` is float16 [layers, heads, head_dim], the mean key before rotation. `tables` are
    the symbol frequencies of the entropy coder, uint16 [layers, 2, heads, head_dim, symbols].
    """

    model: str
    text: str
    layers: int
    heads: int
    head_dim: int
    inverse_frequencies: tuple[float, ...]
    key_means: bytes
    sensitivity: dict[str, bytes]
    gates: dict[str, Gate] = {}
    tables: bytes = b""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ConfigError(f"calibration has schema {self.schema}; this code reads {SCHEMA}: run kvtier calibrate")
        if len(self.inverse_frequencies) * 2 > self.head_dim:
            raise ConfigError("calibration: more rotary frequencies than pairs of channels")
        if len(self.key_means) != 2 * self.layers * self.heads * self.head_dim:
            raise ConfigError("calibration: key_means does not have layers * heads * head_dim values")
        for name, data in self.sensitivity.items():
            if name not in SENSITIVITY_SOURCES or len(data) != 4 * self.layers * 2 * self.heads:
                raise ConfigError(f"calibration: sensitivity {name!r} does not have layers * 2 * heads values")
        if self.tables and len(self.tables) % (2 * 2 * self.layers * self.heads * self.head_dim):
            raise ConfigError("calibration: tables does not have whole rows of symbols")

    @property
    def means(self) -> npt.NDArray[np.float32]:
        """Mean key before rotation, [layers, heads, head_dim]."""
        flat = np.frombuffer(self.key_means, dtype="<f2").astype(np.float32)
        return flat.reshape(self.layers, self.heads, self.head_dim)

    def sensitivities(self, source: str) -> npt.NDArray[np.float64]:
        """Sensitivity [layers, 2, heads] by source. Raises ConfigError if it was not measured."""
        if source not in self.sensitivity:
            known = ", ".join(sorted(self.sensitivity)) or "none"
            raise ConfigError(f"the calibration has no sensitivity {source!r} (it has: {known}); run kvtier calibrate")
        flat = np.frombuffer(self.sensitivity[source], dtype="<f4").astype(np.float64)
        return flat.reshape(self.layers, 2, self.heads)

    @property
    def frequency_tables(self) -> npt.NDArray[np.uint16]:
        """Symbol frequencies [layers, 2, heads, head_dim, symbols]. Raises ConfigError if none were counted."""
        if not self.tables:
            raise ConfigError("the calibration has no symbol frequencies; the cachegen codec needs kvtier calibrate")
        return np.frombuffer(self.tables, dtype="<u2").reshape(self.layers, 2, self.heads, self.head_dim, -1)

    @property
    def digest(self) -> bytes:
        """16 bytes naming what decoding depends on: model, sizes, rope, means. Not the gates; maps and
        tables have their own digests."""
        h = hashlib.sha256(b"kvtier.calibration\0")
        sizes = (self.schema, self.model, self.layers, self.heads, self.head_dim, self.inverse_frequencies)
        h.update(msgspec.json.encode(sizes) + b"\0" + self.key_means)
        return h.digest()[:16]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        draft = path.with_name(path.name + ".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        draft.rename(path)


def load_calibration(path: Path, model: str | None = None) -> Calibration:
    """Read a calibration. Raises ConfigError if it cannot be read or is of another model than `model`."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"calibration {path}: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"calibration {path}: {error}") from error
    if model is not None and calibration.model != model:
        raise ConfigError(
            f"calibration {path} is of model {calibration.model[:16]}, this is {model[:16]}; run kvtier calibrate"
        )
    return calibration


def calibration_path(fingerprint: str) -> Path:
    """Where a model's calibration is kept unless the user says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvtier" / "calibration" / f"{fingerprint[:32]}.json"


def model_fingerprint(path: Path) -> str:
    """sha256 over a model's config and weights: their names, sizes and first and last megabyte."""
    digest = hashlib.sha256(b"kvtier.model\0")
    found = [*path.glob("config.json"), *sorted(path.glob("*.safetensors"))]
    if not found:
        raise ConfigError(f"{path}: neither config.json nor *.safetensors in it")
    for file in found:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()
