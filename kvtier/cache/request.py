"""A request while the cache knows it: its chain, what it holds, and where its prompt tokens came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cache.discovery import Question
from kvtier.cache.lease import Lease
from kvtier.index.residency import ABSENT
from kvtier.model.keys import Chain, chain_length
from kvtier.model.request import MissReason, RequestContext
from kvtier.place.hints import Hint

if TYPE_CHECKING:
    from kvtier.cache.promoting import Promotion

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
Slots = npt.NDArray[np.int32]
States = npt.NDArray[np.uint8]


class BlockState(IntEnum):
    """What a lookup says of one block of one group."""

    MISS = 0
    HIT = 1
    PENDING = 2


@dataclass(slots=True)
class LoadPlan:
    """The answer to one lookup: states of blocks [start, start + len(states)), by group.

    `blocks` is how many of them the gate offers; those after it are a miss. Valid while `epoch` is the cache's.
    """

    start: int
    blocks: int
    states: States
    epoch: int
    packed: bytes = b""
    """`states`, row after row: an engine that asks for each of ten thousand rows gets no cheaper answer."""

    def __post_init__(self) -> None:
        self.packed = self.states.tobytes()

    @property
    def waiting(self) -> bool:
        """Whether any offered block is still on its way."""
        return BlockState.PENDING in self.packed

    def prefix(self, block: int, group: int, most: int) -> int | None:
        """How many blocks from `block` on it offers in a row, up to `most`. None: one of them is still on its way."""
        offset = block - self.start
        states = self.states[offset : min(offset + most, self.blocks), group] if offset >= 0 else self.states[:0, 0]
        misses = np.flatnonzero(states == BlockState.MISS)
        offered = int(misses[0]) if misses.size else len(states)
        return None if (states[:offered] == BlockState.PENDING).any() else offered


@dataclass(slots=True, eq=False)
class CachedRequest:
    """Owned by TierCache; connectors hold it between calls and touch nothing in it."""

    context: RequestContext
    chain: Chain
    known_blocks: int
    hold: Lease | None = None
    load: Lease | None = None
    plan: LoadPlan | None = None
    # The gate's answer stands until the load was taken or the request starts over: no second thoughts while waiting.
    limit_blocks: int | None = None
    wait_began_s: float | None = None
    deadline_s: float | None = None
    refuses_to_wait: bool = False
    # What shared tiers were asked for this request and have not answered, and how long it waits for that.
    asking: list[Question] = field(default_factory=list)
    asked_s: float = 0.0
    pending: Slots = field(default_factory=lambda: np.full((0, 1), ABSENT, np.int32))  # granted, not yet written
    awaited: set[Promotion] = field(default_factory=set)
    coming: Mask = field(default_factory=lambda: np.zeros(0, np.bool_))  # rows on their way for it
    promoted_from: dict[str, Mask] = field(default_factory=dict)  # blocks that were not in memory, by tier
    failed: dict[int, MissReason] = field(default_factory=dict)
    declined: int = 0
    cut_reason: MissReason | None = None
    sources: dict[str, int] | None = None
    miss_from_block: int = 0
    asked: bool = False  # by the engine, after it was looked ahead for
    waited: bool = False  # for a load, at least once
    hints: list[Hint] = field(default_factory=list)  # hold from its end on
    canary: bool = False
    compared: set[tuple[int, int]] = field(default_factory=set)  # rows computed to be compared
    started: bool = False
    finished: bool = False
    ended: bool = False

    def waits_no_more(self) -> None:
        """What it waited for is not for it any more."""
        self.awaited.clear()
        self.coming[:] = False

    def expects(self, rows: Mask) -> None:
        """These rows (from block 0 on) are on their way for it, too."""
        if not len(rows):  # a prompt without a full block
            return
        self.coming = _grown(self.coming, rows)
        self.coming[: len(rows)] |= rows

    def grant(self, blocks: Indices, groups: Indices, slots: Slots, n_groups: int) -> None:
        """The engine writes these rows, and into which slots."""
        need = int(blocks.max()) + 1 if len(blocks) else 0
        if need > len(self.pending):
            room = np.full((max(need, self.blocks), n_groups), ABSENT, np.int32)
            if len(self.pending):
                room[: len(self.pending)] = self.pending
            self.pending = room
        self.pending[blocks, groups] = slots

    def take_granted(self, blocks: Indices, groups: Indices) -> Slots:
        """The slots of rows granted, which are not pending any more; -1 for rows that were not."""
        slots = np.full(len(blocks), ABSENT, np.int32)
        known = blocks < len(self.pending)
        at = blocks[known], groups[known]
        slots[known] = self.pending[at]
        self.pending[at] = ABSENT
        return slots

    def is_granted(self, block: int, group: int) -> bool:
        """Whether the engine writes this row now."""
        return block < len(self.pending) and bool(self.pending[block, group] != ABSENT)

    @property
    def writes(self) -> bool:
        """Whether the engine was granted rows it has not written yet."""
        return bool((self.pending != ABSENT).any())

    def arrived(self, promotion: Promotion) -> None:
        """What it waited for has arrived, or failed to."""
        self.awaited.discard(promotion)
        if len(self.coming):
            known = promotion.blocks < len(self.coming)
            self.coming[promotion.blocks[known], promotion.groups[known]] = False

    def comes_from(self, tier: str, blocks: Indices) -> None:
        """These blocks are being read from a tier for it."""
        read = np.zeros(self.blocks, np.bool_)
        read[blocks] = True
        for other, mask in self.promoted_from.items():
            if other != tier:
                mask &= ~read[: len(mask)]
        before = self.promoted_from.get(tier, read)
        self.promoted_from[tier] = _grown(before, read) | _grown(read, before)

    def promoted(self, blocks: Indices) -> dict[str, int]:
        """How many of these blocks came from which tier below memory."""
        counts = {
            tier: int(np.count_nonzero(mask[blocks[blocks < len(mask)]])) for tier, mask in self.promoted_from.items()
        }
        return {tier: count for tier, count in counts.items() if count}

    @property
    def blocks(self) -> int:
        """Blocks named so far."""
        return chain_length(self.chain)


def _grown(mask: Mask, to: Mask) -> Mask:
    """`mask`, with room for as many blocks as `to` has."""
    if len(mask) >= len(to):
        return mask
    return np.concatenate([mask.reshape(-1, *to.shape[1:]), np.zeros_like(to[len(mask) :])])
