"""Checks of memory: what the engine's worker writes there is sealed before it can be found, and what it copies out is
verified while it is copied.

Around any worker of vLLM's. Threads of ours hash rows: those of a store once they are in memory, those of a load while
they are on their way to the device. A load is reported finished when it is copied and verified; one that read a damaged
row is reported failed as well, and vLLM computes what it should have brought. Seals lie in memory that vLLM's scheduler
maps too: there the damaged rows are dropped.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.cache.seals import Seals

Rows = npt.NDArray[np.int32]

_MOST_THREADS = 4
"""A core hashes about 20 GB/s of rows that no cache holds; a few keep up with the bus of one device."""
_PART_ROWS = 8
"""Rows below which another thread is not worth its start."""


def shared_seals(path: str, rows: int, parts: int) -> npt.NDArray[np.uint64]:
    """Seals that all processes see which map `path`: [rows, parts]. Whoever comes first makes the file, all zero; its
    name can go once everybody has mapped it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.ftruncate(descriptor, rows * parts * 8)
        shared = mmap.mmap(descriptor, rows * parts * 8)
    finally:
        os.close(descriptor)
    return np.frombuffer(shared, np.uint64).reshape(rows, parts)


@dataclass(slots=True, eq=False)
class _Job:
    store: bool
    rows: Rows
    hashing: list[Future[bool]] = field(default_factory=list)
    result: TransferResult | None = None


class SealedWorker(OffloadingWorker):
    """`worker`, with seals. All calls come from the model runner's thread."""

    def __init__(self, worker: OffloadingWorker, seals: Seals, part: int, rows: npt.NDArray[np.uint8]) -> None:
        """`rows` is this worker's part of memory, number `part` of every row: [rows, bytes]."""
        self.inner = worker
        self._seals = seals
        self._part = part
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvtier-seal")
        self._jobs: dict[int, _Job] = {}
        self._failed: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._jobs[job_id] = _Job(True, _rows_of(dst_spec))
        return bool(self.inner.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **options: Any) -> bool:
        accepted = bool(self.inner.submit_load(job_id, src_spec, dst_spec, **options))
        job = self._jobs[job_id] = _Job(False, _rows_of(src_spec))
        self._hash(job)
        return accepted

    def get_finished(self) -> list[TransferResult]:
        for result in self.inner.get_finished():
            job = self._jobs[result.job_id]
            job.result = result
            if job.store and not job.hashing:
                self._hash(job)
        results = []
        for job_id, job in list(self._jobs.items()):
            if job.result is not None and all(future.done() for future in job.hashing):
                del self._jobs[job_id]
                if not all([future.result() for future in job.hashing]):
                    self._failed.add(job_id)
                results.append(job.result)
        return results

    def take_failed(self) -> set[int]:
        """Loads that read a damaged row, of those finished since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        self.inner.wait(job_ids)
        for job_id in job_ids & self._jobs.keys():
            job = self._jobs[job_id]
            # Rows and blocks may be somebody else's after this: nothing of ours may read or seal them later.
            if job.store and not job.hashing:
                self._hash(job)
            wait_for(job.hashing)

    def shutdown(self) -> None:
        self._pool.shutdown()
        self._rows = None  # the region is unmapped next
        self.inner.shutdown()

    # --- threads ------------------------------------------------------------------------------------------------

    def _hash(self, job: _Job) -> None:
        n = max(1, min(self._threads, len(job.rows) // _PART_ROWS))
        job.hashing += [self._pool.submit(self._sealed, job.store, part) for part in np.array_split(job.rows, n)]

    def _sealed(self, store: bool, rows: Rows) -> bool:
        """Seal what was stored; whether what is loaded is as it was sealed."""
        assert self._rows is not None
        whole = True
        for row in rows.tolist():
            view = self._rows[row].data
            if store:
                self._seals.set_part(row, self._part, view)
            else:
                whole &= self._seals.intact_part(row, self._part, view)
        return whole


def _rows_of(spec: LoadStoreSpec) -> Rows:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return spec.block_ids.astype(np.int32)
