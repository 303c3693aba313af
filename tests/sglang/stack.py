"""One rank of SGLang without a server: its pools, radix tree, HiCache controller and threads over kvtier's storage."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from typing import Any

PAGE_TOKENS, PAGES = 16, 10
TOKENS = PAGE_TOKENS * PAGES
DEVICE_TOKENS = 1_024
_WAIT_S = 60.0


class Stack:
    """Device pool, allocator, radix tree, host pool and storage level as one rank of SGLang has them.

    `options` are the storage level's, beside an nvme tier in `folder`; without a folder there is no storage level.
    """

    def __init__(
        self,
        pool: str,
        layout: str,
        folder: str = "",
        *,
        device_tokens: int = DEVICE_TOKENS,
        host_ratio: float = 2.0,
        policy: str = "lru",
        **options: Any,
    ) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_context

        settings = {
            "device": "cpu",
            "page_size": PAGE_TOKENS,
            "enable_hierarchical_cache": True,
            "hicache_ratio": host_ratio,
            "hicache_io_backend": "kernel" if layout == "page_first" else "direct",
            "hicache_mem_layout": layout,
            "hicache_write_policy": "write_through",
        }
        if folder:
            settings |= {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps({**_storage(folder), **options}),
            }
        self._settings = get_context().override_server_args(**settings)
        server = self._settings.install()
        self.pool = _device_pool(pool, device_tokens)
        self.allocator = PagedTokenToKVPoolAllocator(
            device_tokens, PAGE_TOKENS, torch.float32, "cpu", self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, 512, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            tp_cache_group=torch.distributed.group.WORLD,
            enable_kv_cache_events=False,
            eviction_policy=policy,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(server, params)
        backend = self.tree.cache_controller.storage_backend if folder else None
        self.storage = getattr(backend, "_backend", backend)  # behind SGLang's failure injector, if that is on

    def buffers(self) -> list[Any]:
        """The device's memory, layer by layer."""
        named = [getattr(self.pool, name, None) for name in ("k_buffer", "v_buffer", "kv_buffer")]
        return [layer for buffers in named if buffers is not None for layer in buffers]

    def bytes_at(self, indices: Any) -> list[bytes]:
        """What lies at these token slots, layer by layer."""
        return [layer[indices].numpy().tobytes() for layer in self.buffers()]

    def wipe(self) -> None:
        """So that nothing left over can pass for loaded."""
        for layer in self.buffers():
            layer.fill_(-1)

    def match(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def compute(self, tokens: list[int], stored: bool = True) -> list[bytes]:
        """As after a prefill: fill the device with bytes of their own, insert, wait until every level was written to,
        and has them if `stored`."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        indices = self.allocator.alloc(len(tokens))
        for layer in self.buffers():
            layer[indices] = torch.randn(len(tokens), *layer.shape[1:], dtype=layer.dtype)
        written = self.bytes_at(indices)
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=indices))
        rows = self.storage.cache.geometry.groups * len(tokens) // PAGE_TOKENS if stored else 0
        self.until(lambda: self.rows() >= rows and not self.tree.ongoing_backup)
        return written

    def rows(self) -> int:
        """Rows in kvtier's tiers."""
        return sum(int(level.residency.resident_rows) for level in self.storage.cache.levels)

    def evict(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=TOKENS))

    def flush(self) -> None:
        """As POST /flush_cache: device and host forget, the storage level stays."""
        self.tree.reset()
        self.allocator.clear()

    def begin_prefetch(self, tokens: list[int], request: str, **whose: str) -> Any:
        """Have the storage level asked for a request's prompt; `whose` are its extra_key and cache_salt."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle = CacheRequestHandle(request, 0)
        node = self.match(tokens).last_host_node
        self.tree.prefetch_from_storage(handle, node, array("q", tokens), None, [], **whose)
        return handle

    def prefetch(self, tokens: list[int], request: str, **whose: str) -> int:
        """Tokens that the storage level brought to the host for this request."""
        handle = self.begin_prefetch(tokens, request, **whose)
        self.until(lambda: self.tree.check_prefetch_progress(handle))
        return int(self.tree.pop_prefetch_loaded_tokens(handle))

    def load_back(self, tokens: list[int]) -> tuple[int, list[bytes]]:
        """From host to device: how many tokens, and what arrived there."""
        self.wipe()
        match = self.match(tokens)
        found = int(match.host_hit_length)
        if found:
            self.load(match)
        return found, self.bytes_at(self.tree.path_device_indices(self.match(tokens).last_device_node))

    def load(self, match: Any) -> bool:
        """Bring what a match found on the host to the device. False if there is no room."""
        if not self.tree.load_back(match.best_match_node):
            return False
        self.tree.ready_to_load_host_cache()
        for ack in list(self.tree.cache_controller.ack_load_queue):
            ack.finish_event.synchronize()
        self.tree.loading_check()
        return True

    def close(self) -> None:
        """End the storage threads and close kvtier's tiers."""
        import atexit

        atexit.unregister(self.tree.shutdown)
        self.tree.shutdown()
        self._settings.restore()

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            self.tree.check_hicache_events()
            if done():
                return
            assert time.monotonic() < deadline, "SGLang's threads did not get there"
            time.sleep(0.005)


def _storage(folder: str) -> dict[str, Any]:
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
        "nvme_path": folder,
        "nvme_bytes": "16MiB",
        "weights_fingerprint": "made up",
    }


def _device_pool(kind: str, tokens: int) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {
        "size": tokens,
        "page_size": PAGE_TOKENS,
        "dtype": torch.float32,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **common)
    return MHATokenToKVPool(head_num=2, head_dim=32, **common)


def become_a_rank() -> None:
    """What SGLang's scheduler does before it builds its caches, for a world of one."""
    import kvtier_sglang_cpu
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    kvtier_sglang_cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank")
    get_parallel().override_permanently(**dict.fromkeys(ranks, 0))
