"""Reading JSON lines, plain or gzipped, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtier.errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"

T = TypeVar("T")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for every line that is not blank. Raises TraceError if `path` is unreadable.

    Gzip is recognised by its first bytes, not by the name.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == GZIP_MAGIC
        with gzip.open(path, "rb") if zipped else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{path}:{number + 1}: {reason}") from error


def decode(decoder: msgspec.json.Decoder[T], path: Path, number: int, line: bytes) -> T:
    """Decode one line. Raises TraceError naming the file, the line and the field that is wrong."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from error
