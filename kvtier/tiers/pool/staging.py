"""Memory a network card may touch: headers of objects, and payloads whose buffers it may not.

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

from kvtier.errors import TierIOError
from kvtier.tiers.addresses import address_of, round_up
from kvtier.tiers.objects import HEADER_BYTES
from kvtier.tiers.pool.client import Client

_PAGE = mmap.PAGESIZE


class Staged:
    """What one call borrows: a header a row, and room for the payloads that are not in registered memory."""

    def __init__(self, staging: Staging, n: int) -> None:
        self._staging = staging
        self._headers = staging.memory(round_up(n * HEADER_BYTES, _PAGE))
        self.headers: npt.NDArray[np.uint8] = np.frombuffer(self._headers, np.uint8)[: n * HEADER_BYTES].reshape(n, -1)
        self._payloads: dict[int, memoryview] = {}
        self._maps = [self._headers]

    def source(self, i: int, payload: memoryview) -> int:
        """Where the network card reads the payload of row `i`."""
        if self._staging.reaches(payload):
            return address_of(payload)
        room = self._room(i)
        np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(payload, np.uint8))
        return address_of(room)

    def target(self, i: int, payload: memoryview) -> int:
        """Where the network card writes the payload of row `i`."""
        return address_of(payload if self._staging.reaches(payload) else self._room(i))

    def deliver(self, i: int, payload: memoryview) -> None:
        """Copy what arrived for row `i` to where it belongs, if it is not there."""
        room = self._payloads.get(i)
        if room is not None:
            np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(room, np.uint8))

    def give_back(self) -> None:
        """The call came back."""
        for made in self._maps:
            self._staging.keep(made)

    def _room(self, i: int) -> memoryview:
        n_bytes = self._staging.row_bytes
        made = self._staging.memory(round_up(n_bytes, _PAGE))
        self._maps.append(made)
        self._payloads[i] = memoryview(made)[:n_bytes]
        return self._payloads[i]


class Staging:
    """Registered memory of one client, made on demand and kept. Thread-safe.

    `any_memory` says that the network takes any memory as it is (TCP).
    """

    def __init__(self, client: Client, row_bytes: int, *, any_memory: bool) -> None:
        self.row_bytes = row_bytes
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
