"""Small nodes and hand-made sessions for tests of the multi-tier replay."""

from __future__ import annotations

import msgspec

from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.sim.node.arrivals import Session
from kvtier.sim.node.hardware import Compute, Hardware, Links, LinkSpeed
from kvtier.sim.node.hints import Announcer
from kvtier.sim.node.node import Node
from kvtier.sim.node.score import Score
from kvtier.sim.node.variants import VARIANTS, Variant
from kvtier.sim.traces import TraceRequest
from kvtier.sim.traces.chains import pack

BLOCK_TOKENS = 100
BLOCK_BYTES = 1 << 20


def hardware(
    *, h2d: float = 100.0, d2h: float = 100.0, nvme_read: float = 20.0, nvme_write: float = 10.0, prefill: float = 10.0
) -> Hardware:
    """Speeds in blocks a second."""
    speed = {
        name: LinkSpeed(blocks * BLOCK_BYTES)
        for name, blocks in (("h2d", h2d), ("d2h", d2h), ("nvme_read", nvme_read), ("nvme_write", nvme_write))
    }
    compute = Compute(prefill_tokens_per_s=prefill * BLOCK_TOKENS, decode_tokens_per_s=50.0)
    return Hardware(
        name="small",
        block_bytes=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        compute=compute,
        links=Links(**speed),
        tiers={},
    )


def request(
    blocks: list[int],
    at_s: float = 0.0,
    *,
    session: str = "",
    output_tokens: int = 0,
    stop: StopReason = StopReason.UNKNOWN,
) -> TraceRequest:
    """A prompt of these blocks (ids unique by prefix)."""
    return TraceRequest(
        chain=pack(blocks),
        context=RequestContext(
            request_id=f"{session}@{at_s}:{blocks[-1]}",
            arrival_s=at_s,
            prompt_tokens=len(blocks) * BLOCK_TOKENS,
            session_id=session,
        ),
        outcome=Outcome(finished_s=at_s, output_tokens=output_tokens, stop_reason=stop),
    )


def opened(name: str, *requests: TraceRequest) -> Session:
    """A session whose requests come when they say."""
    session = Session(name, closed=False)
    session.requests = list(requests)
    session.at_s = [r.arrival_s for r in requests]
    session.pauses_s = [0.0] * len(requests)
    return session


def node(
    variant: str | Variant = "kvtier",
    *,
    hbm: int = 20,
    dram: int = 40,
    nvme: int = 200,
    on: Hardware | None = None,
    announcer: Announcer | None = None,
    **changes: object,
) -> tuple[Node, Score]:
    """A small node, its parts changed as said."""
    base = VARIANTS[variant] if isinstance(variant, str) else variant
    score = Score(0)
    made = Node(
        on or hardware(),
        msgspec.structs.replace(base, **changes),
        {"hbm": hbm, "dram": dram, "nvme": nvme},
        block_tokens=BLOCK_TOKENS,
        score=score,
        announcer=announcer,
    )
    return made, score
