"""How much memory of each kind is worth its price, by one's own trace.

For every size of DRAM and NVMe behind a given HBM: hits by the exact LRU curve, seconds of prefill they save less the
seconds their load takes, at the price of the GPUs, less the rent of the tiers and the wear of what is written down.
The least cost of a million prompt tokens is the advice. A steady-state estimate without queues: `kvtier replay --tiers`
says what the sizes do to times to the first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvtier.errors import ConfigError
from kvtier.place.prices import MTOK, Prices
from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.lru_curve import LRUCurve
from kvtier.sim.node.hardware import Hardware
from kvtier.sim.traces.records import TraceRequest

_SIZES = 40


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of sizes and what it costs."""

    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int
    nvme_bytes: int
    hit_rate: float
    prefill_s_saved_per_hour: float
    tiers_usd_per_hour: float
    usd_per_mtok: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest sizes, beside no lower tiers at all. `gpu_share` is the prefill load without lower tiers."""

    hardware: str
    hbm_blocks: int
    gpu_share: float
    without: Sizes
    best: Sizes


def advise(
    requests: Sequence[TraceRequest], hardware: Hardware, prices: Prices, hbm_blocks: int, block_tokens: int
) -> Advice:
    """Sizes of DRAM and NVMe that make prompts cheapest. Raises ConfigError for a trace that spans no time."""
    trace = CompiledTrace(requests)
    curve = LRUCurve(trace)
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0 or not trace.blocks:
        raise ConfigError("advice needs a trace with arrival times that span some time")
    block_bytes = hardware.block_bytes * block_tokens / hardware.block_tokens
    mean_tokens = trace.blocks * block_tokens / len(requests)
    recompute_s = hardware.compute.prefill_s(0, mean_tokens) / mean_tokens * block_tokens
    links = hardware.links
    dram_s = block_bytes / links.h2d.bytes_per_s
    nvme_s = max(dram_s, block_bytes / links.nvme_read.bytes_per_s)
    gpu_per_s = prices.compute(1.0)
    prompt_tokens = trace.blocks * block_tokens

    def cost(dram: int, nvme: int) -> Sizes:
        top = curve.hit_blocks(hbm_blocks)
        in_dram = curve.hit_blocks(hbm_blocks + dram) - top
        in_nvme = curve.hit_blocks(hbm_blocks + dram + nvme) - top - in_dram
        # A load slower than recomputing is declined: it saves nothing and costs nothing.
        saved_s = in_dram * max(0.0, recompute_s - dram_s) + in_nvme * max(0.0, recompute_s - nvme_s)
        written = (trace.blocks - curve.best_hit_blocks) * block_bytes if nvme else 0.0
        held = {"dram": dram * block_bytes, "nvme": nvme * block_bytes}
        rent = sum(prices.of(name).rent(n_bytes, span_s) for name, n_bytes in held.items())
        rent += prices.of("nvme").wear(written)
        compute_s = (trace.blocks - top) * recompute_s - saved_s
        return Sizes(
            dram_blocks=dram,
            dram_bytes=int(dram * block_bytes),
            nvme_blocks=nvme,
            nvme_bytes=int(nvme * block_bytes),
            hit_rate=(top + in_dram + in_nvme) / trace.blocks,
            prefill_s_saved_per_hour=saved_s * 3600.0 / span_s,
            tiers_usd_per_hour=rent * 3600.0 / span_s,
            usd_per_mtok=(compute_s * gpu_per_s + rent) / prompt_tokens * MTOK,
        )

    sizes = _sizes(trace.unique_blocks)
    choices = [cost(dram, nvme) for dram in sizes for nvme in sizes if dram + nvme <= 2 * trace.unique_blocks]
    without = cost(0, 0)
    gpu_share = (trace.blocks - curve.hit_blocks(hbm_blocks)) * recompute_s / span_s
    best = min(choices, key=lambda s: (s.usd_per_mtok, s.dram_blocks + s.nvme_blocks))
    return Advice(hardware=hardware.name, hbm_blocks=hbm_blocks, gpu_share=gpu_share, without=without, best=best)


def _sizes(footprint: int) -> list[int]:
    """0, and sizes up to the footprint, each about a fifth larger than the one before."""
    least = max(1.0, footprint / math.pow(1.2, _SIZES))
    grid = np.geomspace(least, max(1, footprint), _SIZES)
    return [0, *sorted({round(size) for size in grid})]
