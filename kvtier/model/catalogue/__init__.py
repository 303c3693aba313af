"""Known models, by the fields of their configs that decide the size of the cache, and reading a user's own config.

The only part of `kvtier.model` that touches files: it reads, and only when asked.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from kvtier.errors import ModelConfigError

_MAX_CONFIG_BYTES = 16 << 20


@cache
def catalogue() -> dict[str, dict[str, object]]:
    """Every built-in model by its full name. Treat as read-only."""
    text = files(__package__).joinpath("models.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, object]] = json.loads(text)
    return loaded


def find(name: str) -> tuple[str, dict[str, object]]:
    """The built-in model called `name`, with or without its organisation, in any case. Raises ModelConfigError."""
    wanted = name.lower()
    short_names: dict[str, str] = {}
    for full in catalogue():
        if wanted == full.lower():
            return full, catalogue()[full]
        short_names[full.lower().rsplit("/", 1)[-1]] = full
    if wanted in short_names:
        full = short_names[wanted]
        return full, catalogue()[full]
    near = difflib.get_close_matches(wanted.rsplit("/", 1)[-1], short_names, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(short_names[match] for match in near)}?" if near else ""
    raise ModelConfigError(
        f"{name!r} is neither a file, a folder with a config.json, nor a model of the catalogue{hint}"
    )


def load(source: str) -> tuple[str, dict[str, object]]:
    """A name to show and a config, from a config.json, a model folder, or a name of the catalogue."""
    path = Path(source)
    if path.is_dir():
        return path.resolve().name, read_config(path / "config.json")
    if path.is_file():
        return (path.resolve().parent.name if path.name == "config.json" else path.stem), read_config(path)
    if path.suffix == ".json":
        raise ModelConfigError(f"{source}: no such file")
    return find(source)


def read_config(path: Path) -> dict[str, object]:
    """The parsed JSON object of a config file. Raises ModelConfigError with the place where it is broken."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelConfigError(f"{path}: larger than {_MAX_CONFIG_BYTES} bytes, not a model config")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except (UnicodeDecodeError, ValueError) as error:
        raise ModelConfigError(f"{path}: not valid JSON: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ModelConfigError(f"{path}: not valid JSON: nested too deeply") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object, not a {type(found).__name__}")
    return found
