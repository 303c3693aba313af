"""`kvtier clear`: empty the tiers at given paths, never under a running engine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.doctor.clearing import clear_rows, find_rows


def clear(
    paths: Annotated[list[str], typer.Argument(help="What nvme_path or cxl_path says.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove every block kvtier keeps at these paths. Refused while an engine uses one of them."""
    found = [find_rows(path) for path in paths]
    for each in found:
        what = f"{len(each.slabs)} slabs" if each.slabs else "a cxl region"
        typer.echo(f"{each.path}: {what}, {each.occupied_bytes} bytes")
    if not yes:
        typer.confirm("Remove all of it?", abort=True)
    for each in found:
        typer.echo(f"{each.path}: {clear_rows(each)} bytes given back")
