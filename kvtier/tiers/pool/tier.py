"""The pool tier: a `SharedTier` over a Mooncake Store.

Mooncake keeps objects in memory that its clients lend, evicts by its own order when a watermark is reached, and refuses
what does not fit. None of that is trusted: an object is a row with its header, verified when read; one that is gone is
VANISHED; one without an owner, or a master that does not answer, is IO_ERROR, and the breaker's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.errors import ConfigError, TierIOError
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.handles import Handles, HandleTier
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.meter import Meter
from kvtier.tiers.objects import HEADER_BYTES, STATUS_OF, ObjectSeal, Verdict
from kvtier.tiers.pool.client import NO_ROOM, NOT_THERE, Client, MooncakeClient, PoolOptions
from kvtier.tiers.pool.staging import Staging
from kvtier.tiers.protocol import RowId, RowStatus, Slots, TierProbe, TierStats

_CLOSE_WAIT_S = 70.0
"""A call to a peer that stopped comes back after Mooncake's own timeout."""
_HANDLES = 1 << 20
_PROBE_ROWS = 4
_UNUSABLE = TierProbe(float("inf"), 1.0, float("inf"), 1.0)


class PoolTier(HandleTier):
    """See `kvtier.tiers.protocol.SharedTier` for the contract.

    Payloads go between the network and the caller's buffers without a copy: over TCP above 256 KiB, over RDMA where the
    buffers lie in memory given to `register`; others pass through staging buffers.
    """

    def __init__(
        self,
        options: PoolOptions,
        key_space_digest: bytes,
        layout_digest: str,
        row_bytes: int,
        *,
        name: str = "pool",
        handles: int = _HANDLES,
        connect: Callable[[PoolOptions], Client] = MooncakeClient,
    ) -> None:
        """Join the pool. Raises ConfigError (options, package) or TierIOError (the master does not answer)."""
        if options.protocol not in ("tcp", "rdma"):
            raise ConfigError(f'pool_protocol is {options.protocol!r}; it must be "tcp" or "rdma"')
        if not 1 <= options.replicas <= 16:
            raise ConfigError(f"pool_replicas is {options.replicas}; it must be between 1 and 16")
        self.name = name
        self.row_bytes = row_bytes
        self._options = options
        self._identity = key_space_digest, layout_digest
        self._seal = ObjectSeal(key_space_digest, layout_digest, row_bytes)
        self._meter = Meter()
        self._in_flight = InFlight()
        self._handles = Handles(handles)
        self._client = connect(options)
        self._staging = Staging(self._client, row_bytes, any_memory=options.protocol == "tcp")
        self._shortfall_lock = threading.Lock()

    def register(self, memory: memoryview) -> bool:
        """Let rows in `memory` go over RDMA without a copy; False if the network card refuses, and they are copied. TCP
        needs none of this."""
        return self._options.protocol == "tcp" or self._staging.register(memory)

    # ---- control thread

    def part(self, nonce: bytes) -> None:
        """See SharedTier."""
        self._seal = self._parted(nonce)

    def close(self) -> None:
        """Stop, wait for transfers in flight, leave the pool."""
        if self._in_flight.closed:
            return
        if self._in_flight.close(_CLOSE_WAIT_S):
            self._client.close()
        else:  # Mooncake still writes into someone's memory: pulling it away would be worse
            self._meter.fault("close_abandoned")

    # ---- any thread

    def exists(self, rows: Sequence[RowId]) -> list[bool]:
        """See SharedTier. One round trip to the master. Raises TierIOError."""
        with self._in_flight.transfer() as is_open:
            if not is_open or not rows:
                return [False] * len(rows)
            answers = self._client.exists([self._seal.name(row) for row in rows])
            if len(answers) != len(rows) or min(answers) < 0:
                raise TierIOError(f"the pool's master does not answer (Mooncake says {min(answers, default=0)})")
            return [answer == 1 for answer in answers]

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. FULL where the pool refuses for want of room."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, sources, self.row_bytes)
            self._handles.table.require_reserved(slots)
            if not rows:
                return []
            begin_s = time.perf_counter()
            statuses = self._put(self._seal, rows, sources)
            good = np.array([status is RowStatus.OK for status in statuses], np.bool_)
            self._handles.publish(slots[good], [row for row, ok in zip(rows, good, strict=True) if ok])
            self._meter.rows_written(statuses, self.row_bytes, begin_s)
            return statuses

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See the protocol. VANISHED where the pool has evicted the object, or lost it with its owner."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return [RowStatus.CLOSED] * len(rows)
            check_arguments(slots, rows, targets, self.row_bytes)
            begin_s = time.perf_counter()
            statuses = [RowStatus.FOREIGN] * len(rows)
            known = [i for i, ours in enumerate(self._handles.speaks_of(slots, rows)) if ours]
            if known:
                found = self._get(self._seal, [rows[i] for i in known], [targets[i] for i in known])
                for i, status in zip(known, found, strict=True):
                    statuses[i] = status
            self._meter.rows_read(statuses, self.row_bytes, begin_s)
            return statuses

    def probe(self) -> TierProbe:
        """See the protocol. Puts and gets a few objects of this process's own and removes them again; a pool that does
        not take them probes as infinitely slow."""
        with self._in_flight.transfer() as is_open:
            if not is_open:
                return _UNUSABLE
            nonce = time.monotonic_ns().to_bytes(8, "little") * 4
            seal = ObjectSeal(nonce, "probe", self.row_bytes)
            rows = [RowId(bytes([i]) * 32, b"", 0) for i in range(1 + _PROBE_ROWS)]
            buffers = [memoryview(bytearray(self.row_bytes)) for _ in rows]
            try:
                seconds = []
                for verb in (self._put, self._get):
                    for part in (slice(0, 1), slice(1, None)):
                        begin_s = time.perf_counter()
                        if any(status is not RowStatus.OK for status in verb(seal, rows[part], buffers[part])):
                            self._meter.fault("probe_io_error")
                            return _UNUSABLE
                        seconds.append(time.perf_counter() - begin_s)
            finally:
                for row in rows:
                    self._client.remove(seal.name(row))
        put_one, put_all, get_one, get_all = seconds
        rates = [
            (_PROBE_ROWS - 1) * self.row_bytes / max(many - one, many / 10)
            for one, many in ((get_one, get_all), (put_one, put_all))
        ]
        return TierProbe(get_one, rates[0], put_one, rates[1])

    def stats(self) -> TierStats:
        """Sizes of what this process lends: what others lend, the pool's master knows."""
        return self._meter.stats(
            capacity_rows=self._handles.table.capacity,
            used_rows=self._handles.table.used,
            cap_bytes=self._options.segment_bytes,
            medium_bytes=self._options.segment_bytes,
        )

    # ---- inside

    def _put(self, seal: ObjectSeal, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        names = [seal.name(row) for row in rows]
        with self._staging.borrow(len(rows)) as staged:
            for i, (row, source) in enumerate(zip(rows, sources, strict=True)):
                staged.headers[i][:] = np.frombuffer(seal.pack(row, staged.put(i, source)), np.uint8)
            pointers = [staged.pieces(i, source) for i, source in enumerate(sources)]
            codes = self._client.put(names, pointers, [staged.sizes] * len(rows))
        if len(codes) != len(rows):
            return [RowStatus.IO_ERROR] * len(rows)
        if self._options.replicas > 1:
            self._count_shortfall([name for name, code in zip(names, codes, strict=True) if code == 0])
        return [_put_status(code) for code in codes]

    def _get(self, seal: ObjectSeal, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """Of buffers for one object in one call Mooncake fills the last, and says that it filled all: one at a time."""
        once = sorted({seal.name(row): i for i, row in enumerate(rows)}.values())
        if len(once) == len(rows):
            return self._get_once(seal, rows, targets)
        statuses = [RowStatus.IO_ERROR] * len(rows)
        for part in (once, sorted(set(range(len(rows))) - set(once))):
            found = self._get(seal, [rows[i] for i in part], [targets[i] for i in part])
            for i, status in zip(part, found, strict=True):
                statuses[i] = status
        return statuses

    def _get_once(self, seal: ObjectSeal, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        names = [seal.name(row) for row in rows]
        with self._staging.borrow(len(rows)) as staged:
            pointers = [staged.pieces(i, target) for i, target in enumerate(targets)]
            codes = self._client.get(names, pointers, [staged.sizes] * len(rows))
            if len(codes) != len(rows):
                return [RowStatus.IO_ERROR] * len(rows)
            statuses = []
            for i, code in enumerate(codes):
                status = self._get_status(code)
                if status is RowStatus.OK:
                    verdict, promised = seal.check(bytes(staged.headers[i]), rows[i])
                    if verdict is not Verdict.OK:
                        status = STATUS_OF[verdict]
                    elif staged.get(i, targets[i]) != promised:
                        status = RowStatus.CORRUPT
                if status in (RowStatus.CORRUPT, RowStatus.FOREIGN):
                    self._client.remove(names[i])  # so that it is written anew
                statuses.append(status)
            return statuses

    def _get_status(self, code: int) -> RowStatus:
        if code == self.row_bytes + HEADER_BYTES:
            return RowStatus.OK
        if code in NOT_THERE or code == 0:
            return RowStatus.VANISHED
        return RowStatus.CORRUPT if code > 0 or code == -600 else RowStatus.IO_ERROR

    def _count_shortfall(self, names: list[str]) -> None:
        """Mooncake says 0 also when it made fewer copies than asked for."""
        if names:
            short = sum(0 < found < self._options.replicas for found in self._client.replicas(names))
            self._meter.fault("replica_shortfall", short)


def _put_status(code: int) -> RowStatus:
    if code == 0:
        return RowStatus.OK
    return RowStatus.FULL if code in NO_ROOM else RowStatus.IO_ERROR
