"""Rotary position tables, as engines use them: channel i pairs with i + half, angle = position * frequency."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvtier.codec.arithmetic import Floats


@lru_cache(maxsize=4096)
def rope_tables(frequencies: tuple[float, ...], first: int, tokens: int) -> tuple[Floats, Floats]:
    """Cosine and sine [tokens, pairs] for positions first, first + 1, ...; computed in float64.

    Rotations add up: rotating by a then b is rotating by a + b, so a difference of positions moves a rotated key.
    Exact under any scaling that keeps the frequencies fixed (linear, YaRN, Llama 3), not under dynamic NTK.
    """
    angle = np.arange(first, first + tokens, dtype=np.float64)[:, None] * np.asarray(frequencies, dtype=np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
