"""The pool tier against Mooncake's own client doing the same batch, in turns, on a pool that is running."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from kvtier.bench.rows import chain, warm_rows
from kvtier.bench.turns import Line, Side, Turn, compare
from kvtier.errors import TierIOError
from kvtier.tiers.addresses import address_of
from kvtier.tiers.objects import ObjectSeal
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import Client, MooncakeClient, PoolOptions
from kvtier.tiers.protocol import RowId, RowStatus

_BATCH = 8
_LAYOUT = "benchmark"


def bench_pool(master: str, block_bytes: int, rounds: int) -> Iterator[Line]:
    """Lines for batches of 8 blocks put and got. What is put is removed again. Raises ConfigError or TierIOError."""
    clients: list[Client] = []

    def connect(options: PoolOptions) -> Client:
        clients.append(MooncakeClient(options))
        return clients[0]

    key_space = os.urandom(32)
    tier = PoolTier(PoolOptions(master=master), key_space, _LAYOUT, block_bytes, connect=connect)
    batch = _Batch(tier, clients[0], ObjectSeal(key_space, _LAYOUT, block_bytes), block_bytes)
    try:
        for op, ours, theirs in (
            ("write", batch.tier_puts, batch.client_puts),
            ("read", batch.tier_gets, batch.client_gets),
        ):
            sides = batch.side(ours), batch.side(theirs)
            yield compare("pool", op, block_bytes, _BATCH, "mooncake client", sides, rounds)
    finally:
        batch.remove_all()
        tier.close()


class _Batch:
    """One batch of warm buffers, put under new names each time, by the tier and by the client it uses."""

    def __init__(self, tier: PoolTier, client: Client, seal: ObjectSeal, block_bytes: int) -> None:
        self._tier, self._client, self._seal, self._block = tier, client, seal, block_bytes
        self._views = [row.data for row in warm_rows(_BATCH, block_bytes)]
        self._pointers = [[address_of(view)] for view in self._views]
        self._sizes = [[block_bytes]] * _BATCH
        self._rows: list[RowId] = []
        self._names: list[str] = []
        self._made: list[str] = []
        self._turns = 0

    def side(self, move: Callable[[], float]) -> Side:
        """A side whose turn is one batch; `move` gives the seconds it took."""

        def turn() -> Turn:
            seconds = move()
            return Turn(_BATCH * self._block / seconds, [seconds])

        return turn

    def tier_puts(self) -> float:
        self._turns += 1
        self._rows = chain(_BATCH * (self._turns + 1))[-_BATCH:]
        slots = self._tier.reserve(_BATCH)
        if slots is None:
            raise TierIOError("the pool tier has no handle left")
        begin_s = time.perf_counter()
        statuses = self._tier.write(slots, self._rows, self._views)
        seconds = time.perf_counter() - begin_s
        _expect(all(status is RowStatus.OK for status in statuses), "write")
        self._tier.release(slots)
        self._made += [self._seal.name(row) for row in self._rows]
        return seconds

    def client_puts(self) -> float:
        self._turns += 1
        self._names = [f"kvtier-bench-{os.getpid()}-{self._turns}-{i}" for i in range(_BATCH)]
        begin_s = time.perf_counter()
        codes = self._client.put(self._names, self._pointers, self._sizes)
        seconds = time.perf_counter() - begin_s
        _expect(codes == [0] * _BATCH, "put")
        self._made += self._names
        return seconds

    def tier_gets(self) -> float:
        slots = self._tier.reserve(_BATCH)
        if slots is None:
            raise TierIOError("the pool tier has no handle left")
        self._tier.adopt(slots, self._rows)
        begin_s = time.perf_counter()
        statuses = self._tier.read(slots, self._rows, self._views)
        seconds = time.perf_counter() - begin_s
        _expect(all(status is RowStatus.OK for status in statuses), "read")
        self._tier.release(slots)
        return seconds

    def client_gets(self) -> float:
        begin_s = time.perf_counter()
        codes = self._client.get(self._names, self._pointers, self._sizes)
        seconds = time.perf_counter() - begin_s
        _expect(codes == [self._block] * _BATCH, "get")
        return seconds

    def remove_all(self) -> None:
        """Take out of the pool what was put; what is still leased goes by the pool's own eviction."""
        for name in self._made:
            self._client.remove(name)


def _expect(ok: bool, what: str) -> None:
    if not ok:
        raise TierIOError(f"the pool refused a {what}; give it more memory, or a smaller --block")
