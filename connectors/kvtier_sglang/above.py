"""What SGLang holds above the storage level: pages of device and host memory, as its own events tell."""

from __future__ import annotations

from typing import Any

TIER_OF_MEDIUM = {"GPU": "hbm", "CPU_PINNED": "dram", "CPU_TIER1": "dram", "CPU": "dram"}


class PagesAbove:
    """Which pages SGLang holds in which medium, by the hashes of its events. One thread writes, any may read counts."""

    def __init__(self) -> None:
        self._held: dict[str, set[int]] = {tier: set() for tier in TIER_OF_MEDIUM.values()}

    def take(self, event: Any) -> None:
        """One event. Events of other kinds or media change nothing."""
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            for pages in self._held.values():
                pages.clear()
            return
        medium = getattr(event, "medium", None) or "GPU"
        tier = TIER_OF_MEDIUM.get(str(getattr(medium, "value", medium)))  # SGLang gives an enum, or its value
        if tier is None:
            return
        if kind == "BlockStored":
            self._held[tier].update(event.block_hashes)
        elif kind == "BlockRemoved":
            self._held[tier].difference_update(event.block_hashes)

    def counts(self) -> dict[str, int]:
        """Pages held, by tier."""
        return {tier: len(pages) for tier, pages in self._held.items()}


listeners: list[PagesAbove] = []


def pages_above() -> dict[str, int]:
    """Pages held above the storage level, by tier, over all listeners of this process; empty without any."""
    total: dict[str, int] = {}
    for listener in listeners:
        for tier, pages in listener.counts().items():
            total[tier] = total.get(tier, 0) + pages
    return total
