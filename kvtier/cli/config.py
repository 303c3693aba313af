"""`kvtier config show`: what every option is set to, and where the value comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cache.writing import read_prices
from kvtier.codec.registry import NAMES
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.observe.endpoint import parse_address
from kvtier.place.policy import policy_names
from kvtier.tiers.open import LOWER_TIERS

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
    checked = check_options(values)
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
    try:
        text = Path(given).read_text() if not given.lstrip().startswith("{") and Path(given).is_file() else given
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the options cannot be read from {given[:80]!r}: {error}"[:300]) from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{given[:80]!r} is neither a file with JSON nor JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError('the options must be one JSON object, such as {"dram_bytes": "32GiB"}')
    # The whole --kv-transfer-config works too: its extra config is what we read.
    if not values.keys() & {"kv_connector", "kv_connector_extra_config"}:
        return values
    inner = values.get("kv_connector_extra_config", {})
    if not isinstance(inner, dict):
        raise ConfigError(f"kv_connector_extra_config is {inner!r}; it must be a JSON object of options")
    return inner


def check_options(values: Mapping[str, object]) -> CacheConfig:
    """The configuration, with what otherwise only the start of an engine would refuse. Raises ConfigError."""
    config = CacheConfig.from_mapping(values)
    if config.policy not in policy_names():
        raise ConfigError(f"policy is {config.policy!r}; choose one of {', '.join(policy_names())}")
    if config.control:
        parse_address(config.control)
    read_prices(config.prices_file)
    tiers = ("dram", *LOWER_TIERS)
    for key, named in (("codecs", config.codecs), ("codec_max_kl", config.codec_max_kl)):
        if unknown := sorted(set(named) - set(tiers)):
            raise ConfigError(f"{key} names {unknown[0]!r}, which is no tier; choose from {', '.join(tiers)}")
    for tier, name in config.codecs.items():
        if name not in NAMES:
            raise ConfigError(f"codecs: {name!r} for the {tier} tier is not one of {', '.join(NAMES)}")
    return config
