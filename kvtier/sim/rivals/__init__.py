"""Policies to be measured against: one a file, with the verbs of `place.policy.EvictionPolicy`, for replay only."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.place.policy import EvictionPolicy, TierView
from kvtier.sim.rivals.arc import ARC
from kvtier.sim.rivals.belady import Belady
from kvtier.sim.rivals.ema import ExactEMA
from kvtier.sim.rivals.lfu import AgedLFU
from kvtier.sim.rivals.s3fifo import S3FIFO

# Belady is not here: it needs the future. See `experiment.run_one`.
RIVALS: dict[str, Callable[[TierView], EvictionPolicy]] = {
    "arc": ARC,
    "ema": ExactEMA,
    "lfu": AgedLFU,
    "s3fifo": S3FIFO,
}

__all__ = ["ARC", "RIVALS", "S3FIFO", "AgedLFU", "Belady", "ExactEMA"]
