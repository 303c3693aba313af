"""vLLM's scheduler, as far as it matters to the device's blocks: its KVCacheManager, one request at a time, no model.

Blocks are allocated, cached and freed by vLLM's own code; kvtier's manager hears of requests as in a real engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.keys import KeySpace
from kvtier.predict.roles import ChatMarkers
from kvtier.testing.clock import VirtualClock
from kvtier.tiers.dram import DramTier

BLOCK_TOKENS, ROW_BYTES = 32, 64


class SchedulerWithoutModel:
    """A pool of `blocks` blocks, evicted in the engine's order or kvtier's."""

    def __init__(self, blocks: int, order: str) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from kvtier_vllm.device import Device
        from kvtier_vllm.device_pool import Owner, PoolWatch
        from kvtier_vllm.manager import KVTierManager
        from kvtier_vllm.steering import Steering

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        self._engine = KVCacheManager(
            config,
            max_model_len=(blocks - 1) * BLOCK_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self._clock = VirtualClock()
        memory = DramTier.over(np.zeros(4 * ROW_BYTES, np.uint8), ROW_BYTES, 4, ROW_BYTES, checksums=False)
        self._cache = TierCache(
            CacheConfig(dram_bytes=1, io_threads=2), Geometry(BLOCK_TOKENS), memory, memory.row, clock=self._clock
        )
        space = KeySpace(weights="w", kv_dtype="float32", block_tokens=BLOCK_TOKENS, layout="l")
        manager = self._manager = KVTierManager(self._cache, space, [0], 1, BLOCK_TOKENS, ChatMarkers())
        pool = self._engine.block_pool
        view = self._cache.attach_device(blocks, 1, ROW_BYTES, lambda i: bool(pool.blocks[i].ref_cnt))

        def owner_of(request_id: str) -> Owner | None:
            tracked = manager.tracked(request_id)
            return None if tracked is None else Owner(lambda: manager.chain_of(tracked))

        watch = PoolWatch(pool, view, 1, {0: 0}, owner_of)
        self._steering = Steering(pool, view, blocks, self._cache.recorder, self._clock) if order == "kvtier" else None
        self.device = Device(watch, self._steering, self._cache.lock)
        self._count = 0

    @property
    def moved(self) -> int:
        """Blocks moved to the head of the free queue so far."""
        return self._steering.moved if self._steering else 0

    @property
    def off(self) -> str:
        """Why steering was switched off."""
        return self._steering.off if self._steering else ""

    def serve(self, at_s: float, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """One request from arrival to end; returns the prompt tokens that were on the device."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.request import Request, RequestStatus

        self._clock.advance_to(at_s)
        self._count += 1
        parameters = SamplingParams(max_tokens=len(answer))
        request: Any = Request(f"r{self._count}", list(prompt), parameters, None, block_hasher=self._hasher)
        context = ReqContext(req_id=request.request_id)
        self._manager.announce(request)
        self._manager.on_new_request(context)
        found, hits, _ = self._engine.get_computed_blocks(request)
        self.device.before_admission()
        new = request.num_tokens - hits
        assert self._engine.allocate_slots(request, new, hits, found) is not None
        request.num_computed_tokens = request.num_tokens
        for token in answer:
            self.device.after_step()
            request.append_output_token_ids([token])
            if token is not answer[-1]:
                assert self._engine.allocate_slots(request, 1) is not None
                request.num_computed_tokens += 1
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._manager.note_outcome(request)
        self._engine.free(request)
        self.device.after_step()
        self._manager.on_request_finished(context)
        return int(hits)

    def close(self) -> None:
        """Stop the cache's threads."""
        self._cache.close()
