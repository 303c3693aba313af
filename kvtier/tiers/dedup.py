"""A tier that keeps equal payloads once: rows of equal bytes share one row of the tier inside.

    tier = DedupTier(NvmeTier(...), names_per_row=2.0)

Payloads are compared by sha256: xxh3 would let a made-up collision serve one tenant another one's bytes. The row inside
is stored under the identity of whoever wrote it first, so it is found, and verified, as that row after a restart; the
other names of it live in this process's memory only, and are misses then. What a name may read is checked here, row by
row. About 400 bytes a row that is held.

Slots are this tier's own, up to `names_per_row` for each row inside; one can be reserved only while a row inside can
be, because nobody knows beforehand what is equal. A row that was not needed goes back at the next call of the control
thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvtier.errors import ConfigError
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.meter import Meter
from kvtier.tiers.protocol import RecoveredRow, RowId, RowStatus, Slots, Tier, TierProbe, TierStats, is_shared
from kvtier.tiers.slots import SlotTable

_PROBE_BYTES = 4 << 20
_MOST_NAMES = 64.0


@dataclass(slots=True, eq=False)
class _Held:
    """A row of the tier inside: its slot there, the identity it is stored under, and how many slots of ours hold it.
    `digest` is None where the payload was never seen: reserved, or found after a restart."""

    slot: int
    name: RowId | None = None
    digest: bytes | None = None
    holders: int = 1


class DedupTier:
    """A `Tier` around a `Tier` of this process; see the module docstring."""

    def __init__(self, inner: Tier, *, names_per_row: float = 1.0) -> None:
        """Raises ConfigError for a shared tier, whose rows others name, and for a factor out of range."""
        if is_shared(inner):
            raise ConfigError(f"dedup names {inner.name!r}, a tier other processes share; it is for cxl and nvme")
        if not 1 <= names_per_row <= _MOST_NAMES:
            raise ConfigError(f"dedup is {names_per_row} for {inner.name}; it must be between 1 and {_MOST_NAMES:g}")
        self.name = inner.name
        self.row_bytes = inner.row_bytes
        self.inner = inner
        self._lock = threading.Lock()
        self._capacity = int(inner.stats().capacity_rows * names_per_row)
        self._slots = SlotTable(self._capacity)
        self._slots.add(np.arange(self._capacity, dtype=np.int32))
        self._held: dict[int, _Held] = {}
        self._rows: dict[int, RowId] = {}  # what our published slots hold
        self._payloads: dict[bytes, _Held] = {}
        self._spare: list[int] = []  # slots inside, reserved and not needed
        self._physical = 0
        self._meter = Meter()
        self._closed = False

    def reserve(self, n: int) -> Slots | None:
        """See Tier.reserve."""
        with self._lock:
            if self._closed:
                return None
            self._give_back([])
            slots = self._slots.take(n)
            if slots is None:
                return None
            inside = self.inner.reserve(n)
            if inside is None:
                self._slots.give_back(slots)
                return None
            self._held.update({ours: _Held(s) for ours, s in zip(slots.tolist(), inside.tolist(), strict=True)})
            return slots

    def release(self, slots: Slots) -> None:
        """See Tier.release. The row inside goes with the last slot that holds it."""
        with self._lock:
            if self._closed:
                return
            self._slots.retire(slots)
            gone = []
            for slot in slots.tolist():
                self._rows.pop(slot, None)
                held = self._held.pop(slot)
                held.holders -= 1
                if not held.holders:
                    gone.append(held.slot)
                    self._forget_payload(held)
                    self._physical -= held.name is not None
            self._give_back(gone)
            self._slots.reuse(slots)

    def recover(self) -> list[RecoveredRow]:
        """See Tier.recover. Each row inside is found under the identity it was first stored under, and no other."""
        with self._lock:
            found = self.inner.recover()
            slots = self._slots.take(len(found))
            assert slots is not None, "a slot of ours for each row inside"
            for ours, (inside, row) in zip(slots.tolist(), found, strict=True):
                self._held[ours], self._rows[ours] = _Held(inside, row), row
            self._physical += len(found)
            self._slots.publish(slots)
            return [RecoveredRow(ours, row) for ours, (_, row) in zip(slots.tolist(), found, strict=True)]

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See Tier.write. Where a row inside has these bytes already, none are written."""
        if self._closed:
            return [RowStatus.CLOSED] * len(rows)
        check_arguments(slots, rows, sources, self.row_bytes)
        self._slots.require_reserved(slots)
        began = time.perf_counter()
        wanted = slots.tolist()
        digests = [hashlib.sha256(source).digest() for source in sources]
        first: dict[bytes, int] = {}
        with self._lock:
            for i, digest in enumerate(digests):
                if digest not in self._payloads:
                    first.setdefault(digest, i)
            statuses = [RowStatus.OK] * len(rows)
            fresh = list(first.values())
            shared = self._share(wanted, rows, digests, [i for i in range(len(rows)) if digests[i] not in first])
        if fresh:
            self._write_inside(wanted, rows, sources, digests, fresh, statuses)
        with self._lock:
            others = [i for i in range(len(rows)) if digests[i] in first and first[digests[i]] != i]
            shared += self._share(wanted, rows, digests, others)
        left = sorted(set(range(len(rows))) - set(fresh) - set(shared))
        if left:  # equal bytes that were not written, or not kept: each for itself
            self._write_inside(wanted, rows, sources, digests, left, statuses)
        done = sum(status is RowStatus.OK for status in statuses)
        self._meter.moved(written_bytes=done * self.row_bytes, write_s=time.perf_counter() - began)
        return statuses

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See Tier.read. A row inside that is not whole is shared with nobody from then on."""
        if self._closed:
            return [RowStatus.CLOSED] * len(rows)
        check_arguments(slots, rows, targets, self.row_bytes)
        began = time.perf_counter()
        statuses = [RowStatus.FOREIGN] * len(rows)
        with self._lock:
            asked = [
                (i, held, held.name)
                for i, (slot, row) in enumerate(zip(slots.tolist(), rows, strict=True))
                if self._rows.get(slot) == row and (held := self._held[slot]).name is not None
            ]
        self._meter.fault(RowStatus.FOREIGN.value, len(rows) - len(asked))
        inside = np.array([held.slot for _, held, _ in asked], np.int32)
        names = [name for _, _, name in asked if name is not None]
        for (i, held, _), status in zip(
            asked, self.inner.read(inside, names, [targets[i] for i, _, _ in asked]), strict=True
        ):
            statuses[i] = status
            if status is not RowStatus.OK:
                with self._lock:
                    self._forget_payload(held)
        done = sum(status is RowStatus.OK for status in statuses)
        self._meter.moved(read_bytes=done * self.row_bytes, read_s=time.perf_counter() - began)
        return statuses

    def probe(self) -> TierProbe:
        """The curve of the tier inside, with the time digests take added to writing."""
        raw = self.inner.probe()
        payload = bytes(_PROBE_BYTES)
        began = time.perf_counter()
        hashlib.sha256(payload).digest()
        digest_s = (time.perf_counter() - began) / _PROBE_BYTES
        return msgspec.structs.replace(raw, write_bytes_per_s=1 / (1 / raw.write_bytes_per_s + digest_s))

    def stats(self) -> TierStats:
        """Bytes moved and faults as seen from outside, sizes of the medium from inside. A slot counts as used also
        where no row inside is free for it."""
        inner = self.inner.stats()
        with self._lock:
            free = min(self._slots.free, inner.capacity_rows - inner.used_rows + len(self._spare))
            ratio = len(self._rows) / self._physical if self._physical else 1.0
        own = self._meter.stats(
            capacity_rows=self._capacity,
            used_rows=self._capacity - free,
            cap_bytes=inner.cap_bytes,
            medium_bytes=inner.medium_bytes,
        )
        faults = dict(inner.faults)
        for reason, count in own.faults.items():
            faults[reason] = faults.get(reason, 0) + count
        return msgspec.structs.replace(own, faults=faults, codec=inner.codec, dedup_ratio=ratio)

    def close(self) -> None:
        """See Tier.close."""
        self._closed = True
        self.inner.close()

    # --- internals; all but _write_inside under the lock --------------------------------------------------------

    def _give_back(self, gone: list[int]) -> None:
        """Release rows inside, with those that turned out not to be needed. Control thread only."""
        gone, self._spare = gone + self._spare, []
        if gone:
            self.inner.release(np.array(gone, np.int32))

    def _share(self, slots: list[int], rows: Sequence[RowId], digests: list[bytes], which: list[int]) -> list[int]:
        """Publish those of `which` whose payload is held already; says which."""
        done = []
        for i in which:
            held = self._payloads.get(digests[i])
            if held is None:
                continue
            self._spare.append(self._held[slots[i]].slot)
            held.holders += 1
            self._held[slots[i]], self._rows[slots[i]] = held, rows[i]
            done.append(i)
        self._slots.publish(np.array([slots[i] for i in done], np.int32))
        return done

    def _write_inside(
        self,
        slots: list[int],
        rows: Sequence[RowId],
        sources: Sequence[memoryview],
        digests: list[bytes],
        which: list[int],
        statuses: list[RowStatus],
    ) -> None:
        """Write rows of their own, and publish those that arrived."""
        with self._lock:
            inside = np.array([self._held[slots[i]].slot for i in which], np.int32)
        ended = self.inner.write(inside, [rows[i] for i in which], [sources[i] for i in which])
        with self._lock:
            for i, status in zip(which, ended, strict=True):
                statuses[i] = status
                if status is not RowStatus.OK:
                    continue
                held = self._held[slots[i]]
                held.name, self._rows[slots[i]] = rows[i], rows[i]
                self._physical += 1
                if digests[i] not in self._payloads:  # else another thread wrote the same bytes just now
                    held.digest, self._payloads[digests[i]] = digests[i], held
                self._slots.publish(np.array([slots[i]], np.int32))

    def _forget_payload(self, held: _Held) -> None:
        if held.digest is not None:
            del self._payloads[held.digest]
            held.digest = None
