"""The prefetch window: how much to have under way around the position a prompt resumes at, and in which order.

This is what "RoPE-aware prefetch" can honestly mean. Keys are position-dependent, so only the very blocks of the
prefix are of use, and which of them are needed first depends on the layer: a sliding-window layer reads the window
before the resume position (and the sinks, where a model has them), nearest first; a dense layer reads everything, so
only the order matters, and that is from the start. The window adapts as TCP does: some more for every load that came
too late, half of it when what was fetched went unused.
"""

from __future__ import annotations

import msgspec


class WindowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in blocks."""

    first: int = 64
    least: int = 8
    most: int = 4096
    add: int = 16
    """Added for a load that was late."""
    shrink: float = 0.5
    """What is left when more than `waste` of the blocks fetched went unused."""
    waste: float = 0.25


class PrefetchWindow:
    """AIMD over lateness and waste. Not thread-safe."""

    def __init__(self, limits: WindowLimits | None = None) -> None:
        self.limits = limits or WindowLimits()
        self.blocks = self.limits.first

    def settled(self, late: bool, used_blocks: int, fetched_blocks: int) -> None:
        """A prefetch is over: whether its request had to wait for it, and how much of it was used."""
        limits = self.limits
        if fetched_blocks and fetched_blocks - used_blocks > limits.waste * fetched_blocks:
            self.blocks = max(limits.least, int(self.blocks * limits.shrink))
        elif late:
            self.blocks = min(limits.most, self.blocks + limits.add)


def load_order(start: int, resume: int, window: int | None = None, sinks: int = 0) -> list[int]:
    """Blocks of [start, resume) in the order they are needed by one kind of layer, and no others.

    `window` is the layer's window in blocks, None for a dense layer; `sinks` leading blocks it reads always.
    """
    if window is None:
        return list(range(start, resume))
    first = max(start, resume - window)
    head = [block for block in range(start, min(sinks, resume)) if block < first]
    return head + list(range(resume - 1, first - 1, -1))
