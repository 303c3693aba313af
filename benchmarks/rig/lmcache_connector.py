"""LMCache inside vLLM's process on a machine without a GPU.

LMCache 0.5.6 has device connectors for CUDA, XPU, HPU and MUSA and falls back to recomputing everything on a CPU. This
module gives it one for host memory; LMCache's engine, memory pool and back ends run unchanged.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class LMCacheOnHost(LMCacheConnectorV1):
    """`LMCacheConnectorV1` whose engine copies with `HostConnector`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # LMCache imports numba, which must not be loaded before vLLM's CPU worker has started: so not at the top.
        import lmcache.v1.gpu_connector as device_connectors

        from benchmarks.rig.lmcache_host import HostConnector

        device_connectors.CreateGPUConnector = lambda *_, **__: HostConnector()
        super().__init__(*args, **kwargs)
