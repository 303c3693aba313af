"""Tiers that come and go while the engine runs.

A tier taken in is probed, recovered and put where its measured cost says. One that leaves is asked for nothing more at
once; what has begun may end, and only then is it closed: it can be opened and attached again with what it holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtier.cache.level import Level
from kvtier.errors import ConfigError
from kvtier.index.tree import PrefixTree
from kvtier.tiers.protocol import RecoveredRow, Tier

TYPICAL_BYTES = 1 << 20
"""Tiers are ordered by what reading so much costs."""


def by_cost(levels: Iterable[Level]) -> list[Level]:
    """Fastest first, by measured cost."""
    return sorted(levels, key=lambda level: level.health.read.seconds(TYPICAL_BYTES))


def build(tree: PrefixTree, make: Callable[[], Level]) -> Level:
    """Make a level, remembering what it has listen to the tree."""
    before = tree.listeners
    level = make()
    level.listeners = [listener for listener in tree.listeners if not any(listener is known for known in before)]
    return level


def pick(levels: list[Level], name: str) -> Level:
    """The attached level of this name. Raises ConfigError naming those there are."""
    for level in levels:
        if level.name == name:
            return level
    names = ", ".join(level.name for level in levels) or "none"
    raise ConfigError(f"no tier named {name!r} is attached; there are: {names}")


def refuse_twice(levels: Iterable[Level], name: str) -> None:
    """Raise ConfigError if a tier of this name is attached, or still on its way out."""
    if any(level.name == name for level in levels):
        raise ConfigError(f"a tier named {name!r} is attached, or still ending its last transfers; detach it first")


class Cleared:
    """Which tiers the last reset has reached. One that was out at the time still has what was to be forgotten."""

    def __init__(self) -> None:
        self._names: set[str] | None = None

    def reset(self, levels: Iterable[Level]) -> None:
        """These levels were cleared."""
        self._names = {level.name for level in levels}

    def keep(self, tier: Tier, rows: Sequence[RecoveredRow]) -> Sequence[RecoveredRow]:
        """What of a tier's recovered rows may be used: nothing from before a reset that it missed."""
        if self._names is None or tier.name in self._names:
            return rows
        self._names.add(tier.name)
        if rows:
            tier.release(np.array([slot for slot, _ in rows], np.int32))
        return []


class Leaving:
    """Levels that were detached and still have something under way. One control thread."""

    def __init__(self, tree: PrefixTree) -> None:
        self.levels: list[Level] = []
        self._tree = tree
        self._closing: list[threading.Thread] = []

    def add(self, level: Level) -> None:
        """A level leaves."""
        self.levels.append(level)

    def step(self, idle: Callable[[Level], bool]) -> None:
        """Close those on which nothing is under way any more. Their rows stay on the medium."""
        for level in [level for level in self.levels if idle(level)]:
            self.levels.remove(level)
            level.residency.clear()
            self._tree.unlisten(level.listeners)
            thread = threading.Thread(target=level.tier.close, name=f"kvtier-close-{level.name}", daemon=True)
            thread.start()
            self._closing.append(thread)

    def wait(self, name: str, step: Callable[[], None], wait_s: float) -> bool:
        """Repeat `step` until the level of this name has gone and its tier is closed. False after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while any(level.name == name for level in self.levels):
            if time.monotonic() > deadline:
                return False
            step()
            time.sleep(0.002)
        for thread in self._closing:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        return not self._closing
