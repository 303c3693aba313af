"""Tiers that come and go while the engine runs.

A tier taken in is recovered and probed before anybody needs it, then put where its measured cost says. One that leaves
is asked for nothing more at once; what has begun may end, and only then is it closed: it can be opened and attached
again with what it holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import isfinite
from typing import NamedTuple

from kvtier.cache.level import Level
from kvtier.cache.tier_health import ON_TRIAL
from kvtier.errors import ConfigError, TierError, TierIOError
from kvtier.index.tree import PrefixTree
from kvtier.observe.metrics import Recorder
from kvtier.tiers.protocol import RecoveredRow, Tier, TierProbe

logger = logging.getLogger(__name__)

TYPICAL_BYTES = 1 << 20
"""Tiers are ordered by what reading so much costs."""
ARRIVAL_S, ARRIVAL_ROW_S = 4.0, 10e-6
"""How long the start of an engine waits for a tier that was opened, and for each row it may hold."""


class Found:
    """Rows a tier brought, by what they build on. To sort a million of them takes a second: not under a lock."""

    def __init__(self, rows: Iterable[RecoveredRow], groups: int) -> None:
        """`groups` are there; a row of another one, or of a key and group seen before, is in `extra`."""
        self.slots: dict[bytes, dict[int, int]] = {}
        self.children: dict[bytes, list[bytes]] = defaultdict(list)
        self.extra: list[int] = []
        for slot, row in rows:
            held = self.slots.get(row.key)
            if held is None:
                held = self.slots[row.key] = {}
                self.children[row.parent].append(row.key)
            if row.group in held or row.group >= groups:
                self.extra.append(slot)
            else:
                held[row.group] = slot


class Arrival(NamedTuple):
    """A tier that was asked, outside every lock, for what it holds and what it costs. No `probe`: it does not say."""

    tier: Tier
    found: Found
    probe: TierProbe | None
    capacity_rows: int

    @property
    def cost(self) -> TierProbe:
        """What the tier is taken to cost."""
        return self.probe or ON_TRIAL

    @staticmethod
    def of(tier: Tier, groups: int) -> Arrival:
        """Ask. Blocks on the medium. Raises TierError if nothing can be said of what the tier holds; one whose cost
        cannot be measured is taken in on trial."""
        found = Found(tier.recover(), groups)
        try:
            probe: TierProbe | None = tier.probe()
        except TierError:
            probe = None
        if probe is not None and not isfinite(probe.read_latency_s + probe.write_latency_s):
            probe = None
        return Arrival(tier, found, probe, tier.stats().capacity_rows)


def arrivals(tiers: Iterable[Tier], recorder: Recorder, groups: int) -> list[Arrival]:
    """The tiers of a start that answer. One that fails or hangs costs itself, not the engine: it is counted, left out,
    and closed. One after the other, so that none is measured while another one is busy."""
    found = []
    for tier in tiers:
        outcome = _asked(tier, groups, ARRIVAL_S + ARRIVAL_ROW_S * tier.stats().capacity_rows)
        if isinstance(outcome, Arrival):
            found.append(outcome)
        else:
            recorder.add("kvtier_faults", 1, tier.name, outcome)
            logger.error("kvtier starts without its %s tier: %s", tier.name, outcome)
    return found


def _asked(tier: Tier, groups: int, limit_s: float) -> Arrival | str:
    """The tier's arrival, or why there is none. Whoever comes too late is closed by its own thread."""
    lock, ended, late = threading.Lock(), threading.Event(), False
    outcome: list[Arrival | Exception] = []

    def ask() -> None:
        try:
            outcome.append(Arrival.of(tier, groups))
        except OSError as error:
            outcome.append(TierIOError(str(error)))
        except Exception as error:  # noqa: BLE001 - thread boundary: counted, or raised again, by who asked
            outcome.append(error)
        failed = not isinstance(outcome[0], Arrival)
        if failed:
            tier.close()
        with lock:
            ended.set()
        if late and not failed:
            tier.close()

    threading.Thread(target=ask, name=f"kvtier-arrive-{tier.name}", daemon=True).start()
    ended.wait(limit_s)
    with lock:
        late = not ended.is_set()
    if late:
        return "stall"
    if isinstance(outcome[0], TierError):
        return outcome[0].reason
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


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

    def missed(self, name: str) -> bool:
        """Whether a tier that comes in now holds what was to be forgotten. It is asked once."""
        if self._names is None or name in self._names:
            return False
        self._names.add(name)
        return True


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
