"""Mooncake's client, as far as the pool tier uses it: batches of objects, each made of a payload and a header.

Everything returns numbers; what they mean here is what Mooncake Store 0.3.13 was seen to do, not what it documents: a
get of an object that is not there is -704, of one whose owner died or stopped -800 (after its timeout), with the master
gone -900 or -901; a put without room is -200. All calls
block; all but joining and leaving release the GIL.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import msgspec

from kvtier.errors import ConfigError, TierIOError

NOT_THERE = frozenset({-704, -706, -713})
"""No such object, or none that is readable yet."""
NO_ROOM = frozenset({-200, -201})

# Mooncake's own defaults let a call wait 30 s for a master and 60 s for an owner that stopped, and the start 100 s.
# With these it is 2, about 11 and 2 s. What is set in the process's environment goes first.
_TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the pool is and what this process brings to it.

    `segment_bytes` of this process's memory are lent to everyone; 0 makes it a guest that only reads and writes.
    `metadata` is Mooncake's metadata server, P2PHANDSHAKE for none. `host` is the name by which others reach this
    process; empty finds the address that leads to the master.
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    host: str = ""
    segment_bytes: int = 0
    replicas: int = 1


class Client(Protocol):
    """What the tier asks of a pool. Pointers are addresses in this process; pieces of one object lie in order."""

    def register(self, address: int, n_bytes: int) -> bool:
        """Let the network card read and write this memory; False if it will not."""
        ...

    def put(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """0 or a negative code for each object. Putting what is there is 0 and moves nothing."""
        ...

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Bytes read, or a negative code, for each object."""
        ...

    def exists(self, names: list[str]) -> list[int]:
        """1, 0 or a negative code for each object."""
        ...

    def replicas(self, names: list[str]) -> list[int]:
        """How many copies each object has; 0 where that is not known."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object whoever reads it."""
        ...

    def close(self) -> None:
        """Leave the pool; what this process lent to it is gone."""
        ...


class MooncakeClient:
    """`Client` over mooncake.store. Raises ConfigError without the package, TierIOError without the master."""

    def __init__(self, options: PoolOptions) -> None:
        store = _import_store()
        for name, value in _TIMEOUTS.items():
            os.environ.setdefault(name, value)
        host, port = _address(options.master)
        own = options.host or _own_address(host, port)
        self._store = store.MooncakeDistributedStore()
        code = self._store.setup(
            own,
            options.metadata,
            options.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            options.protocol,
            options.device,
            options.master,
        )
        if code != 0:
            raise TierIOError(
                f"the pool at {options.master} cannot be joined as {own} over {options.protocol} (Mooncake says {code})"
            )
        self._config = store.ReplicateConfig()
        self._config.replica_num = options.replicas

    def register(self, address: int, n_bytes: int) -> bool:
        return bool(self._store.register_buffer(address, n_bytes) == 0)

    def put(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        return list(self._store.batch_put_from_multi_buffers(names, pointers, sizes, self._config))

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        return list(self._store.batch_get_into_multi_buffers(names, pointers, sizes))

    def exists(self, names: list[str]) -> list[int]:
        return list(self._store.batch_is_exist(names))

    def replicas(self, names: list[str]) -> list[int]:
        found: dict[str, Sequence[Any]] = self._store.batch_get_replica_desc(names)
        return [len(found.get(name, ())) for name in names]

    def remove(self, name: str) -> None:
        self._store.remove(name, True)

    def close(self) -> None:
        self._store.close()


_LOCAL_BUFFER_BYTES = 16 << 20


def _import_store() -> ModuleType:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            "pool_master is set but Mooncake's client cannot be imported "
            f"({error}); pip install 'kvtier[pool]' (and, on Debian, apt install libibverbs1 libnuma1 libcurl4)"
        ) from error


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f'pool_master is {master!r}; write host:port, for example "10.0.0.1:50051"')
    return host.strip("[]"), int(port)


def _own_address(host: str, port: int) -> str:
    """The address of this machine that leads to the master. Connects, so that a master that is down shows at once."""
    try:
        with socket.create_connection((host, port), timeout=2.0) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise TierIOError(f"the pool's master at {host}:{port} does not answer: {error}") from error
