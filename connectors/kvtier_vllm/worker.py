"""The worker on machines without a GPU: copies blocks between vLLM's CPU KV cache and the shared memory rows.

On CUDA vLLM's own worker does this. Here one thread copies in order of submission; numpy releases the GIL, so the
forward pass goes on. Runs of consecutive blocks and rows are one strided copy per tensor.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

Bytes = npt.NDArray[np.int8]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    store: bool
    device: GPULoadStoreSpec
    rows: npt.NDArray[np.int32]


class HostWorker(OffloadingWorker):
    """Copies on one thread. `submit_*`, `get_finished` and `wait` come from the model runner's thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._device: list[Bytes] = []
        self._host: list[Bytes] = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self._device.append(cache.tensor.view(-1, page).numpy())
            view = region.create_next_worker_view(page * blocks_per_chunk).numpy()
            self._host.append(_by_block(view, blocks_per_chunk, page))
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: list[TransferResult] = []
        self._pending: set[int] = set()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-host-copy", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(job_id, False, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("kvtier's copy thread failed") from self._failure
            results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._pending.isdisjoint(job_ids))

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._device.clear()
        self._host.clear()
        # The scheduler side has unlinked the name already; nothing is left to remove.
        self._region._creator = self._region._creator and os.path.exists(self._region.mmap_path)
        self._region.cleanup()

    # --- copy thread --------------------------------------------------------------------------------------------

    def _submit(self, job_id: int, store: bool, device: GPULoadStoreSpec, rows: LoadStoreSpec) -> bool:
        assert isinstance(rows, BlockIDsLoadStoreSpec)
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put(_Job(job_id, store, device, rows.block_ids))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.perf_counter()
            try:
                moved = self._copy(job)
            except BaseException as error:  # noqa: BLE001 - thread boundary: raised again on the runner's thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            result = TransferResult(job.job_id, True, moved, time.perf_counter() - began)
            with self._changed:
                self._pending.discard(job.job_id)
                self._results.append(result)
                self._changed.notify_all()

    def _copy(self, job: _Job) -> int:
        blocks = job.device.block_ids.astype(np.int64)
        per_chunk, moved = self._blocks_per_chunk, 0
        block_at = row_at = 0
        for tensors, size, first in zip(self._groups, job.device.group_sizes, job.device.block_indices, strict=True):
            if not size:
                continue
            # A load may begin in the middle of a chunk: `first` is the logical index of the group's first block.
            slots = first % per_chunk + np.arange(size)
            chunks = int(slots[-1]) // per_chunk + 1
            rows = job.rows[row_at : row_at + chunks].astype(np.int64)[slots // per_chunk]
            places = rows * per_chunk + slots % per_chunk
            mine = blocks[block_at : block_at + size]
            for start, stop in _runs(mine, places):
                for tensor in tensors:
                    device, host = self._device[tensor], self._host[tensor]
                    moved += _copy_run(device, host, mine, places, start, stop, per_chunk, job.store)
            block_at += size
            row_at += chunks
        return moved


def _by_block(view: Bytes, blocks_per_chunk: int, page: int) -> Bytes:
    """(rows, chunk bytes) as (rows, blocks, page): no copy."""
    row_stride = view.strides[0]
    return np.lib.stride_tricks.as_strided(
        view, (view.shape[0], blocks_per_chunk, page), (row_stride, page, 1), writeable=True
    )


def _runs(blocks: Indices, places: Indices) -> list[tuple[int, int]]:
    """Maximal runs in which block and place both go up by one."""
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(places) != 1)) + 1
    bounds = [0, *breaks.tolist(), len(blocks)]
    return list(itertools.pairwise(bounds))


def _copy_run(
    device: Bytes, host: Bytes, blocks: Indices, places: Indices, start: int, stop: int, per_chunk: int, store: bool
) -> int:
    n = stop - start
    block, place = int(blocks[start]), int(places[start])
    if per_chunk == 1:
        rows = host[place : place + n, 0]
        pages = device[block : block + n]
        np.copyto(rows, pages) if store else np.copyto(pages, rows)
    else:
        for i in range(n):
            row, part = divmod(place + i, per_chunk)
            target, page = host[row, part], device[block + i]
            np.copyto(target, page) if store else np.copyto(page, target)
    return n * int(device.shape[1])
