"""SGLang's own pools, radix tree and HiCache controller over kvtier, without a server: run in SGLang's environment.

One process goes through every combination of pool and host layout in seconds, where a server takes most of a minute to
start. The bytes are made up; what is compared is that they come back to the device unchanged from every level.
"""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE_TOKENS, PAGES = 16, 10
TOKENS = PAGE_TOKENS * PAGES
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = ("mha", "mla")
_DEVICE_TOKENS = 1_024
_WAIT_S = 60.0


class Stack:
    """Device pool, allocator, radix tree, host pool and storage level as one rank of SGLang has them."""

    def __init__(self, pool: str, layout: str, folder: str) -> None:
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
            "hicache_ratio": 2.0,
            "hicache_io_backend": "kernel" if layout == "page_first" else "direct",
            "hicache_mem_layout": layout,
            "hicache_write_policy": "write_through",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(_storage(folder)),
        }
        self._settings = get_context().override_server_args(**settings)
        server = self._settings.install()
        self.pool = _device_pool(pool)
        self.allocator = PagedTokenToKVPoolAllocator(
            _DEVICE_TOKENS, PAGE_TOKENS, torch.float32, "cpu", self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, 512, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            tp_cache_group=torch.distributed.group.WORLD,
            enable_kv_cache_events=False,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(server, params)
        backend = self.tree.cache_controller.storage_backend
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

    def compute(self, tokens: list[int]) -> list[bytes]:
        """As after a prefill: fill the device with bytes of their own, insert, wait until every level has them."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        indices = self.allocator.alloc(len(tokens))
        for layer in self.buffers():
            layer[indices] = torch.randn(len(tokens), *layer.shape[1:], dtype=layer.dtype)
        written = self.bytes_at(indices)
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=indices))
        rows = self.storage.cache.geometry.groups * len(tokens) // PAGE_TOKENS
        self._until(lambda: self.rows() >= rows and not self.tree.ongoing_backup)
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
        self._until(lambda: self.tree.check_prefetch_progress(handle))
        return int(self.tree.pop_prefetch_loaded_tokens(handle))

    def load_back(self, tokens: list[int]) -> tuple[int, list[bytes]]:
        """From host to device: how many tokens, and what arrived there."""
        self.wipe()
        match = self.match(tokens)
        found = int(match.host_hit_length)
        if found:
            assert self.tree.load_back(match.best_match_node)
            self.tree.ready_to_load_host_cache()
            for ack in list(self.tree.cache_controller.ack_load_queue):
                ack.finish_event.synchronize()
            self.tree.loading_check()
        return found, self.bytes_at(self.tree.path_device_indices(self.match(tokens).last_device_node))

    def close(self) -> None:
        """End the storage threads and close kvtier's tiers."""
        import atexit

        atexit.unregister(self.tree.shutdown)
        self.tree.shutdown()
        self._settings.restore()

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            self.tree.check_hicache_events()
            if done():
                return
            assert time.monotonic() < deadline, "SGLang's threads did not get there"
            time.sleep(0.005)


def without_a_server(folder: str) -> dict[str, Any]:
    """All scenarios below, in one process: importing SGLang takes longer than any of them."""
    _become_a_rank()
    return {
        "levels": every_level(folder),
        "hybrid": hybrid_is_refused(str(Path(folder) / "hybrid")),
        "whose": whose_pages(str(Path(folder) / "whose")),
        "races": aborted_requests(str(Path(folder) / "aborted")),
        "failures": failing_calls(str(Path(folder) / "failing")),
        "a file": start_over_a_file(str(Path(folder) / "file")),
    }


def every_level(folder: str) -> dict[str, dict[str, Any]]:
    """For every pool and layout: tokens found on the host, in storage, after a restart; whether bytes are the same."""
    results = {}
    for pool, layout in itertools.product(POOLS, LAYOUTS):
        nvme, tokens = str(Path(folder) / f"{pool}-{layout}"), list(range(1_000, 1_000 + TOKENS))
        stack = Stack(pool, layout, nvme)
        written = stack.compute(tokens)
        stack.evict()
        host = stack.load_back(tokens)
        stack.flush()
        fetched = [stack.prefetch(tokens, "flushed")]
        storage = stack.load_back(tokens)
        direct = not stack.storage._pages.staged
        stack.close()
        again = Stack(pool, layout, nvme)
        fetched.append(again.prefetch(tokens, "restarted"))
        restarted = again.load_back(tokens)
        leases = again.storage.cache.leases()
        again.close()
        levels = (host, storage, restarted)
        results[f"{pool}-{layout}"] = {
            "tokens": [found for found, _ in levels],
            "prefetched": fetched,
            "same_bytes": [arrived == written for _, arrived in levels],
            "in_place": direct,
            "leases": leases,
        }
    return results


def hybrid_is_refused(folder: str) -> dict[str, Any]:
    """What a model with sliding windows is told when SGLang registers the host pool of its second kind of state; and
    whether the folder is free afterwards."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from kvtier.errors import EngineMismatchError

    stack = Stack("mha", "page_first", folder)
    hybrid = SWAKVPool(
        size=_DEVICE_TOKENS,
        size_swa=_DEVICE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.float32,
        head_num=2,
        head_dim=32,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    second = MHATokenToKVPoolHost(
        hybrid.swa_kv_pool.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=_DEVICE_TOKENS,
        start_layer=0,
        end_layer=2,
    )
    refusal = ""
    try:
        stack.storage.register_mem_host_pool_v2(second, PoolName.SWA)
    except EngineMismatchError as error:
        refusal = str(error)
    again = Stack("mha", "page_first", folder)
    levels = [level.name for level in again.storage.cache.levels]
    again.close()
    stack.close()
    return {"refusal": refusal, "levels_of_the_next": levels}


def whose_pages(folder: str) -> dict[str, int]:
    """The same tokens asked for by somebody else, and after new weights: tokens found."""
    stack, tokens = Stack("mha", "page_first", folder), list(range(5_000, 5_000 + TOKENS))
    stack.compute(tokens)
    found = {}
    for name, whose in (("salt", {"cache_salt": "b"}), ("adapter", {"extra_key": "b"}), ("own", {})):
        stack.flush()
        found[name] = stack.prefetch(tokens, name, **whose)
    stack.storage.weights_changed("step-2")
    stack.flush()
    found["new weights"] = stack.prefetch(tokens, "new weights")
    stack.close()
    return found


def aborted_requests(folder: str, rounds: int = 30) -> dict[str, Any]:
    """Requests that go away while their pages are on the way, at a different moment each time; then one that stays."""
    stack, tokens = Stack("mha", "page_first", folder), list(range(6_000, 6_000 + TOKENS))
    written = stack.compute(tokens)
    for number in range(rounds):
        stack.flush()
        handle = stack.begin_prefetch(tokens, f"aborted-{number}")
        time.sleep(number % 6 * 0.0004)
        stack.tree.check_hicache_events()
        stack.tree.release_aborted_request(handle)
        stack.tree.check_hicache_events()
    stack.flush()
    fetched = stack.prefetch(tokens, "stays")
    found, arrived = stack.load_back(tokens)
    stack.storage.cache.settle()
    stack.storage.cache.check_integrity()
    leases = stack.storage.cache.leases()
    stack.close()
    return {"fetched": fetched, "found": found, "same_bytes": arrived == written, "leases": leases}


def failing_calls(folder: str, rounds: int = 40) -> dict[str, Any]:
    """SGLang's own failure injector on: what is found has the right bytes, and tokens and misses are conserved."""
    from sglang.srt.environ import envs

    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.004),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
    ):
        stack = Stack("mha", "page_first", folder)
    tokens, injector = list(range(7_000, 7_000 + TOKENS)), stack.tree.cache_controller.storage_backend
    share, injector._failure_prob = injector._failure_prob, 0.0  # there must be something to find
    written, whole, wrong = stack.compute(tokens), 0, 0
    injector._failure_prob = share
    for number in range(rounds):
        stack.flush()
        stack.prefetch(tokens, f"failing-{number}")
        found, arrived = stack.load_back(tokens)
        expected = [layer[: len(part)] for layer, part in zip(written, arrived, strict=True)]
        wrong += arrived != expected
        whole += found == TOKENS
    stack.storage.cache.settle()
    sums, _ = stack.storage.cache.drain()
    recomputed = sums.get(("kvtier_tokens", ("recompute",)), 0.0)
    misses = sum(value for (name, _), value in sums.items() if name == "kvtier_miss_tokens")
    leases = stack.storage.cache.leases()
    stack.close()
    return {"whole": whole, "wrong": wrong, "leases": leases, "unexplained": recomputed - misses}


def start_over_a_file(path: str) -> str:
    """Where the folder should be there is a file: what the attach fails with."""
    from kvtier.errors import ConfigError

    Path(path).write_text("in the way")
    try:
        Stack("mha", "page_first", path).close()
    except ConfigError as error:
        return str(error)
    return ""


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


def _device_pool(kind: str) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {
        "size": _DEVICE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.float32,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **common)
    return MHATokenToKVPool(head_num=2, head_dim=32, **common)


def _become_a_rank() -> None:
    """What SGLang's scheduler does before it builds its caches, for a world of one."""
    import kvtier_sglang_cpu
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    kvtier_sglang_cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank")
    get_parallel().override_permanently(**dict.fromkeys(ranks, 0))
