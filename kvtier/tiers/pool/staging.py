"""Memory a network card may touch: headers of objects, and payloads that do not go from and to where they are.

A buffer that was borrowed for a call is in use until the call has come back, however late: Mooncake may write into it
until then.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier.codec.checksum import checksum64, copy_checksummed
from kvtier.errors import TierIOError
from kvtier.tiers.addresses import address_of, round_up
from kvtier.tiers.objects import HEADER_BYTES
from kvtier.tiers.pool.client import Client

_PAGE = mmap.PAGESIZE
_JOINED_BYTES = 256 << 10
"""Rows up to this size are copied next to their header, and hashed on the way: over TCP every piece of an object is a
transfer of its own, and one more costs 100 us, as much as copying 512 KiB (docs/tiers.md)."""
_SLAB_BYTES = 1 << 20
"""Such rows share mappings: a process has 65,530 by default, and a call of small rows would take thousands of them."""

Bytes = npt.NDArray[np.uint8]


class Staged:
    """What one call borrows: a header a row, and room for the payloads that do not go where they are."""

    def __init__(self, staging: Staging, n: int) -> None:
        self._staging = staging
        self._maps: list[mmap.mmap] = []
        self._rooms: dict[int, Bytes] = {}
        self.headers: list[Bytes] = []
        if staging.joined:
            row_bytes, object_bytes = staging.row_bytes, staging.row_bytes + HEADER_BYTES
            per_slab = _SLAB_BYTES // object_bytes
            slabs = [self._borrow(per_slab * object_bytes) for _ in range(-(-n // per_slab))]
            objects = [whole for slab in slabs for whole in slab.reshape(per_slab, object_bytes)][:n]
            self._rooms = {i: whole[:row_bytes] for i, whole in enumerate(objects)}
            self.headers = [whole[row_bytes:] for whole in objects]
        else:
            self.headers = list(self._borrow(n * HEADER_BYTES).reshape(n, HEADER_BYTES))

    @property
    def sizes(self) -> list[int]:
        """Bytes of the pieces of an object."""
        row_bytes = self._staging.row_bytes
        return [row_bytes + HEADER_BYTES] if self._staging.joined else [row_bytes, HEADER_BYTES]

    def put(self, i: int, payload: memoryview) -> int:
        """Bring the payload of row `i` where the network card reads it; its checksum."""
        if i not in self._rooms and self._staging.reaches(payload):
            return checksum64(payload)
        return copy_checksummed(self._room(i), np.frombuffer(payload, np.uint8))

    def get(self, i: int, payload: memoryview) -> int:
        """Bring what arrived for row `i` where it belongs; its checksum."""
        if i not in self._rooms:
            return checksum64(payload)
        return copy_checksummed(np.frombuffer(payload, np.uint8), self._rooms[i])

    def pieces(self, i: int, payload: memoryview) -> list[int]:
        """Where the pieces of row `i` lie for the network card."""
        if self._staging.joined:
            return [address_of(self._rooms[i])]
        there = i not in self._rooms and self._staging.reaches(payload)
        return [address_of(payload) if there else address_of(self._room(i)), address_of(self.headers[i])]

    def give_back(self) -> None:
        """The call came back."""
        for made in self._maps:
            self._staging.keep(made)

    def _room(self, i: int) -> Bytes:
        if i not in self._rooms:
            self._rooms[i] = self._borrow(self._staging.row_bytes)
        return self._rooms[i]

    def _borrow(self, n_bytes: int) -> Bytes:
        made = self._staging.memory(round_up(n_bytes, _PAGE))
        self._maps.append(made)
        return np.frombuffer(made, np.uint8)[:n_bytes]


class Staging:
    """Registered memory of one client, made on demand and kept. Thread-safe.

    `any_memory` says that the network takes any memory as it is (TCP).
    """

    def __init__(self, client: Client, row_bytes: int, *, any_memory: bool) -> None:
        self.row_bytes = row_bytes
        self.joined = any_memory and row_bytes <= _JOINED_BYTES
        self._client = client
        self._any_memory = any_memory
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._registered: list[tuple[int, int]] = []

    def register(self, memory: memoryview) -> bool:
        """Make rows in `memory` reachable; False if the network card refuses."""
        start = address_of(memory)
        if not self._client.register(start, memory.nbytes):
            return False
        with self._lock:
            self._registered.append((start, start + memory.nbytes))
        return True

    def reaches(self, payload: memoryview) -> bool:
        """Whether the network can use this buffer where it is."""
        if self._any_memory:
            return True
        start = address_of(payload)
        return any(first <= start and start + payload.nbytes <= end for first, end in self._registered)

    @contextmanager
    def borrow(self, n: int) -> Iterator[Staged]:
        """Memory for a call of `n` rows."""
        staged = Staged(self, n)
        try:
            yield staged
        finally:
            staged.give_back()

    def memory(self, n_bytes: int) -> mmap.mmap:
        """A registered mapping of `n_bytes`, contents undefined. Raises TierIOError if it cannot be registered."""
        with self._lock:
            idle = self._idle.get(n_bytes)
            if idle:
                return idle.pop()
        made = mmap.mmap(-1, n_bytes)
        if not self._any_memory and not self._client.register(address_of(memoryview(made)), n_bytes):
            raise TierIOError(f"the network card does not register {n_bytes} bytes; raise the memlock limit")
        return made

    def keep(self, made: mmap.mmap) -> None:
        """Keep a mapping for the next call that needs as much."""
        with self._lock:
            self._idle.setdefault(len(made), []).append(made)
