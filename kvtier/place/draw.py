"""Naming victims leaf-first: candidates in order, parents joining them as soon as they are laid bare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Protocol

from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.policy import Victim
from kvtier.place.residency import Residency

Key = tuple[float, ...]  # order of eviction, the least first


class Holder(Protocol):
    """Whatever blocks are drawn from: a tier, or a shadow of one. See TierView."""

    tree: PrefixTree

    def extent(self, segment: Segment) -> int:
        """Leading blocks held."""
        ...

    def evictable_from(self, segment: Segment) -> int:
        """The smallest offset from which on every held block may go."""
        ...

    def rows(self, segment: Segment, start: int) -> int:
        """Rows held from offset `start` on."""
        ...


def draw_victims(
    holder: Holder,
    residency: Residency,
    candidates: Iterator[tuple[Key, int]],
    key_of: Callable[[int], Key],
    rows: int,
    at_first: Callable[[Segment], tuple[int, Key]] | None = None,
) -> list[Victim]:
    """Victims that together free at least `rows` rows, or all that may go. Changes nothing.

    `candidates` are held leaves, least key first; `key_of` gives the key of a parent that becomes a leaf. `at_first`
    may give an offset a segment should not be cut below at first, and the key with which it is then drawn again.
    """
    tree = holder.tree
    chosen: dict[int, Victim] = {}
    bare: list[tuple[Key, int]] = []
    taken: dict[int, int] = {}
    freed = 0
    front: tuple[Key, int] | None = None
    exhausted = False
    while freed < rows:
        if front is None and not exhausted:  # not sooner: the next candidate may be dear to find
            front = next(candidates, None)
            exhausted = front is None
        if bare and (front is None or bare[0] < front):
            _, i = heappop(bare)
        elif front is not None:
            _, i = front
            front = None
        else:
            break
        segment = tree.segment(i)
        before = chosen.get(i)
        extent = holder.extent(segment) if before is None else before.keep
        lowest = holder.evictable_from(segment)
        keep, again = lowest, None
        if at_first is not None and before is None:
            first, again = at_first(segment)
            keep = max(lowest, first)
        if keep >= extent:
            continue
        counted = 0 if before is None else holder.rows(segment, before.keep)
        victim = Victim(segment, _trim(holder, segment, keep, extent, rows - freed + counted))
        chosen[i] = victim
        freed += holder.rows(segment, victim.keep) - counted
        if victim.keep:
            if again is not None and keep > lowest and victim.keep == keep:
                heappush(bare, (again, i))
            continue
        parent = segment.parent
        if parent is not None and parent.parent is not None:
            taken[parent.id] = taken.get(parent.id, 0) + 1
            if taken[parent.id] == residency.held_children(parent.id):
                heappush(bare, (key_of(parent.id), parent.id))
    return list(chosen.values())


def _trim(holder: Holder, segment: Segment, keep: int, extent: int, rows: int) -> int:
    """Do not take more of one segment than is needed: the largest offset that still frees `rows`."""
    low, high = keep, extent - 1
    if holder.rows(segment, low) <= rows:
        return low
    if extent - rows > low and holder.rows(segment, extent - rows) == rows:  # one row a block
        return extent - rows
    while low < high:
        middle = (low + high + 1) // 2
        if holder.rows(segment, middle) >= rows:
            low = middle
        else:
            high = middle - 1
    return low
