"""The eviction interface: what a policy sees of a tier and what it answers.

One policy object serves one tier. It is told of arrivals, finishes and residency, and names victims when room is
needed. Production and the simulator drive the same objects; they differ only in the clock and in who moves bytes.

All calls come from the one control thread. Times are seconds of the cache's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.errors import ConfigError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import Outcome, RequestContext
from kvtier.predict.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Victim:
    """Evict the blocks of `segment` from `keep` on (offsets within the segment)."""

    segment: Segment
    keep: int


class TierView(Protocol):
    """What a policy may see of the tier it serves. Residency is leaf-first: a segment's resident blocks are its first
    `extent` ones, and a segment has a resident child only if it is wholly resident."""

    name: str
    tree: PrefixTree

    @property
    def capacity_rows(self) -> int:
        """Rows the tier can hold; a block occupies one row for each KV-cache group that stored it."""
        ...

    @property
    def resident_rows(self) -> int:
        """Rows now held."""
        ...

    def extent(self, segment: Segment) -> int:
        """Leading blocks of `segment` resident in this tier."""
        ...

    def evictable_from(self, segment: Segment) -> int:
        """The smallest offset from which on every resident block may be evicted now (not leased, not in flight).
        Equals `extent` when nothing may go."""
        ...

    def rows(self, segment: Segment, start: int) -> int:
        """Rows held by the resident blocks of `segment` from offset `start` on."""
        ...

    def leaves(self) -> Iterable[Segment]:
        """Segments with resident blocks and no resident child: the only ones whose tail may go. Do not change
        residency while iterating."""
        ...


class EvictionPolicy(Protocol):
    """Orders what leaves a tier. Also a TreeListener if it keeps state by segment (registered by its factory)."""

    name: str

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        """A request arrived whose prompt is `path` (whole segments; new ones are in the tree already)."""
        ...

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        """The request ended; `path` now includes what it generated. Its forecast starts here."""
        ...

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        """Blocks of `segment` became resident in this tier: its extent grew from `old_extent`."""
        ...

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        """Blocks of `segment` left this tier: its extent shrank from `old_extent` (for whatever reason)."""
        ...

    def victims(self, rows: int, now: float) -> list[Victim]:
        """Name victims that together free at least `rows` rows, least worth first, leaf-first: children before their
        parent, each cut not below `evictable_from`. Names fewer if no more may go. Changes nothing: eviction is
        reported back through `on_evicted`."""
        ...


PolicyFactory = Callable[[TierView, Forecast | None], EvictionPolicy]

_registry: dict[str, PolicyFactory] = {}


def register_policy(name: str, factory: PolicyFactory) -> None:
    """Make a policy selectable by name. Raises ConfigError if the name is taken by another factory."""
    if _registry.setdefault(name, factory) is not factory:
        raise ConfigError(f"an eviction policy named {name!r} is registered already")


def policy_names() -> list[str]:
    """Selectable policies, sorted."""
    return sorted(_registry)


def make_policy(name: str, view: TierView, forecast: Forecast | None = None) -> EvictionPolicy:
    """Build the named policy for one tier. Raises ConfigError naming what exists.

    `forecast` is the cache's own when several tiers share one; the caller then tells it of every request, before the
    policies. Without it a policy that needs one makes its own and feeds it.
    """
    if name not in _registry:
        raise ConfigError(f"no eviction policy named {name!r}; choose one of {', '.join(policy_names())}")
    return _registry[name](view, forecast)
