"""The worker of an encoded memory tier: device blocks in vLLM's cache, int8 rows in host memory.

On CUDA Triton kernels encode before the bus and decode after it; vLLM's own copy worker moves plain rows by DMA. The
device is behind the courier and a stream: the same code runs, and is tested, on the CPU. It has not run on CUDA.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier.codec.form import RowForm
from kvtier.errors import ConfigError
from kvtier_kernels.courier import Int8Courier
from kvtier_kernels.dispatch import Dispatcher
from kvtier_kernels.pages import PagedKV, paged_kv


class _Job(NamedTuple):
    job_id: int
    n_bytes: int
    began_s: float
    done: Any
    held: list[torch.Tensor]


class CodedWorker(OffloadingWorker):
    """Copies in order of submission, on one stream. All calls come from the model runner's thread."""

    def __init__(self, courier: Int8Courier, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._courier = courier
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._rows = region.create_next_worker_view(courier.block_bytes * blocks_per_chunk)
        self._cuda = courier.kv.pointers.is_cuda
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._jobs: list[_Job] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        done = [job for job in self._jobs if job.done is None or job.done.query()]
        self._jobs = [job for job in self._jobs if job not in done]
        now = time.perf_counter()
        return [TransferResult(job.job_id, True, job.n_bytes, now - job.began_s) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job in self._jobs:
            if job.job_id in job_ids and job.done is not None:
                job.done.synchronize()

    def shutdown(self) -> None:
        self.wait({job.job_id for job in self._jobs})
        self._region._creator = self._region._creator and os.path.exists(self._region.mmap_path)
        self._region.cleanup()

    def _submit(self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool) -> bool:
        assert isinstance(host, BlockIDsLoadStoreSpec)
        began_s = time.perf_counter()
        blocks = device.block_ids.astype(np.int64).tolist()
        # A load may begin in the middle of a chunk: block_indices is the logical index of the first block.
        places = device.block_indices[0] % self._per_chunk + np.arange(len(blocks))
        chunks = host.block_ids.astype(np.int64)[places // self._per_chunk]
        size = self._courier.block_bytes
        rows = [
            self._rows[chunk, part * size : (part + 1) * size]
            for chunk, part in zip(chunks.tolist(), (places % self._per_chunk).tolist(), strict=True)
        ]
        with self._on_stream():
            held = self._courier.encode(blocks, rows) if store else self._courier.decode(blocks, rows)
            done = None
            if self._cuda:
                done = torch.cuda.Event()
                done.record()
        self._jobs.append(_Job(job_id, len(blocks) * size, began_s, done, held))
        return True

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Our stream, after everything the model has queued: it writes the blocks we store, and has read those we
        overwrite."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


def courier_of(kv_caches: CanonicalKVCaches, form: RowForm) -> Int8Courier:
    """The courier of vLLM's registered caches, one tensor a layer. Raises ConfigError, EngineMismatchError."""
    tensors = [cache.tensor for cache in kv_caches.tensors]
    capability = torch.cuda.get_device_capability(tensors[0].device) if tensors[0].is_cuda else None
    return Int8Courier(_pages(tensors, form), Dispatcher(tensors[0].device.type, capability))


def _pages(tensors: list[torch.Tensor], form: RowForm) -> PagedKV:
    """vLLM's pages as [blocks, heads, tokens, K‖V] of each layer."""
    tokens, axes = form.tokens // form.blocks, form.axes.replace("b", "")
    if len(tensors) != form.layers or form.packing or axes not in ("lhtkd", "lthkd"):
        raise ConfigError(
            "an encoded memory tier needs one cache a layer with keys and values side by side, as vLLM has them on "
            "GPUs (VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC); remove dram from codecs"
        )
    dtype = getattr(torch, form.dtype)
    layers = []
    for tensor in tensors:
        numbers = tensor.view(dtype)
        if axes == "lhtkd":
            layers.append(numbers.view(len(tensor), form.heads, tokens, 2 * form.head_dim))
        else:
            layers.append(numbers.view(len(tensor), tokens, form.heads, 2 * form.head_dim).transpose(1, 2))
    return paged_kv(layers)
