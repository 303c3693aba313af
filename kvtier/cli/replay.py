"""`kvtier replay`: what a cache of a given size would have hit on a recorded or generated workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtier.sim.experiment import ReplayRow

_POLICY = "lru,kvtier,belady"
_CAPACITY = "1%,5%,20%"


def replay(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="A trace file, or workload:NAME?parameter=value&...")
    ],
    trace_format: Annotated[
        str, typer.Option("--format", help="auto, mooncake, agent-sessions or requests-jsonl.")
    ] = "auto",
    policy: Annotated[str, typer.Option(help="Policies, comma-separated.")] = _POLICY,
    capacity: Annotated[
        str, typer.Option(help="Capacities in blocks or in % of the distinct blocks, comma-separated.")
    ] = _CAPACITY,
    seed: Annotated[
        str, typer.Option(help="Seeds of arrival times and workloads, comma-separated. Recorded times ignore them.")
    ] = "1",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the figures into this PNG.")] = None,
    tiers: Annotated[str, typer.Option(help="A whole node instead: e.g. hbm=240GiB,dram=1TiB,nvme=8TiB.")] = "",
    hardware: Annotated[str, typer.Option(help="A whole node: hardware points by name, or files. Default A25.")] = "",
    variant: Annotated[
        str, typer.Option(help="A whole node: native, kvtier, kvtier+hints, engine, none. Default: the first three.")
    ] = "",
    load: Annotated[
        float,
        typer.Option(
            min=0.0, max=1e6, help="A whole node: starts or arrivals this much denser. 0: busy, not overloaded."
        ),
    ] = 0.0,
    hints: Annotated[
        str, typer.Option(help="What is announced: lead_s=3,missing=0,false_share=0,mistimed=0,tools_only=true.")
    ] = "",
) -> None:
    """Replay request traces against eviction policies, at any number of capacities and seeds.

    gap_share is the share of the distance from LRU to the clairvoyant bound (Belady) that a policy closes; it is left
    out where that distance is under half a point.

    With --tiers, --hardware or --variant a whole serving node is replayed: queues, links, the GPU, and what times to
    the first token come to.
    """
    import msgspec

    from kvtier.cli.progress import ReplayProgress
    from kvtier.errors import ConfigError
    from kvtier.sim import experiment
    from kvtier.sim.plot import plot_hit_rates, require_plot
    from kvtier.sim.sources import open_source

    node = bool(tiers or hardware or variant)
    if not node and (hints or load):
        raise ConfigError("--hints and --load are of a whole node: add --tiers, --hardware or --variant")
    if node and (policy, capacity) != (_POLICY, _CAPACITY):
        raise ConfigError("--policy and --capacity are not of a whole node: choose with --variant and --tiers")
    if node:
        from kvtier.cli.replay_tiers import replay_tiers
        from kvtier.sim.node.experiment import Setting
        from kvtier.sim.node.hints import parse_announcer

        replay_tiers(
            traces,
            trace_format,
            setting=Setting(block_tokens=block_tokens, tiers=tiers, load=load, announcer=parse_announcer(hints)),
            hardware=hardware or "A25",
            variant=variant or "native,kvtier,kvtier+hints",
            seed=seed,
            as_json=as_json,
            plot=plot,
        )
        return
    policies = experiment.parse_policies(policy)
    capacities = experiment.parse_capacities(capacity)
    seeds = experiment.parse_seeds(seed)
    if plot is not None:
        require_plot(plot)
    sources = [open_source(text, trace_format, block_tokens) for text in traces]
    rows: list[ReplayRow] = []
    replays = len(capacities) * len({*policies, "lru", "belady"})
    for source in sources:
        with ReplayProgress(replays * (len(seeds) if source.seeded else 1)) as progress:
            for row in experiment.run_grid(source, policies, capacities, seeds, progress):
                rows.append(row)
                if as_json:
                    typer.echo(msgspec.json.encode(row))
    if not as_json:
        _print_table(rows)
    if plot is not None:
        plot_hit_rates(rows, plot)


def _print_table(rows: Sequence[ReplayRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    for trace in dict.fromkeys(row.trace for row in rows):
        table = Table(title=trace, caption="gap: share of the distance from LRU to Belady that is closed")
        for column in ("blocks", "seed", "policy", "hit %", "gap %", "evicted", "policy µs/request"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        last = None
        for row in (row for row in rows if row.trace == trace):
            group = (f"{row.capacity_blocks:,}", str(row.seed))
            if last not in (None, group):
                table.add_section()
            shown, last = group if group != last else ("", ""), group
            table.add_row(
                *shown,
                row.policy,
                f"{100 * row.hit_rate:.2f}",
                "–" if row.gap_share is None else f"{100 * row.gap_share:.1f}",
                f"{row.evicted_blocks:,}",
                f"{row.policy_us_per_request:.1f}",
            )
        Console().print(table)
