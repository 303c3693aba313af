"""The questions to ask of one's own log before buying memory: what is shared, what comes back and when, and what each
capacity would be worth. Everything is in blocks; nothing here forecasts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np

from kvtier.errors import ConfigError
from kvtier.model.request import StopReason
from kvtier.sim.compiled import CompiledTrace, IntArray
from kvtier.sim.conversations import conversations
from kvtier.sim.lru_curve import LRUCurve
from kvtier.sim.replay import replay
from kvtier.sim.rivals import Belady
from kvtier.sim.traces import TraceRequest

DEPTH_EDGES = (0, 4, 16, 64, 256, 1024)
LRU_TARGETS = (0.3, 0.6, 0.9)
HOTTEST = 10


UNITS = {"": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("KMGTP", 1)}}
UNITS |= {"B": 1, **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGTP", 1)}}


def parse_tiers(text: str, block_bytes: int = 0) -> list[tuple[str, int]]:
    """Tiers from e.g. `hbm=240GiB,dram=1TiB` (with `block_bytes`) or `hbm=5000,dram=20000` (blocks).

    Raises ConfigError saying what is wrong.
    """
    tiers: list[tuple[str, int]] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        match = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)\s*([KMGTP]?i?B?)", part)
        if match is None or match[3] not in UNITS:
            raise ConfigError(f"tier {part!r} is not name=size, such as dram=1TiB, or dram=20000 for blocks")
        if match[3] and not block_bytes:
            raise ConfigError(f"tier {part!r} is in bytes; say how many a block has with --block-bytes")
        blocks = int(float(match[2]) * UNITS[match[3]] / (block_bytes if match[3] else 1))
        if not blocks:
            raise ConfigError(f"tier {part!r} has no room for one block")
        tiers.append((match[1], blocks))
    return tiers


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Where hits of an infinite cache come from."""

    shared_access_share: float  # accesses to blocks that more than one conversation uses
    hits_from_own_history: float  # share of all accesses
    hits_from_other_conversations: float


class DepthBand(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks at positions [start_block, stop_block) of their prompts; no stop means the rest."""

    start_block: int
    stop_block: int | None
    unique_blocks: int
    accesses: int
    reuse_share: float  # of all reuse in the trace


class HotSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks always used together."""

    depth_blocks: int
    length_blocks: int
    uses: int
    conversations: int
    reuse_share: float


class Returns(msgspec.Struct, frozen=True, kw_only=True):
    """When a conversation is back, from one arrival to the next, by how its last response ended."""

    stop_reason: str
    requests: int
    returned: float
    p10_s: float | None
    p50_s: float | None
    p90_s: float | None


class LRUTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity at which LRU has this share of the infinite cache's hits."""

    share: float
    capacity_blocks: int
    footprint_share: float


class TierWorth(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier adds to those above it."""

    tier: str
    blocks: int
    cumulative_blocks: int
    lru_hit_rate: float
    lru_gain: float  # hit rate it adds under LRU
    best_hit_rate: float  # the clairvoyant bound at the cumulative capacity
    saved_tokens_per_hour: float  # prompt tokens not recomputed thanks to this tier, under LRU


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvtier analyze --json` prints."""

    trace: str
    seed: int
    block_tokens: int
    requests: int
    conversations: int
    conversations_inferred: bool
    span_s: float
    blocks: int
    unique_blocks: int
    infinite_hit_rate: float
    mean_prompt_blocks: float
    sharing: Sharing
    depths: list[DepthBand]
    hottest: list[HotSegment]
    returns: list[Returns]
    lru_targets: list[LRUTarget]
    tiers: list[TierWorth]


def analyze(
    name: str,
    requests: Sequence[TraceRequest],
    *,
    seed: int,
    block_tokens: int,
    tiers: Sequence[tuple[str, int]] = (),
) -> Analysis:
    """Study a trace. `tiers` are (name, blocks), fastest first."""
    trace = CompiledTrace(requests)
    curve = LRUCurve(trace)
    owners = np.array(conversations(requests, trace), dtype=np.int64)
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    return Analysis(
        trace=name,
        seed=seed,
        block_tokens=block_tokens,
        requests=len(requests),
        conversations=int(owners.max(initial=-1)) + 1,
        conversations_inferred=not all(request.context.session_id for request in requests),
        span_s=span_s,
        blocks=trace.blocks,
        unique_blocks=trace.unique_blocks,
        infinite_hit_rate=_share(curve.best_hit_blocks, trace.blocks),
        mean_prompt_blocks=_share(trace.blocks, len(requests)),
        sharing=_sharing(trace, owners),
        depths=_depths(trace),
        hottest=_hottest(trace, owners),
        returns=_returns(requests, owners),
        lru_targets=[
            LRUTarget(
                share=share,
                capacity_blocks=curve.capacity_for(share),
                footprint_share=_share(curve.capacity_for(share), trace.unique_blocks),
            )
            for share in LRU_TARGETS
        ],
        tiers=_tiers(requests, trace, curve, tiers, block_tokens, span_s),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _users(trace: CompiledTrace, owners: IntArray) -> tuple[IntArray, IntArray]:
    """For each entry, 1 if it is its conversation's first use of the segment; and users by segment."""
    pairs = trace.segment * (int(owners.max(initial=0)) + 1) + owners[trace.request]
    first = np.zeros(pairs.size, dtype=np.int64)
    first[np.unique(pairs, return_index=True)[1]] = 1
    return first, np.bincount(trace.segment, weights=first, minlength=trace.length.size).astype(np.int64)


def _sharing(trace: CompiledTrace, owners: IntArray) -> Sharing:
    first, users = _users(trace, owners)
    length = trace.length[trace.segment]
    hit = trace.previous_use() >= 0
    return Sharing(
        shared_access_share=_share(float(length[users[trace.segment] > 1].sum()), trace.blocks),
        hits_from_own_history=_share(float(length[first == 0].sum()), trace.blocks),
        hits_from_other_conversations=_share(float(length[hit & (first == 1)].sum()), trace.blocks),
    )


def _uses(trace: CompiledTrace) -> IntArray:
    """Requests that use each segment."""
    return np.bincount(trace.segment, minlength=trace.length.size).astype(np.int64)


def _depths(trace: CompiledTrace) -> list[DepthBand]:
    uses, bands = _uses(trace), []
    reuse_all = int(((uses - 1).clip(0) * trace.length).sum())
    for start, stop in zip(DEPTH_EDGES, [*DEPTH_EDGES[1:], None], strict=True):
        end = trace.depth + trace.length
        inside = (end if stop is None else end.clip(None, stop)) - trace.depth.clip(start)
        inside = inside.clip(0)
        bands.append(
            DepthBand(
                start_block=start,
                stop_block=stop,
                unique_blocks=int(inside.sum()),
                accesses=int((inside * uses).sum()),
                reuse_share=_share(int((inside * (uses - 1).clip(0)).sum()), reuse_all),
            )
        )
    return bands


def _hottest(trace: CompiledTrace, owners: IntArray) -> list[HotSegment]:
    uses = _uses(trace)
    reuse = (uses - 1).clip(0) * trace.length
    _, users = _users(trace, owners)
    order = np.argsort(-reuse, kind="stable")[:HOTTEST]
    return [
        HotSegment(
            depth_blocks=int(trace.depth[i]),
            length_blocks=int(trace.length[i]),
            uses=int(uses[i]),
            conversations=int(users[i]),
            reuse_share=_share(int(reuse[i]), int(reuse.sum())),
        )
        for i in order.tolist()
        if reuse[i]
    ]


def _returns(requests: Sequence[TraceRequest], owners: IntArray) -> list[Returns]:
    gaps: dict[StopReason, list[float]] = {}
    counts: dict[StopReason, int] = {}
    pending: dict[int, TraceRequest] = {}
    for request, owner in zip(requests, owners.tolist(), strict=True):
        last = pending.get(owner)
        if last is not None:
            gaps.setdefault(last.outcome.stop_reason, []).append(request.arrival_s - last.arrival_s)
        pending[owner] = request
        counts[request.outcome.stop_reason] = counts.get(request.outcome.stop_reason, 0) + 1
    rows = []
    for reason in sorted(counts):
        seen = gaps.get(reason, [])
        p10, p50, p90 = np.percentile(seen, [10, 50, 90]).tolist() if seen else (None, None, None)
        rows.append(
            Returns(
                stop_reason=reason.name.lower(),
                requests=counts[reason],
                returned=_share(len(seen), counts[reason]),
                p10_s=p10,
                p50_s=p50,
                p90_s=p90,
            )
        )
    return rows


def _tiers(
    requests: Sequence[TraceRequest],
    trace: CompiledTrace,
    curve: LRUCurve,
    tiers: Sequence[tuple[str, int]],
    block_tokens: int,
    span_s: float,
) -> list[TierWorth]:
    rows, cumulative, above = [], 0, 0
    for name, blocks in tiers:
        cumulative += blocks
        hits = curve.hit_blocks(cumulative)
        best = replay(requests, lambda view: Belady(view, trace), cumulative, tree=trace.tree)
        rows.append(
            TierWorth(
                tier=name,
                blocks=blocks,
                cumulative_blocks=cumulative,
                lru_hit_rate=_share(hits, trace.blocks),
                lru_gain=_share(hits - above, trace.blocks),
                best_hit_rate=best.hit_rate,
                saved_tokens_per_hour=_share((hits - above) * block_tokens * 3600.0, span_s),
            )
        )
        above = hits
    return rows
