"""How far a load can reach: the last boundary up to which everything the engine needs is available, and what that is.

Groups of whole prefixes need every block before the boundary; sliding windows only the last few.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class Groups(Protocol):
    """Which groups need whole prefixes, and the windows (group, blocks) of the others."""

    closed_groups: tuple[int, ...]
    window_groups: tuple[tuple[int, int], ...]


def reach(groups: Groups, available: Mask, start: int) -> int:
    """The furthest boundary up to which everything needed is `available` (blocks, groups). The device may have blocks,
    generated ones, of which the tree has not heard: `start` itself then."""
    stop = max(start, len(available))
    for group in groups.closed_groups:
        holes = np.flatnonzero(~available[start:stop, group])
        stop = start + int(holes[0]) if holes.size else stop
    if not groups.window_groups:
        return stop
    while stop > start:
        before = stop
        for group, window in groups.window_groups:
            stop = _window_boundary(available[:, group], start, stop, window)
        if stop == before:
            return stop
    return start


def needed_rows(groups: Groups, available: Mask, start: int, stop: int) -> Mask:
    """Rows a load of [start, stop) takes: every closed group's, and the windows before the boundary."""
    needed = np.zeros_like(available)
    for group in groups.closed_groups:
        needed[start:stop, group] = True
    for group, window in groups.window_groups:
        # One block more: the engine's own window may end one block before ours.
        needed[max(start, stop - window - 1) : stop, group] = True
    return needed & available


def _window_boundary(available: Mask, start: int, stop: int, window: int) -> int:
    """The last boundary ≤ stop whose `window` blocks before it (or all from `start` on) are available."""
    ok = available[start:stop]
    run = np.arange(1, len(ok) + 1)
    last_hole = np.maximum.accumulate(np.where(ok, 0, run))
    length = run - last_hole
    good = np.flatnonzero(length >= np.minimum(run, window))
    return start + int(good[-1]) + 1 if good.size else start
