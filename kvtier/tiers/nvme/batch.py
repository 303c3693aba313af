"""How a batch of transfers reaches the drive: one call after another, io_uring, or cuFile. Chosen by measuring."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from kvtier.errors import ConfigError
from kvtier.tiers.nvme.gds import CuFileIo, gds_missing, load_cufile
from kvtier.tiers.nvme.io import BLOCK, DirectFile
from kvtier.tiers.nvme.uring import UringIo, uring_missing

BACKENDS = ("auto", "threads", "io_uring", "cufile")
_PROBE_REQUESTS = 8
_PROBE_THREADS = 4
_PROBE_ROUNDS = 5


class Request(NamedTuple):
    """One transfer between adjacent bytes of the file, from `offset` on, and `buffers`."""

    offset: int
    buffers: Sequence[memoryview]


class BatchIo(Protocol):
    """Carries out requests, `depth` at most at a time. Thread-safe for disjoint ranges."""

    name: str
    depth: int

    def transfer(self, requests: Sequence[Request], *, write: bool) -> list[OSError | None]:
        """Carry out all requests, each wholly or with an error. Blocks. Raises nothing."""
        ...

    def close(self) -> None:
        """Give back what is held. Nothing is in flight."""
        ...


class ThreadsIo:
    """One preadv or pwritev after another in the calling thread: the mover's I/O threads are the queue depth."""

    name = "threads"
    depth = 1

    def __init__(self, file: DirectFile) -> None:
        self._file = file

    def transfer(self, requests: Sequence[Request], *, write: bool) -> list[OSError | None]:
        call = self._file.write if write else self._file.read
        outcomes: list[OSError | None] = []
        for request in requests:
            try:
                call(request.offset, request.buffers)
                outcomes.append(None)
            except OSError as error:
                outcomes.append(error)
        return outcomes

    def close(self) -> None:
        pass


def open_batch_io(
    file: DirectFile, wanted: str, scratch_offset: int, scratch_bytes: int, fault: Callable[[str], None]
) -> BatchIo:
    """The back end named, or with "auto" the first no slower than threads on the scratch.

    Raises ConfigError if the one named cannot work here.
    """
    if wanted not in BACKENDS:
        raise ConfigError(f"the nvme back end is {wanted!r}; choose one of {', '.join(BACKENDS)}")
    plain = ThreadsIo(file)
    makers: dict[str, tuple[str, Callable[[], BatchIo]]] = {
        "cufile": (gds_missing(), lambda: CuFileIo(file, load_cufile())),
        "io_uring": (uring_missing(), lambda: UringIo(file)),
    }
    if wanted in makers:
        missing, make = makers[wanted]
        if missing:
            raise ConfigError(f"the nvme back end {wanted!r} cannot be used: {missing}")
        return make()
    if wanted == "threads" or not file.direct:
        return plain
    working = [make for missing, make in makers.values() if not missing]
    return _fastest(plain, working, scratch_offset, scratch_bytes, fault)


def _fastest(
    plain: ThreadsIo,
    makers: Sequence[Callable[[], BatchIo]],
    offset: int,
    scratch_bytes: int,
    fault: Callable[[str], None],
) -> BatchIo:
    """Time each candidate against the same requests in as many threads as the mover has by default, in turns."""
    piece = scratch_bytes // _PROBE_REQUESTS // BLOCK * BLOCK
    if not piece:
        return plain
    memory = memoryview(mmap.mmap(-1, piece * _PROBE_REQUESTS))
    requests = [Request(offset + i * piece, [memory[i * piece : (i + 1) * piece]]) for i in range(_PROBE_REQUESTS)]
    with ThreadPoolExecutor(_PROBE_THREADS) as pool:

        def by_threads(*, write: bool) -> list[OSError | None]:
            parts = pool.map(lambda request: plain.transfer([request], write=write), requests)
            return [outcome for part in parts for outcome in part]

        for make in makers:
            try:
                candidate = make()
            except OSError:
                fault("backend_not_opened")
                continue
            if not _is_faster(candidate.transfer, by_threads, requests, fault):
                candidate.close()
                continue
            return candidate
    return plain


def _is_faster(
    ours: Callable[..., list[OSError | None]],
    theirs: Callable[..., list[OSError | None]],
    requests: Sequence[Request],
    fault: Callable[[str], None],
) -> bool:
    """Whether a candidate works and is not slower than threads, writes and reads together, by medians of rounds."""
    ratios = []
    for k in range(_PROBE_ROUNDS + 1):
        seconds = [0.0, 0.0]
        for write in (True, False):
            begin_s = time.perf_counter()
            if any(ours(requests, write=write)):
                fault("backend_io_error")
                return False
            middle_s = time.perf_counter()
            theirs(write=write)
            seconds[0] += middle_s - begin_s
            seconds[1] += time.perf_counter() - middle_s
        if k:
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios) <= 1.0
