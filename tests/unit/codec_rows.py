"""Made-up models and rows for the codec tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.codec.arithmetic import NumpyArithmetic
from kvtier.codec.cachegen import BINS
from kvtier.codec.calibration import Calibration, Gate
from kvtier.codec.form import RowForm
from kvtier.codec.range_coder import normalised

SMALL = RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="lhtkd")


def calibration_of(form: RowForm, seed: int = 0, **changes: Any) -> Calibration:
    """A calibration that fits `form`, made of seeded noise."""
    rng = np.random.default_rng(seed)
    shape = (form.layers, 2, form.heads)
    fields: dict[str, Any] = {
        "model": f"model-{seed}",
        "text": "text",
        "layers": form.layers,
        "heads": form.heads,
        "head_dim": form.head_dim,
        "inverse_frequencies": tuple(float(1e4 ** (-2 * i / form.head_dim)) for i in range(form.head_dim // 2)),
        "key_means": rng.normal(size=(form.layers, form.heads, form.head_dim)).astype("<f2").tobytes(),
        "sensitivity": {
            name: rng.gamma(0.3, 1, size=shape).astype("<f4").tobytes() for name in ("loo", "local", "ema")
        },
        "gates": {"d4": Gate(1e-3, 4.5), "d3": Gate(5e-2, 3.5)},
        "tables": normalised(np.ones((*shape, form.head_dim, BINS), np.int64)).astype("<u2").tobytes(),
    }
    return Calibration(**(fields | changes))


def values_of(form: RowForm, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Numbers [layers, parts, heads, tokens, head_dim] with channels of very different size and mean."""
    rng = np.random.default_rng(seed)
    size = (form.layers, form.parts, form.heads, 1, form.head_dim)
    spread, mean = rng.gamma(1.0, 1.0, size=size), rng.normal(size=size) * 2
    noise = rng.normal(size=(form.layers, form.parts, form.heads, form.tokens, form.head_dim))
    return ((noise * spread + mean) * scale).astype(np.float32)


def row_of(form: RowForm, seed: int = 0, scale: float = 1.0) -> memoryview:
    """A row with `values_of` in it; opaque rows are noise."""
    row = np.random.default_rng(seed).integers(0, 256, form.row_bytes, dtype=np.uint8)
    if form.kind != "opaque":
        NumpyArithmetic().store(values_of(form, seed, scale), form.numbers(row), form.dtype)
    return row.data


def numbers_in(form: RowForm, row: memoryview) -> np.ndarray:
    """The row as float32 [layers, parts, heads, tokens, head_dim]."""
    return NumpyArithmetic().load(form.numbers(row), form.dtype)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Root of the squared error over that of the values."""
    return float(np.sqrt(np.square(got - want).sum() / np.square(want).sum()))
