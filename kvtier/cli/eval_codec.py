"""`kvtier eval codec MODEL`: what every codec costs on a real model and real text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtier.reference.ledger import LedgerRow

eval_app = typer.Typer(help="Measure what choices cost on a real model.", no_args_is_help=True)


@eval_app.command("codec")
def eval_codec(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face model (config.json, *.safetensors).")],
    calibration: Annotated[
        Path | None, typer.Option(help="Its calibration; by default from kvtier's cache, measured first if missing.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to judge on; may be repeated. By default four that lie on any machine."),
    ] = None,
    codec: Annotated[str, typer.Option(help="Codecs, comma-separated; `all` for every one.")] = "all",
    maps: Annotated[
        str, typer.Option("--map", help="Sources of the presets' bits maps, comma-separated: loo, local, ema, uniform.")
    ] = "loo,uniform",
    prefix_tokens: Annotated[int, typer.Option(min=64, help="Tokens encoded, per text.")] = 1536,
    positions: Annotated[int, typer.Option(min=32, help="Tokens scored after them, per text.")] = 512,
    block_tokens: Annotated[int, typer.Option(min=8, help="Tokens in a block.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw loss against bytes into this PNG.")] = None,
) -> None:
    """Encode and decode the KV of real text, continue, and compare with the unencoded cache."""
    import msgspec

    from kvtier.cli.progress import StepProgress
    from kvtier.codec.calibration import calibration_path, load_calibration
    from kvtier.errors import ConfigError
    from kvtier.reference import ledger
    from kvtier.reference.calibrate import calibrate
    from kvtier.reference.calibrate import default_texts as calibration_texts
    from kvtier.reference.prefix_model import PrefixModel
    from kvtier.reference.texts import default_texts, read_texts
    from kvtier.sim.plot import require_plot

    if plot is not None:
        require_plot(plot)
    names = ledger.DEFAULT_CODECS if codec == "all" else tuple(name.strip() for name in codec.split(","))
    sources = tuple(name.strip() for name in maps.split(","))
    loaded = PrefixModel(model)
    path = calibration if calibration is not None else calibration_path(loaded.fingerprint)
    rows: list[LedgerRow] = []
    with StepProgress() as progress:
        if path.is_file():
            found = load_calibration(path, loaded.fingerprint)
        elif calibration is not None:
            raise ConfigError(f"no calibration at {path}")
        else:
            found = calibrate(loaded, calibration_texts(), ("loo", "local", "ema"), progress)
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        texts = read_texts(text) if text else default_texts(loaded, prefix_tokens + positions)
        passages = ledger.passages_of(loaded, texts, prefix_tokens, positions, progress)
        for row in ledger.ledger(loaded, passages, found, names, sources, block_tokens, progress):
            rows.append(row)
            if as_json:
                typer.echo(msgspec.json.encode(row))
    if not as_json:
        _print_table(rows, [name for name, _ in texts])
    if plot is not None:
        from kvtier.reference.plot import plot_ledger

        plot_ledger(rows, plot)


def _print_table(rows: list[LedgerRow], texts: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"on {', '.join(texts)}", caption="KL in nats a token, 95 % interval; GB/s of one core")
    for column in (
        "codec",
        "map",
        "ratio",
        "bits",
        "KL",
        "interval",
        "top-1 %",
        "ppl x",
        "encode",
        "decode",
        "against uniform",
    ):
        table.add_column(column, justify="left" if column in ("codec", "map") else "right")
    for row in rows:
        gain = (
            ""
            if row.kl_gain is None or row.kl_gain_ci is None
            else f"{row.kl_gain:+.5f} [{row.kl_gain_ci[0]:+.5f}, {row.kl_gain_ci[1]:+.5f}]"
        )
        table.add_row(
            row.codec, row.map, f"{row.ratio:.2f}", f"{row.bits_per_element:.3f}", f"{row.kl_mean:.5f}",
            f"[{row.kl_ci[0]:.5f}, {row.kl_ci[1]:.5f}]", f"{row.top1_agree * 100:.1f}", f"{row.ppl_ratio:.4f}",
            f"{row.encode_bytes_per_s / 1e9:.2f}", f"{row.decode_bytes_per_s / 1e9:.2f}", gain,
        )  # fmt: skip
    Console().print(table)
