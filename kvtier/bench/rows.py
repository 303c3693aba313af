"""Warm buffers, identities of rows, and the two directions of a tier as things to measure."""

from __future__ import annotations

import hashlib
import mmap

import numpy as np
import numpy.typing as npt

from kvtier.bench.turns import Side, Workers
from kvtier.errors import TierIOError
from kvtier.tiers.addresses import row_stride
from kvtier.tiers.protocol import RowId, RowStatus, Slots, Tier

Bytes = npt.NDArray[np.uint8]


def chain(n: int) -> list[RowId]:
    """Identities of a chain of `n` blocks."""
    keys = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(n)]
    return [RowId(key, keys[i - 1] if i else b"", 0) for i, key in enumerate(keys)]


def warm_rows(n: int, row_bytes: int, memory: mmap.mmap | None = None) -> list[Bytes]:
    """`n` aligned rows of random bytes in touched memory: ordinary, with huge pages, or `memory`."""
    stride = row_stride(row_bytes)
    if memory is None:
        memory = mmap.mmap(-1, n * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)[: n * stride]
    random = np.random.default_rng(0).integers(0, 256, min(len(whole), 1 << 24), dtype=np.uint8)
    for start in range(0, len(whole), len(random)):
        piece = whole[start : start + len(random)]
        piece[:] = random[: len(piece)]
    return [whole[i * stride : i * stride + row_bytes] for i in range(n)]


class Moves:
    """Writes all rows into fresh slots, or reads them back, verified. Raises TierIOError if one does not end well."""

    def __init__(self, tier: Tier, buffers: list[Bytes], workers: Workers) -> None:
        self._tier = tier
        self._rows = chain(len(buffers))
        self._views = [buffer.data for buffer in buffers]
        self._workers = workers
        self._slots: Slots | None = None

    def writing(self) -> Side:
        """A side that writes."""
        return self._workers.side(self._write, self._fresh)

    def reading(self) -> Side:
        """A side that reads what was written; writes first if nothing was."""
        if self._slots is None:
            self._fresh()
            self._write(0, len(self._rows))
        return self._workers.side(self._read)

    def _fresh(self) -> None:
        if self._slots is not None:
            self._tier.release(self._slots)
        self._slots = self._tier.reserve(len(self._rows))
        if self._slots is None:
            raise TierIOError(f"the {self._tier.name} tier has no room for {len(self._rows)} rows")

    def _write(self, first: int, end: int) -> None:
        part = slice(first, end)
        self._expect(self._tier.write(self._held[part], self._rows[part], self._views[part]))

    def _read(self, first: int, end: int) -> None:
        part = slice(first, end)
        self._expect(self._tier.read(self._held[part], self._rows[part], self._views[part]))

    @property
    def _held(self) -> Slots:
        assert self._slots is not None
        return self._slots

    def _expect(self, statuses: list[RowStatus]) -> None:
        for status in statuses:
            if status is not RowStatus.OK:
                raise TierIOError(f"the {self._tier.name} tier answered {status.value}")
