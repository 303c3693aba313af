"""What checks of memory cost: stores into memory and loads from it by vLLM's worker, with seals and without.

    python -m benchmarks.memory_checks [--row-bytes 2097152] [--rows 128] [--rounds 9]

The worker kvtier has on CPUs copies blocks of a device cache into shared rows and back, alone and inside
`SealedWorker`, in turns. Each time is from the submission to the step at which the engine is told; the engine steps
every 0.2 ms, as one that has nothing else to do. Prints one JSON object a line: medians of the rounds, and the median
of the paired ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier.cache.seals import Seals
from kvtier_vllm.sealed_worker import SealedWorker
from kvtier_vllm.worker import HostWorker

_LAYERS = 8
_STEP_S = 0.0002


class Bench:
    """One worker over a region of its own."""

    def __init__(self, row_bytes: int, rows: int, *, sealed: bool) -> None:
        page = row_bytes // _LAYERS
        tensors = [torch.randint(-128, 127, (rows, page), dtype=torch.int8) for _ in range(_LAYERS)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page) for tensor in tensors],
            [[CanonicalKVCacheRef(i, page) for i in range(_LAYERS)]],
        )
        region = SharedOffloadRegion(f"bench-{uuid.uuid4()}", rows, 0, row_bytes, row_bytes)
        self.worker: OffloadingWorker = HostWorker(caches, region, 1)
        if sealed:
            memory = np.frombuffer(region.create_kv_memoryview().cast("B"), np.uint8).reshape(rows, -1)
            self.worker = SealedWorker(self.worker, Seals.own(rows, row_bytes), 0, memory)
        self._all = np.arange(rows)
        self._jobs = 0

    def seconds(self, *, store: bool) -> float:
        """Move every row once."""
        device = GPULoadStoreSpec(self._all.tolist(), group_sizes=[len(self._all)], block_indices=[0])
        rows = CPULoadStoreSpec(self._all.tolist())
        self._jobs += 1
        began = time.perf_counter()
        if store:
            self.worker.submit_store(self._jobs, device, rows)
        else:
            self.worker.submit_load(self._jobs, rows, device)
        while not self.worker.get_finished():
            time.sleep(_STEP_S)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    plain, sealed = (Bench(given.row_bytes, given.rows, sealed=sealed) for sealed in (False, True))
    for store in (True, False):
        pairs = []
        for number in range(given.rounds + 1):
            order = (plain, sealed) if number % 2 else (sealed, plain)
            seconds = {bench: bench.seconds(store=store) for bench in order}
            pairs.append((seconds[plain], seconds[sealed]))
        alone, checked = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
        total = given.row_bytes * given.rows
        line = {
            "op": "store" if store else "load",
            "bytes": total,
            "row_bytes": given.row_bytes,
            "copy_ms": round(1e3 * alone, 2),
            "copy_and_seal_ms": round(1e3 * checked, 2),
            "ratio": round(statistics.median(both / one for one, both in pairs[1:]), 3),
            "copy_bytes_per_s": round(total / alone),
        }
        print(json.dumps(line))
    for bench in (plain, sealed):
        bench.worker.shutdown()


if __name__ == "__main__":
    main()
