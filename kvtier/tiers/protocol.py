"""The Tier protocol: eight verbs behind which every place for bytes looks the same.

A tier holds rows of `row_bytes` in numbered slots. The control thread decides (reserve, release); I/O threads move
bytes (write, read). A row becomes visible only by a `write` that ended well: reserve → write → checksum → publish. A
failed or torn write leaves a free slot, never a key. Whoever reads checks: a row comes back verified or with a reason.

Threads: `reserve`, `release`, `recover` and `close` come from one control thread; `write`, `read`, `probe` and `stats`
may come from any thread and run side by side, never for the same slot at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]


class RowId(NamedTuple):
    """What a row holds: `key` (32 bytes), the key of the block before it ("" for a first block), the KV-cache group."""

    key: bytes
    parent: bytes
    group: int


class RowStatus(Enum):
    """How the transfer of one row ended. Everything but OK is a counted reason for a miss."""

    OK = "ok"
    IO_ERROR = "io_error"
    FULL = "full"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    VANISHED = "vanished"
    CLOSED = "closed"


class RecoveredRow(NamedTuple):
    """A row found by `recover`: published before the restart and still the tier's own."""

    slot: int
    row: RowId


class TierProbe(msgspec.Struct, frozen=True):
    """A measured cost curve: seconds = latency_s + bytes / bytes_per_s, by direction."""

    read_latency_s: float
    read_bytes_per_s: float
    write_latency_s: float
    write_bytes_per_s: float


class CodecStats(msgspec.Struct, frozen=True):
    """What a tier's codec has done since start. `refused` are rows it could not write down or read back, by reason."""

    plain_written_bytes: int = 0
    encoded_written_bytes: int = 0
    plain_read_bytes: int = 0
    encoded_read_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    refused: dict[str, int] = {}


class TierStats(msgspec.Struct, frozen=True):
    """Counters since start, and sizes now. `medium_bytes` is what the tier occupies on its medium;
    `dedup_ratio` the rows published for each row kept, where equal payloads are kept once."""

    capacity_rows: int
    used_rows: int
    cap_bytes: int
    medium_bytes: int
    read_bytes: int
    written_bytes: int
    read_s: float
    write_s: float
    faults: dict[str, int]
    codec: CodecStats | None = None
    dedup_ratio: float | None = None


class Tier(Protocol):
    """A place that holds rows. See the module docstring for the contract on threads and visibility."""

    name: str
    row_bytes: int

    def reserve(self, n: int) -> Slots | None:
        """Take `n` free slots, or None (and nothing changed) if fewer are free. Never blocks, never does I/O."""
        ...

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """Write and publish reserved slots from buffers of `row_bytes`. Blocks. One status a row; raises only
        IntegrityError for a caller's bug: slots not reserved, keys or buffers of a wrong size. A row that is not OK is
        unpublished; its slot stays reserved until released."""
        ...

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """Read published slots into buffers of `row_bytes`, verifying identity and checksum. Blocks. Raises only
        IntegrityError for keys or buffers of a wrong size. A slot that holds nothing, or another row, is FOREIGN. The
        content of a target whose status is not OK is undefined."""
        ...

    def release(self, slots: Slots) -> None:
        """Unpublish and free slots; durable before any of them is written again. Never blocks, never does I/O. Raises
        IntegrityError if a slot is free already."""
        ...

    def recover(self) -> list[RecoveredRow]:
        """What survived the last process, parents before children where known. Once, before the first reserve."""
        ...

    def probe(self) -> TierProbe:
        """Measure latency and bandwidth now, with a few rows' worth of scratch I/O. Blocks up to about 0.2 s."""
        ...

    def stats(self) -> TierStats:
        """Sizes and counters now. Cheap."""
        ...

    def close(self) -> None:
        """Stop: later verbs answer CLOSED or None. Idempotent. Data stays where the tier is durable."""
        ...


class SharedTier(Tier, Protocol):
    """A tier whose medium other processes read and write too: its slots are this process's handles of common rows.

    `release` forgets a handle and leaves the row, which others may want; `recover` finds nothing, `exists` does. A row
    that another process evicted since is VANISHED when read.
    """

    def exists(self, rows: Sequence[RowId]) -> list[bool]:
        """Which rows are on the medium now, whoever wrote them. Blocks; any thread. Says nothing about their bytes.
        Raises TierError if the medium does not answer."""
        ...

    def adopt(self, slots: Slots, rows: Sequence[RowId]) -> None:
        """Make reserved slots handles of rows that `exists` found. Control thread; no I/O."""
        ...

    def part(self, nonce: bytes) -> None:
        """From now on share only with tiers parted by the same `nonce`: after a reset, nothing that was written before,
        by whomever, may be found again. Control thread; no handle is published; rows under way stay in the past."""
        ...


def is_shared(tier: Tier) -> TypeGuard[SharedTier]:
    """Whether other processes' rows can be found in a tier. What wraps a tier is shared if the tier inside is."""
    inner = tier
    while (deeper := getattr(inner, "inner", None)) is not None:
        inner = deeper
    return hasattr(inner, "adopt") and hasattr(tier, "adopt")
