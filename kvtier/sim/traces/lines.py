"""Reading JSON lines, plain or gzipped, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvtier.errors import TraceError
from kvtier.sim.traces.chains import IdArray

GZIP_MAGIC = b"\x1f\x8b"

MAX_COUNT = 2**53

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Id = Annotated[int, Meta(ge=0)]  # of any 64 bits

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


def id_array(ids: Sequence[int], path: Path, number: int) -> IdArray:
    """Ids or tokens as an array. Raises TraceError naming the file and the line if one has more than 64 bits."""
    try:
        return np.array(ids, dtype=np.uint64)
    except OverflowError as error:
        raise TraceError(f"{path}:{number}: an id has more than 64 bits") from error
