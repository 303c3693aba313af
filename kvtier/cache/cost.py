"""What a tier costs: seconds = latency + bytes / rate for one direction, probed at start and kept current.

The last few calls of every size (by powers of two) are kept, so that a thousand small ones cannot push out what one
large one said. Where they differ enough in size both terms are fitted, by least squares of relative errors; where they
do not, the probed curve is stretched by the median of what was seen.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_KEPT_PER_SIZE = 8
_LEAST_SPAN = 4.0
_LEAST_CALLS = 3


class CostCurve:
    """One direction of one tier. `probed_s` and the fit both say seconds for a number of bytes. One control thread."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._probed = (latency_s, 1.0 / bytes_per_s)
        self._now = self._probed
        self._kept: dict[int, deque[tuple[int, float]]] = {}
        self._stale = False

    def observe(self, n_bytes: int, seconds: float) -> None:
        """A call moved `n_bytes` in `seconds`."""
        if n_bytes > 0 and seconds > 0:
            kept = self._kept.setdefault(n_bytes.bit_length(), deque(maxlen=_KEPT_PER_SIZE))
            kept.append((n_bytes, seconds))
            self._stale = True

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte."""
        return self._current()[0]

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second after that."""
        return 1.0 / max(self._current()[1], 1e-15)

    def seconds(self, n_bytes: float) -> float:
        """What a call of `n_bytes` costs now."""
        latency_s, per_byte = self._current()
        return latency_s + n_bytes * per_byte

    def probed_s(self, n_bytes: float) -> float:
        """What it cost when the tier was probed."""
        return self._probed[0] + n_bytes * self._probed[1]

    def _current(self) -> tuple[float, float]:
        if self._stale:
            self._stale = False
            calls = np.array([call for kept in self._kept.values() for call in kept])
            if len(calls) >= _LEAST_CALLS:
                self._now = self._fit(calls[:, 0], calls[:, 1])
        return self._now

    def _fit(self, sizes: Floats, seconds: Floats) -> tuple[float, float]:
        if sizes.max() >= _LEAST_SPAN * sizes.min():
            columns = np.stack([1.0 / seconds, sizes / seconds], axis=1)
            latency_s, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
            if latency_s >= 0 and per_byte > 0:
                return float(latency_s), float(per_byte)
            if latency_s < 0:
                return 0.0, float(np.median(seconds / sizes))
        expected = self._probed[0] + sizes * self._probed[1]
        if not np.isfinite(expected).all():
            return 0.0, float(np.median(seconds / sizes))
        stretch = float(np.median(seconds / expected))
        return self._probed[0] * stretch, self._probed[1] * stretch
