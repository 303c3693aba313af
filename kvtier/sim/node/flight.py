"""A request under way, from its arrival to its last token, and the blocks on their way to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.index.tree import Segment
from kvtier.sim.node.arrivals import Session
from kvtier.sim.node.links import Job, Link, Priority
from kvtier.sim.node.tier import NodeTier
from kvtier.sim.traces import TraceRequest

LATE_S = 1e-3  # what is left of a load that should have landed: any moment


@dataclass(slots=True, eq=False)
class Load:
    """Blocks [start, stop) of a path, all in one segment, on their way into a tier. Depths count from the root, so that
    splits of the segment do not matter: it keeps its last blocks, and what is cut off is its parent."""

    tier: NodeTier
    segment: Segment
    start: int
    stop: int
    priority: Priority
    expected_s: float = 0.0
    done: bool = False
    jobs: list[tuple[Link, Job]] = field(default_factory=list)
    after: Load | None = None  # what it waits for in another tier
    behind: Link | None = None  # what it will have to queue for
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Flight:
    """Mutable state of one request; owned by the node."""

    index: int
    session: Session
    position: int
    arrived_s: float
    request: TraceRequest
    prompt_tokens: int
    output_blocks: int
    cut: int = 0  # leading blocks that are not computed: resident, or loaded for it
    from_hbm: int = 0
    from_dram: int = 0
    from_nvme: int = 0
    declined: int = 0  # blocks some tier had and the gate would not load
    loads: list[Load] = field(default_factory=list)
    loads_left: int = 0
    loaded_s: float = 0.0
    compute_s: float = 0.0
    started_s: float = 0.0
    load_left_at_start_s: float = 0.0
    admitted_s: float = 0.0
    stalled: bool = False
    protected: bool = False

    @property
    def chain(self) -> bytes:
        return self.request.chain

    @property
    def blocks(self) -> int:
        """Whole blocks of the prompt."""
        return self.request.blocks

    def load_left_s(self, now: float) -> float:
        """Seconds until the last block it waits for is expected; 0 when all are there."""
        if not self.loads_left:
            return 0.0
        left = LATE_S
        for load in self.loads:
            if not load.done:
                left = max(left, load.expected_s - now, load.behind.backlog_s() if load.behind is not None else 0.0)
        return left
