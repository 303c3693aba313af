"""The device view against vLLM's own block pool: whatever the pool does, the view holds what it holds.

The real KVCacheManager and BlockPool run here, without a model: requests that share prefixes arrive, are scheduled in
pieces, generate, end and are preempted; the prefix cache is reset and blocks are evicted by id. With steering on, the
free queue is reordered at every turn and must stay a permutation of itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm", reason="the device view watches vLLM's block pool")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from kvtier.cache.device import DeviceView
from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.config import CacheConfig
from kvtier.model.keys import KEY_BYTES, KeySpace
from kvtier.predict.roles import ChatMarkers
from kvtier.testing.clock import VirtualClock
from kvtier.tiers.dram import DramTier
from kvtier_vllm.device import Device
from kvtier_vllm.device_pool import Owner, PoolWatch
from kvtier_vllm.manager import KVTierManager
from kvtier_vllm.steering import Steering

BLOCK, POOL, ROW_BYTES = 4, 24, 64
MAX_TOKENS = 10 * BLOCK
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6 * BLOCK)


def kv_cache_manager(windows: int) -> KVCacheManager:
    """vLLM's manager of a pool of 24 blocks of 4 tokens: full attention, and sliding windows if asked."""
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    groups += [KVCacheGroupSpec([f"w{i}"], SlidingWindowSpec(**shape, sliding_window=6)) for i in range(windows)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=POOL, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MAX_TOKENS,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
    )


class PoolMachine(RuleBasedStateMachine):
    """A scheduler without a model over vLLM's KVCacheManager and kvtier's manager."""

    windows = 0
    parts = 1
    policy = "kvtier"
    steered = True

    @initialize()
    def start(self) -> None:
        init_none_hash(sha256)
        self.clock = VirtualClock()
        self.engine = kv_cache_manager(self.windows)
        self.pool = self.engine.block_pool
        groups = 1 + self.windows
        buffer = np.zeros(64 * ROW_BYTES, np.uint8)
        memory = DramTier.over(buffer, ROW_BYTES, 64, ROW_BYTES, checksums=False)
        config = CacheConfig(dram_bytes=1, policy=self.policy, io_threads=2, ghost_blocks=10)
        windows = {1 + i: 2 for i in range(self.windows)}
        self.cache = TierCache(
            config, Geometry(BLOCK * self.parts, groups, windows), memory, memory.row, clock=self.clock
        )
        space = KeySpace(weights="w", kv_dtype="float32", block_tokens=BLOCK * self.parts, layout="l")
        self.manager = KVTierManager(self.cache, space, list(range(groups)), self.parts, BLOCK, ChatMarkers())
        blocks = self.pool.blocks
        self.view: DeviceView = self.cache.attach_device(
            POOL, groups * self.parts, ROW_BYTES, lambda i: blocks[i].ref_cnt > 0
        )
        columns = {group: group * self.parts for group in range(groups)}
        watch = PoolWatch(self.pool, self.view, self.parts, columns, self._owner)
        steering = Steering(self.pool, self.view, 8, self.cache.recorder, self.clock) if self.steered else None
        self.device = Device(watch, steering, self.cache.lock)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.contexts: dict[str, ReqContext] = {}
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

    def _owner(self, request_id: str) -> Owner | None:
        tracked = self.manager.tracked(request_id)
        if tracked is None:
            return None
        return Owner(lambda: self.manager.chain_of(tracked), lambda: tracked.cached.ended)

    # --- what a scheduler does ----------------------------------------------------------------------------------

    @rule(tokens=prompts)
    def arrive(self, tokens: list[int]) -> None:
        self.count += 1
        request = Request(
            f"r{self.count}",
            tokens,
            SamplingParams(max_tokens=MAX_TOKENS),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        context = self.contexts[request.request_id] = ReqContext(req_id=request.request_id)
        self.manager.announce(request)
        self.manager.on_new_request(context)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(share=st.integers(1, 4))
    def admit(self, share: int) -> None:
        request = self.waiting[0]
        found, n_found, _ = self.engine.get_computed_blocks(request)
        self.device.before_admission()
        if self.device.steering is not None:
            self.device.steering.steer()  # the view is never behind here: the invariant has just brought it up to date
        new = max(1, (request.num_tokens - n_found) // share)
        if self.engine.allocate_slots(request, new, n_found, found) is not None:
            self.waiting.pop(0)
            request.num_computed_tokens = n_found + new
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def step(self, which: int, tokens: list[int]) -> None:
        """Compute what is left of a prompt, or generate."""
        request = self.running[which % len(self.running)]
        if request.num_computed_tokens >= request.num_tokens:
            if request.num_tokens + len(tokens) > MAX_TOKENS:
                return
            request.append_output_token_ids(tokens)
        new = request.num_tokens - request.num_computed_tokens
        if self.engine.allocate_slots(request, new) is None:
            return self.preempt(which)
        request.num_computed_tokens += new

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7))
    def preempt(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        self.engine.free(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 7))
    def end(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        self.manager.note_outcome(request)
        self.engine.free(request)
        self.device.after_step()
        self.manager.on_request_finished(self.contexts.pop(request.request_id))

    @rule(seconds=st.floats(0.1, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.device.after_step()

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(ids=st.sets(st.integers(1, POOL - 1), max_size=4))
    def evict(self, ids: set[int]) -> None:
        self.engine.evict_blocks(ids)

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def the_view_is_the_pool(self) -> None:
        if not hasattr(self, "device"):
            return
        while not self.device.watch.refresh(rows=3):  # in small bites, as a bounded step would
            pass
        self.view.check_integrity()
        self.cache.check_integrity()
        pool: dict[bytes, set[int]] = {}
        for block in self.pool.blocks:
            if block.block_hash is not None:
                pool.setdefault(bytes(block.block_hash), set()).add(block.block_id)
        seen = self._rows_of_view()
        for key, block_id in seen.items():
            assert block_id in pool.get(key, ()), f"block {block_id} is not what the view says"
        if self.parts == 1:
            assert not pool.keys() - seen.keys()

    @invariant()
    def the_queue_is_whole(self) -> None:
        if not hasattr(self, "device"):
            return
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == self.pool.get_num_free_blocks()
        assert set(free) == {b.block_id for b in self.pool.blocks if b.ref_cnt == 0 and not b.is_null}
        assert self.device.steering is None or not self.device.steering.off

    def _rows_of_view(self) -> dict[bytes, int]:
        """vLLM's key of every row -> its device block; vLLM's hash is found through the request that made it."""
        found: dict[bytes, int] = {}
        for segment in self.cache.tree.segments():
            held = self.view.residency.held(segment)
            for offset, column in np.argwhere(held >= 0).tolist():
                block_id = int(held[offset, column])
                key = self.pool.blocks[block_id].block_hash
                assert key is not None, f"the view holds block {block_id}, the pool does not"
                group, part = divmod(column, self.parts)
                assert int.from_bytes(key[-4:], "big") == group
                if part == self.parts - 1:  # the chunk's own key
                    mine = segment.keys[offset * KEY_BYTES : (offset + 1) * KEY_BYTES]
                    assert mine == self.manager._key_space.adopt([key[:-4]])
                assert key not in found or self.parts > 1
                found[bytes(key)] = block_id
        return found


class WindowMachine(PoolMachine):
    windows = 2


class ChunkMachine(PoolMachine):
    """Several device blocks make one of kvtier's. What no chunk is known for is not in the view, and a block that two
    chunks begin with stands in one of them; what the view says is true all the same."""

    parts = 2


class EngineOrderMachine(PoolMachine):
    steered = False
    policy = "lru"


_settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.settings = _settings
TestWindows = WindowMachine.TestCase
TestWindows.settings = _settings
TestChunks = ChunkMachine.TestCase
TestChunks.settings = _settings
TestEngineOrder = EngineOrderMachine.TestCase
TestEngineOrder.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


def test_blocks_of_chunks_that_will_never_be_full_are_not_looked_at_for_ever() -> None:
    """The request is over; its blocks stay on the device for as long as nobody needs the room."""
    machine = ChunkMachine()
    machine.start()
    watch = machine.device.watch
    machine.arrive([0] * BLOCK * 3)
    machine.admit(1)
    watch.refresh()
    assert len(watch._early) == 1, "the first block of the second chunk, which may still be filled"
    machine.end(0)
    watch.refresh()
    assert not watch._early
    assert machine.view.residency.resident_rows == 2
    machine.teardown()
