"""`kvtier size`: what the KV cache of a model costs, and how many sequences fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvtier.model.sizing import Deployment, ModelSize

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MAX_BUDGET_BYTES = 1 << 60
_WIDE = 4096


def size(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Model folders, config.json files, or catalogue names."),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 1,
    dp_attention: Annotated[
        bool, typer.Option("--dp-attention", help="The tp ranks attend for sequences of their own.")
    ] = False,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="bf16, fp8, int8 or int4; or fp16, fp32, fp8_ds_mla, kivi4, kivi2.")
    ] = "bf16",
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens in a block.")] = 16,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens in a sequence.")] = 32_768,
    budget: Annotated[str | None, typer.Option("--budget", help="KV memory of each rank, such as 60GiB.")] = None,
    source_len: Annotated[
        int | None, typer.Option("--source-len", help="Encoder positions, for cross attention that does not fix them.")
    ] = None,
    state_dtype: Annotated[
        str | None, typer.Option("--state-dtype", help="Type of recurrent states, when the config names none.")
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="Count the MTP draft layers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model, one a line.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Re-derive the batch sizes of the paper's table.")] = False,
) -> None:
    """What the KV cache of a model costs, and how many sequences fit.

    Several models side by side make a table for a mixed fleet. Bytes are exact; see docs/sizing.md for what each means.
    """
    if paper:
        _show_paper(as_json)
        return
    if not models:
        raise ConfigError("name at least one MODEL: a folder, a config.json, or a name from the catalogue")
    from kvtier.model.sizing import Deployment, kv_format

    deployment = Deployment(tp=tp, pp=pp, dp_attention=dp_attention, form=kv_format(kv_dtype), block_tokens=block_size)
    rank_budget = None if budget is None else parse_bytes(budget, "budget")
    sizes = [
        _size_one(
            source,
            deployment,
            seq_len=seq_len,
            budget=rank_budget,
            mtp=mtp,
            source_len=source_len,
            state_dtype=state_dtype,
        )
        for source in models
    ]
    if as_json:
        _print_json(sizes)
    elif len(sizes) == 1:
        _print_one(sizes[0], seq_len)
    else:
        _print_table(sizes, seq_len)


def parse_bytes(text: str, name: str) -> int:
    """Bytes from text such as 60GiB, 80GB or 1024. Raises ConfigError naming the option."""
    match = _BYTES.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name} must be a number of bytes such as 60GiB or 80GB, not {text!r}")
    amount = int(match[1]) * unit if match[1].isdigit() else round(float(match[1]) * unit)
    if not 1 <= amount <= _MAX_BUDGET_BYTES:
        raise ConfigError(f"{name} must be between 1 byte and 1 EiB, not {text!r}")
    return amount


def _size_one(
    source: str,
    deployment: Deployment,
    *,
    seq_len: int,
    budget: int | None,
    mtp: bool,
    source_len: int | None,
    state_dtype: str | None,
) -> ModelSize:
    from kvtier.model.catalogue import load
    from kvtier.model.sizing import size_model, spec_from_config

    name, config = load(source)
    try:
        spec = spec_from_config(config, state_dtype=state_dtype, source_tokens=source_len)
        return size_model(name, spec, deployment, seq_len=seq_len, rank_budget_bytes=budget, with_mtp=mtp)
    except ConfigError as error:
        raise type(error)(f"{source}: {error}") from error


def _print_json(items: list[ModelSize]) -> None:
    import msgspec

    for item in items:
        typer.echo(msgspec.json.encode(item).decode())


def _print_one(item: ModelSize, seq_len: int) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_row("model", item.model, "")
    table.add_row("attention", item.attention, "")
    table.add_row("layers", str(item.layers), "")
    rows: list[tuple[str, int]] = [
        ("bytes per token", item.bytes_per_token),
        ("bytes per token, fullest rank", item.bytes_per_token_per_rank),
        ("bytes per block", item.bytes_per_block),
        ("state bytes per sequence", item.state_bytes_per_sequence),
        (f"sequence of {seq_len} tokens", item.bytes_per_sequence),
        ("  logical (payload)", item.logical_bytes),
        ("  physical (scales, blocks, alignment)", item.physical_bytes),
        ("  per rank (with replicas)", item.per_rank_bytes),
    ]
    for label, amount in rows:
        table.add_row(label, f"{amount:,}", readable(amount))
    if item.max_batch is not None:
        longest = "unbounded" if item.max_tokens is None else f"{item.max_tokens:,}"
        table.add_row("longest sequence in the budget", longest, "tokens")
        table.add_row(f"sequences of {seq_len} tokens in the budget", f"{item.max_batch:,}", "")
    console = _print_whole(table)
    for note in item.notes:
        console.print(f"note: {note}", markup=False)


def _print_table(items: list[ModelSize], seq_len: int) -> None:
    from rich.table import Table

    table = Table(title=f"sequences of {seq_len} tokens", title_justify="left")
    for heading in ("model", "attention"):
        table.add_column(heading, overflow="fold")
    for heading in ("layers", "B/token", "B/token/rank", "logical", "physical", "per rank", "max tokens", "max batch"):
        table.add_column(heading, justify="right")
    for item in items:
        longest = "-" if item.max_batch is None else "unbounded" if item.max_tokens is None else f"{item.max_tokens:,}"
        table.add_row(
            item.model,
            item.attention,
            str(item.layers),
            f"{item.bytes_per_token:,}",
            f"{item.bytes_per_token_per_rank:,}",
            readable(item.logical_bytes),
            readable(item.physical_bytes),
            readable(item.per_rank_bytes),
            longest,
            "-" if item.max_batch is None else f"{item.max_batch:,}",
        )
    console = _print_whole(table)
    for item in items:
        for note in item.notes:
            console.print(f"{item.model}: {note}", markup=False)


def _show_paper(as_json: bool) -> None:
    import msgspec

    from kvtier.model.catalogue import catalogue
    from kvtier.model.sizing import paper

    rows = paper.paper_rows(catalogue())
    if as_json:
        for row in rows:
            typer.echo(msgspec.json.encode(row).decode())
        return
    from rich.table import Table

    table = Table(title="Batch sizes of arXiv 2604.26968, re-derived", title_justify="left")
    table.add_column("model")
    for heading in ("printed MHA", "derived", "printed aware", "derived", "one rank of 8 really holds"):
        table.add_column(heading, justify="right")
    for row in rows:
        printed = "/".join(str(value) for value in row.printed_mha)
        exact = f"{row.mha_exact:.2f}"
        table.add_row(row.model, printed, exact, str(row.printed_aware), str(row.aware_batch), str(row.per_rank_batch))
    console = _print_whole(table)
    console.print(
        f"constant: {paper.RANK_BUDGET_BYTES // 10**9} GB per rank / {paper.SEQUENCE_TOKENS} tokens; "
        f"slip: the MHA column divides by {paper.TENSOR_PARALLEL} ranks, the aware column by none"
    )


def _print_whole(table: Table) -> Console:
    """Print a table at its full width: a figure cut short is a wrong figure. Returns the console for what follows."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, Measurement.get(console, console.options.update(width=_WIDE), table).maximum)
    console.print(table)
    return console


def readable(amount: int) -> str:
    """Bytes with a binary unit, for reading only."""
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{amount} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
