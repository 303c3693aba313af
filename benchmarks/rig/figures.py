"""Samples and what is said of them: median, range, count."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Samples:
    """Measurements of one quantity, over documents and rounds."""

    values: list[float] = field(default_factory=list)

    def add(self, values: Iterable[float]) -> None:
        self.values.extend(values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, float | int] | None:
        if not self.values:
            return None
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "n": len(self.values)}

    def text(self, digits: int) -> str:
        """`median [min–max]`, or a dash where nothing was measured."""
        if not self.values:
            return "–"
        low, high = min(self.values), max(self.values)
        spread = f" [{low:.{digits}f}–{high:.{digits}f}]" if len(self.values) > 1 else ""
        return f"{self.median:.{digits}f}{spread}"


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def load() -> float:
    """The machine's load of the last minute: figures taken at different loads must not be compared."""
    return os.getloadavg()[0]
