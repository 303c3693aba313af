"""`kvtier replay --tiers`: a whole node in virtual time, its links and queues included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kvtier.sim.node.experiment import NodeRow, Setting


def replay_tiers(
    traces: Sequence[str],
    trace_format: str,
    *,
    setting: Setting,
    hardware: str,
    variant: str,
    seed: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay traces on hardware points, a row for each variant and seed."""
    import msgspec

    from kvtier.cli.progress import ReplayProgress
    from kvtier.errors import ConfigError
    from kvtier.sim.experiment import parse_seeds
    from kvtier.sim.node.experiment import run_grid, tier_blocks
    from kvtier.sim.node.hardware import load_hardware
    from kvtier.sim.node.plot import plot_ttft
    from kvtier.sim.node.variants import parse_variants
    from kvtier.sim.plot import require_plot
    from kvtier.sim.sources import open_source

    points = [load_hardware(name.strip()) for name in hardware.split(",") if name.strip()]
    if not points:
        raise ConfigError("no hardware given")
    variants, seeds = parse_variants(variant), parse_seeds(seed)
    for point in points:
        tier_blocks(point, setting)
    if plot is not None:
        require_plot(plot)
    rows: list[NodeRow] = []
    for source in [open_source(text, trace_format, setting.block_tokens) for text in traces]:
        replays = len(points) * len(seeds) * len({"native", *(v.name for v in variants)})
        with ReplayProgress(replays) as progress:
            for row in run_grid(source, points, variants, seeds, setting, progress):
                rows.append(row)
                if as_json:
                    typer.echo(msgspec.json.encode(row))
    if not as_json:
        _print_table(rows)
    if plot is not None:
        plot_ttft(rows, plot)


def _print_table(rows: Sequence[NodeRow]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    for trace, hardware in dict.fromkeys((row.trace, row.hardware) for row in rows):
        caption = "ms to the first token, ratio of means to native; hits in % of blocks"
        # Whole figures in 80 columns, which is what a pipe has.
        table = Table(title=f"{trace} on {hardware}", caption=caption, box=SIMPLE_HEAD, padding=0)
        for column in ("seed", "variant", "mean", "ratio", "p50", "p95", "p99", "hbm", "dram", "nvme", "$/Mtok"):
            table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
        for row in (row for row in rows if (row.trace, row.hardware) == (trace, hardware)):
            table.add_row(
                str(row.seed),
                row.variant,
                f"{1e3 * row.ttft_mean_s:,.0f}",
                f"{row.ratio_to_native:.3f}",
                *(f"{1e3 * t:,.0f}" for t in (row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s)),
                *(f"{100 * row.hit_share[tier]:.1f}" for tier in ("hbm", "dram", "nvme")),
                f"{row.usd_per_mtok:.3f}",
            )
        Console().print(table)
