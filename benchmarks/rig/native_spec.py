"""vLLM's own tiered offloading on a machine without a GPU.

vLLM 0.32 refuses to start its copy worker on CPUs; everything else of its tiering (memory tier, `fs` tier, scheduling)
runs there unchanged. This spec replaces the worker alone, by the one kvtier uses on CPUs: both copy in the same way.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_vllm.worker import HostWorker


class NativeTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with a worker that copies from host memory to host memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
