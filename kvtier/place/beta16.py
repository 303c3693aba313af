"""Policy "beta16": evict the lowest posterior mean of the main paper's sixteen cells, least recent first within one.

The paper leaves ties open; with sixteen values they decide most evictions. LRU is the kindest choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.index.tree import Segment
from kvtier.model.request import BlockType, Outcome, RequestContext, Transition
from kvtier.place.draw import Key, draw_victims
from kvtier.place.lru import Recency, mirror_of
from kvtier.place.policy import TierView, Victim, register_policy
from kvtier.predict.beta16 import BetaCells
from kvtier.predict.forecast import Forecast


class Beta16Policy:
    """The baseline named after the paper. Not thread-safe: one control thread."""

    name = "beta16"

    def __init__(self, view: TierView) -> None:
        self._view = view
        self._cells = BetaCells()
        self._cell: dict[int, int] = {}
        self._recency = Recency(view.tree)
        self._residency = mirror_of(view)
        view.tree.listen(self)

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        self._recency.touch(path)
        for segment in path:
            held = self._residency.extent(segment.id)
            if held:
                self._cells.hit(self._cell.get(segment.id, 0), held)
            if held < segment.length:
                break
        for segment in path:
            self._cell[segment.id] = self._cells.cell(_type_of(segment, context), context.transition)

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        self._recency.touch(path)
        for segment in path:
            self._cell.setdefault(
                segment.id, self._cells.cell(BlockType.INTERMEDIATE_REASONING, Transition.REASONING_STEP)
            )

    def on_resident(self, segment: Segment, old_extent: int, now: float) -> None:
        self._residency.set_extent(segment, self._view.extent(segment))

    def on_evicted(self, segment: Segment, old_extent: int, now: float) -> None:
        extent = self._view.extent(segment)
        self._cells.evicted(self._cell.get(segment.id, 0), old_extent - extent)
        self._residency.set_extent(segment, extent)

    def on_create(self, segment: Segment) -> None:
        self._cell.pop(segment.id, None)

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        self._cell[head.id] = self._cell.get(tail.id, 0)

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        self._cell.pop(segment.id, None)

    def victims(self, rows: int, now: float) -> list[Victim]:
        return draw_victims(self._view, self._residency, self._worst_first(), self._key_of, rows)

    def _key_of(self, segment_id: int) -> Key:
        return (self._cells.mean(self._cell.get(segment_id, 0)), float(self._recency.used(segment_id)))

    def _worst_first(self) -> Iterator[tuple[Key, int]]:
        """All leaves in order. A baseline: it may sort them every time."""
        yield from sorted((self._key_of(i), i) for i in self._residency.leaves.tolist())


def _type_of(segment: Segment, context: RequestContext) -> BlockType:
    """The type of the role span that holds the segment's middle block; without roles, told from the structure."""
    middle = segment.depth + segment.length // 2
    for span in context.role_spans:
        if span.start_block <= middle < span.stop_block:
            return span.type
    return BlockType.SYSTEM_PROMPT if len(segment.children) > 1 else BlockType.UNKNOWN


def _make(view: TierView, forecast: Forecast | None) -> Beta16Policy:
    return Beta16Policy(view)


register_policy("beta16", _make)
