"""`kvtier analyze`: what one's own request log says about caching, before any memory is bought."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.sim.analysis import Analysis
    from kvtier.sim.traces import Trace
    from kvtier.sim.workloads import Workload


def analyze(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or workload:NAME?parameter=value&...")],
    trace_format: Annotated[
        str, typer.Option("--format", help="auto, mooncake, agent-sessions or requests-jsonl.")
    ] = "auto",
    tiers: Annotated[
        str,
        typer.Option(
            help="Tiers, fastest first, e.g. hbm=240GiB,dram=1TiB,nvme=8TiB with --block-bytes; or in blocks."
        ),
    ] = "",
    block_bytes: Annotated[int, typer.Option(min=0, help="Bytes of a block, all layers (see kvtier size).")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrival times that were not recorded.")] = 1,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 512,
    advise: Annotated[bool, typer.Option("--advise", help="Say which sizes of DRAM and NVMe are cheapest.")] = False,
    hardware: Annotated[str, typer.Option(help="With --advise: a hardware point by name, or a file.")] = "A25",
    prices_file: Annotated[str, typer.Option("--prices", help="With --advise: a JSON file of prices.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Ask a request log what is shared, what comes back and when, and what each tier of memory would be worth."""
    import msgspec
    from rich.console import Console

    from kvtier.sim.analysis import analyze as study
    from kvtier.sim.analysis import parse_tiers
    from kvtier.sim.sources import open_source

    source = open_source(trace, trace_format, block_tokens)
    if advise:
        _advise(source, tiers, hardware, prices_file, seed, block_tokens, as_json)
        return
    sizes = parse_tiers(tiers, block_bytes)
    with Console(stderr=True).status(f"studying {source.name}"):
        found = study(source.name, source.requests(seed), seed=seed, block_tokens=block_tokens, tiers=sizes)
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        _print(Console(), found)


def _advise(
    source: Trace | Workload, tiers: str, hardware: str, prices_file: str, seed: int, block_tokens: int, as_json: bool
) -> None:
    import msgspec
    from rich.console import Console

    from kvtier.cache.writing import read_prices
    from kvtier.sim.advice import advise
    from kvtier.sim.analysis import parse_tiers
    from kvtier.sim.node.hardware import load_hardware

    point = load_hardware(hardware)
    block_bytes = point.block_bytes * block_tokens // point.block_tokens
    hbm = dict(parse_tiers(tiers or f"hbm={point.tiers['hbm']}", block_bytes)).get("hbm", 0)
    prices = read_prices(prices_file)
    if not prices_file:
        prices = msgspec.structs.replace(prices, gpus=point.gpus)
    with Console(stderr=True).status(f"studying {source.name}"):
        found = advise(source.requests(seed), point, prices, hbm, block_tokens)
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    _table(
        Console(),
        f"cheapest sizes on {found.hardware} with {found.hbm_blocks:,} blocks of HBM "
        f"(prefill takes {_percent(found.gpu_share)} of the GPU without lower tiers)",
        ("", "DRAM GiB", "NVMe GiB", "LRU hits", "prefill s saved/h", "tiers $/h", "$ per Mtok of prompts"),
        [
            (
                name,
                f"{sizes.dram_bytes / 2**30:,.0f}",
                f"{sizes.nvme_bytes / 2**30:,.0f}",
                _percent(sizes.hit_rate),
                f"{sizes.prefill_s_saved_per_hour:,.0f}",
                f"{sizes.tiers_usd_per_hour:.3f}",
                f"{sizes.usd_per_mtok:.4f}",
            )
            for name, sizes in (("HBM alone", found.without), ("advice", found.best))
        ],
    )


def _print(console: Console, found: Analysis) -> None:
    inferred = " (inferred from the prompts)" if found.conversations_inferred else ""
    sharing = found.sharing
    console.print(
        f"[bold]{found.trace}[/bold]: {found.requests:,} requests of {found.conversations:,} conversations{inferred} "
        f"in {found.span_s / 3600:.2f} h\n"
        f"{found.blocks:,} accesses to {found.unique_blocks:,} blocks of {found.block_tokens} tokens, "
        f"{found.mean_prompt_blocks:.1f} a prompt; an infinite cache hits {_percent(found.infinite_hit_rate)}:\n"
        f"  {_percent(sharing.hits_from_own_history)} by a conversation's own history, "
        f"{_percent(sharing.hits_from_other_conversations)} by prefixes shared between conversations\n"
        f"  {_percent(sharing.shared_access_share)} of accesses go to blocks more than one conversation uses",
        highlight=False,
    )
    _print_reuse(console, found)
    _table(
        console,
        "return of a conversation after a response, arrival to arrival",
        ("stop reason", "requests", "returned", "p10 s", "p50 s", "p90 s"),
        [
            (
                r.stop_reason,
                f"{r.requests:,}",
                _percent(r.returned),
                _seconds(r.p10_s),
                _seconds(r.p50_s),
                _seconds(r.p90_s),
            )
            for r in found.returns
        ],
    )
    _table(
        console,
        "capacity at which LRU has so much of what an infinite cache hits",
        ("share", "blocks", "of footprint"),
        [
            (_percent(target.share, 0), f"{target.capacity_blocks:,}", _percent(target.footprint_share, 2))
            for target in found.lru_targets
        ],
    )
    if found.tiers:
        _table(
            console,
            "what each tier adds",
            ("tier", "blocks", "up to here", "LRU hits", "adds", "best possible", "Mtokens saved/h"),
            [
                (
                    tier.tier,
                    f"{tier.blocks:,}",
                    f"{tier.cumulative_blocks:,}",
                    _percent(tier.lru_hit_rate),
                    _percent(tier.lru_gain),
                    _percent(tier.best_hit_rate),
                    f"{tier.saved_tokens_per_hour / 1e6:.2f}",
                )
                for tier in found.tiers
            ],
        )


def _print_reuse(console: Console, found: Analysis) -> None:
    _table(
        console,
        "where reuse is, by position in the prompt",
        ("blocks", "distinct", "accesses", "of all reuse"),
        [
            (
                f"{band.start_block}–{'' if band.stop_block is None else band.stop_block - 1}",
                f"{band.unique_blocks:,}",
                f"{band.accesses:,}",
                _percent(band.reuse_share),
            )
            for band in found.depths
            if band.accesses
        ],
    )
    _table(
        console,
        "most reused runs of blocks",
        ("from block", "length", "uses", "conversations", "of all reuse"),
        [
            (str(h.depth_blocks), str(h.length_blocks), f"{h.uses:,}", f"{h.conversations:,}", _percent(h.reuse_share))
            for h in found.hottest
        ],
    )


def _table(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
