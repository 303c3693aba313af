"""How fast memory is copied into and out of: the probe of tiers that are memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.tiers.protocol import TierProbe

_SMALL_BYTES = 64
_PROBE_S = 0.02


def measure_copies(memory: npt.NDArray[np.uint8]) -> TierProbe:
    """The cost of copying from `memory` to ordinary memory, and back. What `memory` holds is undefined afterwards."""
    ordinary = np.ones(len(memory), dtype=np.uint8)
    read_small_s, read_rate = _curve(ordinary, memory)
    write_small_s, write_rate = _curve(memory, ordinary)
    return TierProbe(read_small_s, read_rate, write_small_s, write_rate)


def _curve(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> tuple[float, float]:
    small_s = _fastest(lambda: np.copyto(target[:_SMALL_BYTES], source[:_SMALL_BYTES]))
    large_s = _fastest(lambda: np.copyto(target, source))
    return small_s, len(target) / max(large_s - small_s, large_s / 10)


def _fastest(call: Callable[[], object]) -> float:
    """The fastest of some runs, in seconds."""
    fastest, deadline_s = float("inf"), time.perf_counter() + _PROBE_S
    while True:
        begin_s = time.perf_counter()
        call()
        end_s = time.perf_counter()
        fastest = min(fastest, end_s - begin_s)
        if end_s > deadline_s:
            return fastest
