"""Texts to measure on: the user's, or some that lie on any machine with Python."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.reference.prefix_model import PrefixModel

_PROBE_CHARACTERS = 40_000


def read_texts(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Name and content of text files. Raises ConfigError if one cannot be read."""
    found = []
    for file in files:
        try:
            found.append((file.name, file.read_text(errors="replace")))
        except OSError as error:
            raise ConfigError(f"text {file}: {error.strerror}") from error
    return found


def default_texts(model: PrefixModel, least_tokens: int) -> list[tuple[str, str]]:
    """Four texts of at least `least_tokens`: program code, reference prose and a licence where there is one.

    None of them is the calibration text. Raises ConfigError if fewer than four are long enough.
    """
    import argparse
    import statistics
    import typing
    from pydoc_data import topics

    longest = sorted(topics.topics.values(), key=len, reverse=True)
    found = [("argparse", inspect.getsource(argparse)[6_000:]), ("python-reference", "\n\n".join(longest[:4]))]
    for folder in (
        Path("/usr/share/common-licenses"),
        Path(sys.base_prefix),
        *Path(sys.base_prefix).glob("lib/python3*"),
    ):
        names = [name for name in ("GFDL-1.3", "LICENSE.txt", "LICENSE") if (folder / name).is_file()]
        found += [(name, (folder / name).read_text(errors="replace")) for name in names]
    found += [(module.__name__, inspect.getsource(module)) for module in (statistics, typing)]
    fit = [(name, text) for name, text in found if len(model.tokens(text[:_PROBE_CHARACTERS])) >= least_tokens]
    if len(fit) < 4:
        raise ConfigError("too few texts of enough length are on this machine; give your own with --text")
    return fit[:4]
