"""io_uring by raw system calls: a batch of vectored transfers in one call.

The rings are memory shared with the kernel. Python has no memory barriers; on x86-64, where stores are seen in order
and every system call is a barrier, none are needed: entries are published before, and read after, `io_uring_enter`,
which this thread alone calls on its ring. On other machines this back end is not offered.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier.tiers.addresses import address_of
from kvtier.tiers.nvme.io import IOV_MAX, DirectFile

if TYPE_CHECKING:
    from kvtier.tiers.nvme.batch import Request

_SETUP, _ENTER = 425, 426
_GETEVENTS = 1
_READV, _WRITEV = 1, 2
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_PARAMS_BYTES, _SQE_BYTES, _CQE_BYTES = 120, 64, 16
_SQE = struct.Struct("<BBHiQQIIQ")
_CQE = struct.Struct("<QiI")
_WORD = struct.Struct("<I")
_ENTRIES = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def uring_missing() -> str:
    """Why io_uring cannot be used here; empty if it can."""
    if platform.machine() != "x86_64":
        return f"io_uring is used on x86-64 only, this is {platform.machine()}"
    try:
        Ring(1).close()
    except OSError as error:
        return f"io_uring is not available ({error.strerror})"
    return ""


class Ring:
    """One submission and one completion queue, for one thread at a time. Raises OSError where the kernel refuses."""

    def __init__(self, entries: int) -> None:
        params = ctypes.create_string_buffer(_PARAMS_BYTES)
        self.fd = _checked(_libc.syscall(_SETUP, ctypes.c_uint(entries), params))
        fields = struct.unpack_from("<10I", params.raw)
        self.entries, cq_entries = fields[0], fields[1]
        _, self._sq_tail_at, self._sq_mask_at, _, _, _, sq_array_at = struct.unpack_from("<7I", params.raw, 40)
        self._cq_head_at, self._cq_tail_at, cq_mask_at, _, _, self._cqes_at = struct.unpack_from("<6I", params.raw, 80)
        try:
            self._sq = self._map(sq_array_at + 4 * self.entries, _OFF_SQ_RING)
            self._cq = self._map(self._cqes_at + _CQE_BYTES * cq_entries, _OFF_CQ_RING)
            self._sqes = self._map(_SQE_BYTES * self.entries, _OFF_SQES)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise OSError(getattr(error, "errno", None) or errno.ENOMEM, "the rings cannot be mapped") from error
        self._cq_mask = _WORD.unpack_from(self._cq, cq_mask_at)[0]
        for i in range(self.entries):
            _WORD.pack_into(self._sq, sq_array_at + 4 * i, i)

    def run(self, fd: int, calls: Sequence[tuple[int, int, int, int]]) -> list[int]:
        """Carry out up to `entries` calls of (opcode, offset, address of iovecs, their number); the result of each:
        bytes moved, or -errno. Returns when the kernel is done with all memory. Raises OSError if the ring breaks."""
        tail = _WORD.unpack_from(self._sq, self._sq_tail_at)[0]
        mask = _WORD.unpack_from(self._sq, self._sq_mask_at)[0]
        for i, (opcode, offset, address, count) in enumerate(calls):
            at = ((tail + i) & mask) * _SQE_BYTES
            self._sqes[at : at + _SQE_BYTES] = bytes(_SQE_BYTES)
            _SQE.pack_into(self._sqes, at, opcode, 0, 0, fd, offset, address, count, 0, i)
        _WORD.pack_into(self._sq, self._sq_tail_at, (tail + len(calls)) & 0xFFFFFFFF)
        results: dict[int, int] = {}
        unsent = len(calls)
        while len(results) < len(calls):
            sent = self._enter(unsent, len(calls) - len(results))
            unsent -= sent
            self._reap(results)
        return [results[i] for i in range(len(calls))]

    def close(self) -> None:
        """Unmap and close. Nothing is in flight."""
        for mapping in (self._sq, self._cq, self._sqes):
            mapping.close()
        os.close(self.fd)

    def _map(self, length: int, offset: int) -> mmap.mmap:
        return mmap.mmap(self.fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)

    def _enter(self, to_submit: int, at_least: int) -> int:
        while True:
            done = _libc.syscall(
                _ENTER, self.fd, ctypes.c_uint(to_submit), ctypes.c_uint(at_least), ctypes.c_uint(_GETEVENTS), None, 0
            )
            if done >= 0:
                return int(done)
            if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                return _checked(done)

    def _reap(self, results: dict[int, int]) -> None:
        head = _WORD.unpack_from(self._cq, self._cq_head_at)[0]
        tail = _WORD.unpack_from(self._cq, self._cq_tail_at)[0]
        while head != tail:
            index, result, _ = _CQE.unpack_from(self._cq, self._cqes_at + (head & self._cq_mask) * _CQE_BYTES)
            results[index] = result
            head = (head + 1) & 0xFFFFFFFF
        _WORD.pack_into(self._cq, self._cq_head_at, head)


class UringIo:
    """A `BatchIo` over io_uring: a ring for every thread that needs one at the same time."""

    name = "io_uring"
    depth = _ENTRIES

    def __init__(self, file: DirectFile) -> None:
        """Raises OSError where the kernel refuses."""
        self._file = file
        self._lock = threading.Lock()
        self._idle = [Ring(_ENTRIES)]
        self._broken: list[object] = []

    def transfer(self, requests: Sequence[Request], *, write: bool) -> list[OSError | None]:
        """See `BatchIo`. What the kernel moves only partly is finished by ordinary calls."""
        outcomes: list[OSError | None] = []
        for start in range(0, len(requests), _ENTRIES):
            outcomes += self._run(requests[start : start + _ENTRIES], write)
        return outcomes

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for ring in idle:
            ring.close()

    def _run(self, requests: Sequence[Request], write: bool) -> list[OSError | None]:
        vectors = [_vector(request.buffers) for request in requests]
        opcode = _WRITEV if write else _READV
        calls = [
            (opcode, request.offset, ctypes.addressof(vector), len(vector))
            for request, vector in zip(requests, vectors, strict=True)
        ]
        try:
            with self._ring() as ring:
                try:
                    moved = ring.run(self._file.fd, calls)
                except OSError:
                    # The kernel may still write to this memory: it must outlive us, and the ring is not used again.
                    self._broken.append((ring, vectors, requests))
                    raise
        except OSError as error:
            return [error] * len(requests)
        return [self._finish(request, n, write) for request, n in zip(requests, moved, strict=True)]

    def _finish(self, request: Request, moved: int, write: bool) -> OSError | None:
        if moved < 0:
            return OSError(-moved, os.strerror(-moved), self._file.path)
        if moved == sum(buffer.nbytes for buffer in request.buffers):
            return None
        try:
            (self._file.write if write else self._file.read)(request.offset, request.buffers)
        except OSError as error:
            return error
        return None

    @contextmanager
    def _ring(self) -> Iterator[Ring]:
        with self._lock:
            ring = self._idle.pop() if self._idle else None
        if ring is None:
            ring = Ring(_ENTRIES)
        yield ring
        with self._lock:
            self._idle.append(ring)


def _vector(buffers: Sequence[memoryview]) -> ctypes.Array[_Iovec]:
    """The first IOV_MAX buffers as the kernel wants them; more than that is a partial transfer, finished later."""
    taken = buffers[:IOV_MAX]
    vector = (_Iovec * len(taken))()
    for entry, buffer in zip(vector, taken, strict=True):
        entry.base, entry.length = address_of(buffer), buffer.nbytes
    return vector


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
