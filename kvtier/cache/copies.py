"""Copies between an engine's own pages and a tier, carried by the mover while the caller waits, but not for ever.

The caller's pages may be reused as soon as its call returns. A tier that hangs must not touch them after that, so the
mover moves bytes through buffers of its own, and a copy given up takes the pages away from it (`Transfer.pages`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.mover import Mover
from kvtier.cache.paths import Run
from kvtier.cache.transfer import Transfer, Urgency
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.protocol import RowId, RowStatus

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Buffers = Sequence[Sequence[memoryview]]
"""For every block of a call, one contiguous buffer a group."""

_LET_GO_S = 60.0
"""More than copying one call's bytes can take: all that giving up has to wait for."""


@dataclass(slots=True, eq=False)
class Copy:
    """Rows of one run on their way to or from a level. `at[i]` is the block of the call row i belongs to.

    `lease` keeps the rows where they are until the copy has landed; `generation` is the cache's when it began. A copy
    given up (`abandoned`) lands when the tier lets go of it, without its caller.
    """

    level: Level
    run: Run
    at: npt.NDArray[np.intp]
    groups: npt.NDArray[np.intp]
    transfer: Transfer
    lease: Lease | None
    generation: int
    abandoned: bool = False

    @classmethod
    def of(
        cls, level: Level, run: Run, rows: Mask, slots: Slots, buffers: Buffers, read: bool, generation: int
    ) -> Copy:
        """A copy of the rows marked in `rows` (blocks of the run, groups), which are in `slots`."""
        blocks, groups = np.nonzero(rows)
        pairs = list(zip(blocks.tolist(), groups.tolist(), strict=True))
        ids = [run.row_id(block, group) for block, group in pairs]
        views = [buffers[run.start + block][group] for block, group in pairs]
        urgency = Urgency.DEMAND if read else Urgency.STORE
        copy = cls(
            level,
            run,
            blocks + run.start,
            groups,
            Transfer(level.tier, slots, ids, views, read, urgency, pages=InFlight()),
            level.book.take(slots, "a copy") if read else None,
            generation,
        )
        copy.transfer.tag = copy
        return copy

    @property
    def slots(self) -> Slots:
        """Where the rows are in the tier."""
        return self.transfer.slots

    @property
    def rows(self) -> Sequence[RowId]:
        """What they are."""
        return self.transfer.rows

    @property
    def statuses(self) -> list[RowStatus]:
        """How they ended; CLOSED for those that have not."""
        return self.transfer.statuses

    @property
    def ok(self) -> Mask:
        """Which rows arrived."""
        return np.array([status is RowStatus.OK for status in self.statuses], np.bool_)


def carry(mover: Mover, copies: Sequence[Copy], deadline_s: float) -> list[Copy]:
    """Move rows and wait for them until `deadline_s` (of time.monotonic). Returns the copies that did not end by then:
    what of them has not begun is cancelled, and none of them touches the caller's pages any more."""
    for copy in copies:
        copy.level.health.sent()
        mover.submit(copy.transfer)
    late = [c for c in copies if not c.transfer.done.wait(max(0.0, deadline_s - time.monotonic()))]
    for copy in late:
        mover.cancel(copy.transfer)
        assert copy.transfer.pages is not None
        copy.transfer.pages.close(_LET_GO_S)
    return [copy for copy in late if not copy.transfer.done.is_set()]
