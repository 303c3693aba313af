"""A request while the cache knows it: its chain, what it holds, and where its prompt tokens came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.cache.discovery import Question
from kvtier.cache.lease import Lease
from kvtier.model.keys import Chain, chain_length
from kvtier.model.request import MissReason, RequestContext
from kvtier.place.hints import Hint

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

    @property
    def waiting(self) -> bool:
        """Whether any offered block is still on its way."""
        return bool((self.states == BlockState.PENDING).any())


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
    pending: dict[tuple[int, int], int] = field(default_factory=dict)
    awaited: set[tuple[int, int]] = field(default_factory=set)
    promoted_from: dict[int, str] = field(default_factory=dict)
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

    @property
    def blocks(self) -> int:
        """Blocks named so far."""
        return chain_length(self.chain)
