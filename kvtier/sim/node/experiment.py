"""A grid of node replays: hardware × seeds × variants, each against the native-style cache on the same requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvtier.errors import ConfigError
from kvtier.model.request import StopReason
from kvtier.place.prices import Prices
from kvtier.sim.analysis import parse_tiers
from kvtier.sim.experiment import Progress, RequestSource, Silent
from kvtier.sim.node.arrivals import plan, reference_load
from kvtier.sim.node.hardware import Hardware
from kvtier.sim.node.hints import Announcer
from kvtier.sim.node.node import Node
from kvtier.sim.node.score import Score
from kvtier.sim.node.variants import VARIANTS, Variant
from kvtier.sim.traces import TraceRequest

TIERS = ("hbm", "dram", "nvme")
WARM_UP_SHARE = 0.25  # of the requests, by arrival, that are served and not scored


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `kvtier replay --tiers … --json`. Times of requests after the warm-up; bytes and cost of all."""

    trace: str
    variant: str
    hardware: str
    seed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ratio_to_native: float
    hit_share: dict[str, float]
    bytes: dict[str, int]
    speculative_used_share: float | None
    nvme_written_bytes: int
    usd_per_mtok: float


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for a whole grid."""

    block_tokens: int = 512
    tiers: str = ""  # sizes that override the hardware's
    load: float = 0.0  # 0: the reference load of the trace on the hardware
    announcer: Announcer = Announcer()
    prices: Prices | None = None


def tier_blocks(hardware: Hardware, setting: Setting) -> dict[str, int]:
    """Sizes of the tiers in blocks. Raises ConfigError if they cannot be replayed."""
    block_bytes = round(hardware.block_bytes * setting.block_tokens / hardware.block_tokens)
    text = setting.tiers or ",".join(f"{name}={size}" for name, size in hardware.tiers.items())
    blocks = dict(parse_tiers(text, block_bytes))
    unknown = [name for name in blocks if name not in TIERS]
    if unknown or "hbm" not in blocks or ("nvme" in blocks and "dram" not in blocks):
        raise ConfigError(
            f"tiers {text!r}: give hbm, and if there are any below it dram, and below that nvme; no others"
        )
    return blocks


def serve(
    requests: Sequence[TraceRequest],
    hardware: Hardware,
    variant: Variant,
    seed: int,
    setting: Setting,
    *,
    drawn_starts: bool = False,
) -> tuple[Node, Score]:
    """Replay requests on a node of their own. `drawn_starts`: when sessions begin was drawn, not recorded."""
    blocks = tier_blocks(hardware, setting)
    load = setting.load
    if not load:
        recorded = not drawn_starts
        load = reference_load(requests, hardware.compute, blocks["hbm"], setting.block_tokens, recorded)
    score = Score(int(WARM_UP_SHARE * len(requests)))
    node = Node(
        hardware,
        variant,
        blocks,
        block_tokens=setting.block_tokens,
        score=score,
        seed=seed,
        announcer=setting.announcer,
        tools_known=any(request.outcome.stop_reason is StopReason.TOOL_USE for request in requests),
    )
    node.run(plan(requests, load, seed))
    if not score.ttft_s:
        raise ConfigError(f"no request fits into the HBM of {hardware.name}; give it more with --tiers")
    return node, score


def make_row(trace: str, node: Node, score: Score, seed: int, native_mean_s: float, setting: Setting) -> NodeRow:
    """What a run comes to."""
    ttft_s = np.array(score.ttft_s)
    p50, p95, p99 = (float(value) for value in np.percentile(ttft_s, [50, 95, 99]))
    blocks = max(1, sum(score.blocks.values()))
    return NodeRow(
        trace=trace,
        variant=node.variant.name,
        hardware=node.hardware.name,
        seed=seed,
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=p50,
        ttft_p95_s=p95,
        ttft_p99_s=p99,
        ratio_to_native=float(ttft_s.mean()) / native_mean_s,
        hit_share={name: count / blocks for name, count in score.blocks.items()},
        bytes={link.name: round(sum(link.moved_bytes)) for link in node.links},
        speculative_used_share=node.speculation.used_share,
        nvme_written_bytes=round(sum(node.nvme_write.moved_bytes)),
        usd_per_mtok=usd_per_mtok(node, score, setting.prices or Prices(gpus=node.hardware.gpus)),
    )


def usd_per_mtok(node: Node, score: Score, prices: Prices) -> float:
    """What a million tokens cost: GPU time spent on prefill, rent of the tiers for as long as the run took, wear.
    Decoding is left out: it costs every variant the same."""
    seconds = score.latest_s
    sizes = {tier.name: float(tier.capacity_rows * node.block_bytes) for tier in node.tiers}
    written = {"nvme": sum(node.nvme_write.moved_bytes), "dram": sum(node.d2h.moved_bytes)}
    tiers = prices.serving(seconds, sizes, written) - prices.compute(seconds)
    return (tiers + prices.compute(node.gpu.busy_s)) / score.tokens * 1e6 if score.tokens else float("inf")


def run_grid(
    source: RequestSource,
    hardware: Sequence[Hardware],
    variants: Sequence[Variant],
    seeds: Sequence[int],
    setting: Setting,
    progress: Progress | None = None,
) -> Iterator[NodeRow]:
    """Rows in order of hardware, seed, variant, each as soon as it is measured. Native is replayed for the ratio
    whether asked for or not."""
    told = progress or Silent()
    native = VARIANTS["native"]
    for point in hardware:
        for seed in seeds:
            requests = source.requests(seed)
            mean_s = 0.0
            for variant in (native, *(v for v in variants if v != native)):
                told.begin(f"{source.name} {point.name} {variant.name} seed {seed}", len(requests))
                node, score = serve(requests, point, variant, seed, setting, drawn_starts=source.seeded)
                if variant == native:
                    mean_s = float(np.mean(score.ttft_s))
                told.advance(len(requests))
                if variant in variants:
                    yield make_row(source.name, node, score, seed, mean_s, setting)
