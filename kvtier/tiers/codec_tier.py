"""A tier that keeps its rows encoded: fewer bytes on the medium, the same rows to whoever reads and writes.

    codec = build_codec(CodecChoice(name="d4"), form, calibration)
    inner = NvmeTier(path, key_space, layout_digest + codec_identity(codec), encoded_row_bytes(codec), cap_bytes)
    tier = CodecTier(inner, codec)

Encoding and decoding run in the thread that calls `write` or `read` (the mover's, never the engine's) and release the
GIL. Slots are the inner tier's own. What was written by another codec, model or map is FOREIGN when read, a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from kvtier.codec.arithmetic import NumpyArithmetic
from kvtier.codec.protocol import RowCodec
from kvtier.codec.scratch import Scratch
from kvtier.errors import ConfigError, CorruptBlockError, ForeignBlockError, IntegrityError, NotEncodableError
from kvtier.tiers.arguments import check_arguments
from kvtier.tiers.meter import Meter
from kvtier.tiers.protocol import (
    CodecStats,
    RecoveredRow,
    RowId,
    RowStatus,
    SharedTier,
    Slots,
    Tier,
    TierProbe,
    TierStats,
    is_shared,
)

_BATCH_BYTES = 16 << 20  # of encoded rows held at once by one thread
_PROBE_ROWS = 3
_PARENT_WAITS = 4
_PARENT_WAIT_S = 0.0025  # a row without a parent costs this four times; encoding a few rows takes as long

T = TypeVar("T")


def encoded_row_bytes(codecs: RowCodec | Mapping[int, RowCodec]) -> int:
    """The `row_bytes` an inner tier needs for these codecs."""
    found = codecs.values() if isinstance(codecs, Mapping) else [codecs]
    return max(codec.encoded_bytes for codec in found)


def codec_identity(codecs: RowCodec | Mapping[int, RowCodec]) -> str:
    """Names and parameters of the codecs, for a durable inner tier's layout digest: other codec, other slab."""
    found = codecs.items() if isinstance(codecs, Mapping) else [(0, codecs)]
    return "".join(
        f"|{group}:{codec.name}:{codec.parameters.hex()}" for group, codec in sorted(found, key=lambda x: x[0])
    )


class ChainPositions:
    """Where in its prompt each row of a tier lies, learned from the parents named in row identities. Thread-safe.

    Parents come before children (`Tier.recover` and every writer see to that), so a child's place is its parent's plus
    one block. About 250 bytes a row that is held; a row whose parent was never seen has no position.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[bytes, list[int]] = {}  # key -> [blocks before it, slots that hold it]
        self._keys: dict[int, bytes] = {}

    def learn(self, slot: int, row: RowId) -> int | None:
        """Note that `slot` holds `row`; how many blocks of its prompt come before it, None if not known."""
        with self._lock:
            if row.parent:
                before = self._places.get(row.parent)
                place = None if before is None else before[0] + 1
            else:
                place = 0
            if place is None:
                return None
            self._drop(slot)
            self._places.setdefault(row.key, [place, 0])[1] += 1
            self._keys[slot] = row.key
            return place

    def learn_all(self, slots: Sequence[int], rows: Sequence[RowId]) -> list[int | None]:
        """`learn` for the rows of one call. A chain is written in several calls by several threads: where the call that
        has the parents has not begun yet, wait for it, a moment."""
        places = [self.learn(slot, row) for slot, row in zip(slots, rows, strict=True)]
        for _ in range(_PARENT_WAITS):
            if None not in places:
                break
            time.sleep(_PARENT_WAIT_S)
            for i, place in enumerate(places):
                if place is None:
                    places[i] = self.learn(slots[i], rows[i])
        return places

    def forget(self, slots: Sequence[int]) -> None:
        """Note that slots were released."""
        with self._lock:
            for slot in slots:
                self._drop(slot)

    def _drop(self, slot: int) -> None:
        key = self._keys.pop(slot, None)
        if key is not None:
            entry = self._places[key]
            entry[1] -= 1
            if not entry[1]:
                del self._places[key]

    def __len__(self) -> int:
        return len(self._places)


class CodecMeter:
    """Thread-safe counters of a codec's work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = CodecStats()

    def encoded(self, plain_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """Count rows written down."""
        with self._lock:
            now = self._now
            self._now = msgspec.structs.replace(
                now,
                plain_written_bytes=now.plain_written_bytes + plain_bytes,
                encoded_written_bytes=now.encoded_written_bytes + encoded_bytes,
                encode_s=now.encode_s + seconds,
            )

    def decoded(self, plain_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """Count rows read back."""
        with self._lock:
            now = self._now
            self._now = msgspec.structs.replace(
                now,
                plain_read_bytes=now.plain_read_bytes + plain_bytes,
                encoded_read_bytes=now.encoded_read_bytes + encoded_bytes,
                decode_s=now.decode_s + seconds,
            )

    def stats(self, refused: Mapping[str, int]) -> CodecStats:
        """The counters now, with the rows refused so far."""
        with self._lock:
            return msgspec.structs.replace(self._now, refused=dict(refused))


class CodecTier:
    """A `Tier` around a `Tier`; see the module docstring.

    `codecs` is one codec, or one for each KV-cache group. Recipes D and M encode best at a known absolute position; the
    tier learns it from the chain of parents.
    """

    def __init__(
        self,
        inner: Tier,
        codecs: RowCodec | Mapping[int, RowCodec],
        *,
        row_bytes: int | None = None,
    ) -> None:
        """`row_bytes` is the size of rows given and taken, by default that of the codecs' form; longer rows are allowed
        (engines pad groups to one size), what lies beyond the form is not kept. Raises ConfigError if sizes clash."""
        self._codecs = dict(codecs) if isinstance(codecs, Mapping) else None
        self._codec = None if isinstance(codecs, Mapping) else codecs
        every = list(codecs.values()) if isinstance(codecs, Mapping) else [codecs]
        largest = max(codec.form.row_bytes for codec in every)
        self.row_bytes = largest if row_bytes is None else row_bytes
        if self.row_bytes < largest:
            raise ConfigError(f"rows of {self.row_bytes} bytes are shorter than the codec's form of {largest}")
        self.name = inner.name
        self.lossless = all(codec.lossless for codec in every)
        self.inner = inner
        self._positions = ChainPositions()
        self._scratch = Scratch()
        self._meter = Meter()
        self._work = CodecMeter()
        self._batch_rows = max(1, _BATCH_BYTES // inner.row_bytes)

    def reserve(self, n: int) -> Slots | None:
        """See Tier.reserve."""
        return self.inner.reserve(n)

    def release(self, slots: Slots) -> None:
        """See Tier.release."""
        self.inner.release(slots)
        self._positions.forget(slots.tolist())

    def recover(self) -> list[RecoveredRow]:
        """See Tier.recover. Rows of another codec are among them and turn out FOREIGN when read."""
        found = self.inner.recover()
        for slot, row in found:
            self._positions.learn(slot, row)
        return found

    def close(self) -> None:
        """See Tier.close."""
        self.inner.close()

    def exists(self, rows: Sequence[RowId]) -> list[bool]:
        """See SharedTier.exists; only where the inner tier is shared."""
        return self._shared().exists(rows)

    def adopt(self, slots: Slots, rows: Sequence[RowId]) -> None:
        """See SharedTier.adopt; only where the inner tier is shared."""
        self._shared().adopt(slots, rows)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            self._positions.learn(slot, row)

    def part(self, nonce: bytes) -> None:
        """See SharedTier.part; only where the inner tier is shared."""
        self._shared().part(nonce)

    def write(self, slots: Slots, rows: Sequence[RowId], sources: Sequence[memoryview]) -> list[RowStatus]:
        """See Tier.write. A row the codec cannot write down (not finite, too large) is FULL and counted
        `not_encodable`."""
        check_arguments(slots, rows, sources, self.row_bytes)
        started = time.perf_counter()
        statuses: list[RowStatus] = []
        places = self._positions.learn_all(slots.tolist(), rows)
        for start in range(0, len(rows), self._batch_rows):
            end = min(start + self._batch_rows, len(rows))
            statuses += self._write_batch(slots[start:end], rows[start:end], sources[start:end], places[start:end])
        done = sum(status is RowStatus.OK for status in statuses)
        self._meter.moved(written_bytes=done * self.row_bytes, write_s=time.perf_counter() - started)
        return statuses

    def read(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        """See Tier.read."""
        check_arguments(slots, rows, targets, self.row_bytes)
        started = time.perf_counter()
        statuses: list[RowStatus] = []
        for start in range(0, len(rows), self._batch_rows):
            end = min(start + self._batch_rows, len(rows))
            statuses += self._read_batch(slots[start:end], rows[start:end], targets[start:end])
        done = sum(status is RowStatus.OK for status in statuses)
        self._meter.moved(read_bytes=done * self.row_bytes, read_s=time.perf_counter() - started)
        return statuses

    def probe(self) -> TierProbe:
        """The inner tier's curve in bytes of whole rows, with the time the codec takes added."""
        raw = self.inner.probe()
        codec = self._codec_of(min(self._codecs)) if self._codecs is not None else self._codec_of(0)
        encode_s, decode_s = in_a_thread(lambda: codec_seconds(codec, _PROBE_ROWS))
        read_s = self.inner.row_bytes / raw.read_bytes_per_s + decode_s
        write_s = self.inner.row_bytes / raw.write_bytes_per_s + encode_s
        return TierProbe(raw.read_latency_s, self.row_bytes / read_s, raw.write_latency_s, self.row_bytes / write_s)

    def stats(self) -> TierStats:
        """Sizes of the inner tier; bytes moved counted as whole rows; faults of both."""
        inner = self.inner.stats()
        own = self._meter.stats(
            capacity_rows=inner.capacity_rows,
            used_rows=inner.used_rows,
            cap_bytes=inner.cap_bytes,
            medium_bytes=inner.medium_bytes,
        )
        faults = dict(inner.faults)
        for reason, count in own.faults.items():
            faults[reason] = faults.get(reason, 0) + count
        return TierStats(
            own.capacity_rows, own.used_rows, own.cap_bytes, own.medium_bytes,
            own.read_bytes, own.written_bytes, own.read_s, own.write_s, faults, self._work.stats(own.faults),
            inner.dedup_ratio,
        )  # fmt: skip

    def _shared(self) -> SharedTier:
        if not is_shared(self.inner):
            raise IntegrityError(f"{self.name} belongs to this process alone")
        return self.inner

    def _codec_of(self, group: int) -> RowCodec:
        if self._codec is not None:
            return self._codec
        assert self._codecs is not None
        return self._codecs[group]

    def _buffers(self, n: int) -> list[memoryview]:
        """Buffers of the inner tier's rows, each on a page, the calling thread's until its next batch."""
        stride = -(-self.inner.row_bytes // 4096) * 4096
        whole = self._scratch.bytes_of("rows", n * stride).data
        return [whole[i * stride : i * stride + self.inner.row_bytes] for i in range(n)]

    def _write_batch(
        self,
        slots: Slots,
        rows: Sequence[RowId],
        sources: Sequence[memoryview],
        places: Sequence[int | None],
    ) -> list[RowStatus]:
        statuses = [RowStatus.OK] * len(rows)
        buffers = self._buffers(len(rows))
        began, plain, encoded = time.perf_counter(), 0, 0
        for i, (row, source, place) in enumerate(zip(rows, sources, places, strict=True)):
            if self._codecs is not None and row.group not in self._codecs:
                statuses[i] = RowStatus.FOREIGN
                continue
            codec = self._codec_of(row.group)
            first_token = None if place is None else place * codec.form.tokens
            try:
                size = codec.encode(source[: codec.form.row_bytes], buffers[i], first_token)
            except NotEncodableError as error:
                self._meter.fault(error.reason)
                statuses[i] = RowStatus.FULL
                continue
            np.frombuffer(buffers[i], dtype=np.uint8)[size:] = 0
            plain, encoded = plain + codec.form.row_bytes, encoded + size
        self._work.encoded(plain, encoded, time.perf_counter() - began)
        good = [i for i, status in enumerate(statuses) if status is RowStatus.OK]
        if good:
            written = self.inner.write(slots[good], [rows[i] for i in good], [buffers[i] for i in good])
            for i, status in zip(good, written, strict=True):
                statuses[i] = status
        return statuses

    def _read_batch(self, slots: Slots, rows: Sequence[RowId], targets: Sequence[memoryview]) -> list[RowStatus]:
        buffers = self._buffers(len(rows))
        statuses = self.inner.read(slots, rows, buffers)
        began, plain = time.perf_counter(), 0
        for i, (row, target) in enumerate(zip(rows, targets, strict=True)):
            if statuses[i] is not RowStatus.OK:
                continue
            if self._codecs is not None and row.group not in self._codecs:
                statuses[i] = RowStatus.FOREIGN
                continue
            codec = self._codec_of(row.group)
            try:
                codec.decode(buffers[i], target[: codec.form.row_bytes])
                plain += codec.form.row_bytes
            except ForeignBlockError as error:
                self._meter.fault(error.reason)
                statuses[i] = RowStatus.FOREIGN
            except CorruptBlockError as error:
                self._meter.fault(error.reason)
                statuses[i] = RowStatus.CORRUPT
        done = sum(status is RowStatus.OK for status in statuses)
        self._work.decoded(plain, done * self.inner.row_bytes, time.perf_counter() - began)
        return statuses


def codec_seconds(codec: RowCodec, repeats: int = 3) -> tuple[float, float]:
    """Seconds to encode and to decode one row, the best of a few tries on made-up numbers."""
    row = np.random.default_rng(0).integers(0, 256, codec.form.row_bytes, dtype=np.uint8)
    if codec.form.kind != "opaque":
        for numbers in codec.form.views(row):
            values = np.random.default_rng(1).standard_normal(numbers.shape, dtype=np.float32)
            NumpyArithmetic().store(values, numbers, codec.form.dtype)
    target = memoryview(bytearray(codec.encoded_bytes))
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        started = time.perf_counter()
        codec.encode(row.data, target, 0)
        encoded = time.perf_counter()
        codec.decode(target, row.data)
        ended = time.perf_counter()
        best = [min(best[0], encoded - started), min(best[1], ended - encoded)]
    return best[0], best[1]


def in_a_thread(call: Callable[[], T]) -> T:
    """Run where codecs run: in a thread that keeps torch to one core. Raises what the call raises."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - thread boundary: raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="kvtier-codec-probe")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
