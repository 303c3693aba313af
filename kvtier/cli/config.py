"""`kvtier config show`: what every option is set to, and where the value comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError

app = typer.Typer(help="Check a configuration before an engine does.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Check a configuration before an engine does."""


@app.command()
def show(
    given: Annotated[
        str, typer.Argument(help="The options as JSON text, or a file that holds them; the engine's extra config.")
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print value and origin of every option; anything wrong is one line on stderr and exit code 2."""
    values = read_options(given)
    checked = CacheConfig.from_mapping(values)
    rows = {
        name: {"value": getattr(checked, name), "origin": "given" if name in values else "default"}
        for name in CacheConfig.__struct_fields__
    }
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("option", "value", "origin")
    for name, row in rows.items():
        table.add_row(name, str(row["value"]), str(row["origin"]))
    Console().print(table)


def read_options(given: str) -> dict[str, object]:
    """The options in JSON text, or in the file it names. Raises ConfigError."""
    text = Path(given).read_text() if not given.lstrip().startswith("{") and Path(given).is_file() else given
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{given!r} is neither a file nor JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError('the options must be one JSON object, such as {"dram_bytes": "32GiB"}')
    # The whole --kv-transfer-config works too: its extra config is what we read.
    inner = values.get("kv_connector_extra_config", values)
    return inner if isinstance(inner, dict) else values
