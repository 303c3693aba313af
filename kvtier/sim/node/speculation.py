"""What was brought up before anybody asked for it, and how much of that was used."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.index.tree import PrefixTree, Segment
from kvtier.sim.node.flight import Load


class Speculation:
    """A ledger of blocks in HBM, by segment. A TreeListener: make it before the tier's first eviction."""

    def __init__(self, tree: PrefixTree) -> None:
        self.moved_blocks = 0
        self.used_blocks = 0
        self._open: dict[int, tuple[int, int]] = {}  # depths [start, stop)
        tree.listen(self)

    @property
    def used_share(self) -> float | None:
        """Share of the moved blocks that were used; None if none were moved."""
        return self.used_blocks / self.moved_blocks if self.moved_blocks else None

    def moved(self, loads: Sequence[Load]) -> None:
        """Blocks are on their way."""
        for load in loads:
            self.moved_blocks += load.stop - load.start
            start, stop = self._open.get(load.segment.id, (load.start, load.stop))
            self._open[load.segment.id] = (min(start, load.start), max(stop, load.stop))

    def used(self, path: Sequence[Segment], stop: int) -> None:
        """A request uses the blocks before depth `stop` of a path."""
        if self._open:
            for segment in path:
                span = self._open.pop(segment.id, None)
                if span is not None:
                    self.used_blocks += max(0, min(stop, span[1]) - span[0])

    def evicted(self, segment: Segment, keep: int) -> None:
        """The blocks from offset `keep` on have left."""
        span = self._open.pop(segment.id, None)
        if span is not None and span[0] < segment.depth + keep:
            self._open[segment.id] = (span[0], min(span[1], segment.depth + keep))

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        span = self._open.pop(tail.id, None)
        if span is not None:
            if span[0] < head.stop:
                self._open[head.id] = (span[0], min(span[1], head.stop))
            if span[1] > head.stop:
                self._open[tail.id] = (max(span[0], head.stop), span[1])

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        return
