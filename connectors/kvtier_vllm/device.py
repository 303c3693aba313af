"""The hbm tier in vLLM: the pool watched, its free queue steered, at the two moments of a step that matter.

Blocks are taken while requests are scheduled, and given back when their output arrives. So the head of the free queue
is put in order before a waiting request is admitted and after the step's frees.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool

from kvtier.errors import EngineMismatchError
from kvtier_vllm.device_pool import Owner, PoolWatch, check_pool
from kvtier_vllm.manager import KVTierManager
from kvtier_vllm.steering import Steering

logger = init_logger("vllm.kvtier")


class Device:
    """Watches and steers one pool. All calls come from the scheduler's thread."""

    def __init__(self, watch: PoolWatch, steering: Steering | None, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self.watch = watch
        self.steering = steering

    def before_admission(self) -> None:
        """A waiting request is about to get blocks."""
        if self.watch.behind:
            self._keep_up()

    def after_step(self) -> None:
        """The step's blocks have been given back."""
        if self.steering is not None:
            self.steering.new_step()
        self._keep_up()

    def _keep_up(self) -> None:
        with self._lock:
            if self.watch.refresh() and self.steering is not None:
                self.steering.steer()


def watch_device(pool: BlockPool, manager: KVTierManager, vllm_config: VllmConfig) -> Device | None:
    """The device as a tier of the manager's cache; None where the engine caches no prefixes, or its pool is not the one
    kvtier knows: then the device is the engine's own affair."""
    cache, parts = manager.cache, manager.blocks_per_chunk
    if not pool.enable_caching:
        return None
    blocks = pool.blocks

    def in_use(block_id: int) -> bool:
        return blocks[block_id].ref_cnt > 0

    def owner_of(request_id: str) -> Owner | None:
        tracked = manager.tracked(request_id)
        return None if tracked is None else Owner(lambda: manager.chain_of(tracked), lambda: tracked.cached.ended)

    try:
        check_pool(pool)
    except EngineMismatchError as error:
        cache.recorder.add("kvtier_faults", 1, "hbm", "not_opened")
        logger.error("kvtier: the device is left to vLLM: %s", error)
        return None
    groups = manager.group_columns
    view = cache.attach_device(len(blocks), len(groups) * parts, cache.memory.row_bytes // parts, in_use)
    columns = {group_id: column * parts for group_id, column in groups.items()}
    watch = PoolWatch(pool, view, parts, columns, owner_of)
    if cache.config.hbm_policy == "engine":
        return Device(watch, None, cache.lock)
    scheduler = vllm_config.scheduler_config
    block_tokens = cache.block_tokens // parts
    window = math.ceil(scheduler.max_num_batched_tokens / block_tokens) * len(groups) + scheduler.max_num_seqs
    return Device(watch, Steering(pool, view, window, cache.recorder, cache.clock), cache.lock)
