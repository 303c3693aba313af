"""`kvtier doctor`: what every configured tier can do on this machine, what is wrong, and the fix."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.config import check_options, read_options
from kvtier.doctor.findings import Report, State
from kvtier.doctor.tiers import examine
from kvtier.errors import ConfigError


def doctor(
    given: Annotated[
        str, typer.Argument(help="The options as JSON text, or a file that holds them; the engine's extra config.")
    ] = "{}",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One option, as in --set nvme_path=/cache; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Check and measure every configured tier; exit code 1 if something is wrong. Changes nothing."""
    report = examine(check_options(read_options(given) | _settings(settings or [])))
    if as_json:
        typer.echo(msgspec.json.encode({"ok": report.ok, **msgspec.to_builtins(report)}).decode())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _settings(pairs: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: write it as NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


_COLOURS = {State.OK: "green", State.ABSENT: "yellow", State.FAULT: "red"}


def _print(report: Report) -> None:
    console = Console()
    table = Table("subject", "check", "state", "what", "fix")
    for finding in report.findings:
        state = f"[{_COLOURS[finding.state]}]{finding.state.value}[/]"
        table.add_row(finding.subject, finding.check, state, finding.says, finding.fix)
    console.print(table)
    if report.curves:
        curves = Table("tier", "bytes a call", "read", "GB/s", "write", "GB/s")
        for tier, points in report.curves.items():
            for at in points:
                read, write = at.n_bytes / at.read_s / 1e9, at.n_bytes / at.write_s / 1e9
                micros = (f"{at.read_s * 1e6:.1f} us", f"{read:.2f}", f"{at.write_s * 1e6:.1f} us", f"{write:.2f}")
                curves.add_row(tier, str(at.n_bytes), *micros)
        console.print(curves)
    faults = sum(finding.state is State.FAULT for finding in report.findings)
    console.print(f"{faults} faults" if faults else "Nothing is wrong.")
