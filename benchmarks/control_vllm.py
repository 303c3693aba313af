"""What the thread of vLLM's scheduler pays for one prompt: the calls of its connector into KVTierManager, one by one.

`python -m benchmarks.control --vllm` runs it. Requests, block hashes, keys and contexts are vLLM's own; there is no
model. Calls that vLLM makes once a key are timed together, for all keys of the prompt: only models with sliding windows
ask so, or an engine whose KV events name every key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.request import Request, RequestStatus

from benchmarks.control import BLOCK_TOKENS, Stopwatch, cache_for
from kvtier.model.keys import KeySpace
from kvtier.predict.roles import ChatMarkers
from kvtier_vllm.manager import KVTierManager


class VllmControl(Stopwatch):
    """One manager, and prompts of `blocks` blocks."""

    def __init__(self, blocks: int, stored_at_once: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.stored_at_once = stored_at_once
        self.cache = cache_for(blocks)
        space = KeySpace(weights="w", kv_dtype="bfloat16", block_tokens=BLOCK_TOKENS, layout="l")
        self.manager = KVTierManager(self.cache, space, [0], 1, BLOCK_TOKENS, ChatMarkers())
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._draw = np.random.default_rng(0)
        self._count = 0

    def round(self) -> None:
        """A prompt is computed and stored, loaded from memory, and asked for when only the tier below has it."""
        tokens = self._draw.integers(0, 30_000, self.blocks * BLOCK_TOKENS + 1).tolist()
        request, context, keys = self._arrives(tokens)
        self._plan("plan, nothing there", request)
        for start in range(0, self.blocks, self.stored_at_once):
            with self.timed("prepare_store, 512 keys"):
                output = self.manager.prepare_store(keys[start : start + self.stored_at_once], context)
            assert output is not None
            stored = set(output.keys_to_store)
            with self.timed("complete_store, 512 keys"):
                self.manager.complete_store(stored, context)
            self._step(request)
        self._ends(request, context)

        request, context, keys = self._arrives(tokens)
        self._plan("plan, all in memory", request)
        with self.timed("prefix, all keys at once"):
            assert self.manager.prefix(context, 0, 0, len(keys)) == self.blocks
        with self.timed("lookup, every key"):
            for key in keys:
                self.manager.lookup(key, context)
        with self.timed("prepare_load"):
            self.manager.prepare_load(keys, context)
        with self.timed("load sources"):
            tracked = self.manager.tracked(request.request_id)
            assert tracked is not None
            self.manager.load_sources(tracked, self.blocks * BLOCK_TOKENS)
        loaded = set(keys)
        with self.timed("complete_load"):
            self.manager.complete_load(loaded, context)
        self._step(request)
        self._ends(request, context)

        self.cache.memory.clear()
        self.cache.epoch += 1
        request, context, keys = self._arrives(tokens)
        self._plan("plan, all below", request)
        self._plan("plan, still waiting", request)
        self.settle(self.cache, "plan, a promotion arrived", lambda: self._asks(request))
        self._ends(request, context)

    def close(self) -> None:
        """Stop the threads."""
        self.manager.shutdown()

    def _arrives(self, tokens: Sequence[int]) -> tuple[Request, ReqContext, list[OffloadKey]]:
        self._count += 1
        made: Any = Request(f"r{self._count}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        context = ReqContext(req_id=made.request_id)
        self.manager.announce(made)
        with self.timed("on_new_request"):
            self.manager.on_new_request(context)
        keys = [make_offload_key(digest, 0) for digest in made.block_hashes]
        for n, key in enumerate(keys, 1):
            context.set_offload_key_position(key, n * BLOCK_TOKENS)
        return made, context, keys

    def _asks(self, request: Request) -> None:
        tracked = self.manager.tracked(request.request_id)
        assert tracked is not None
        self.manager.plan(tracked, 0)

    def _plan(self, name: str, request: Request) -> None:
        with self.timed(name):
            self._asks(request)

    def _step(self, request: Request) -> None:
        self.settle(self.cache, "on_schedule_end", lambda: self._scheduled(request))

    def _scheduled(self, request: Request) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([request.request_id], []))

    def _ends(self, request: Request, context: ReqContext) -> None:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        with self.timed("note_outcome"):
            self.manager.note_outcome(request)
        with self.timed("on_request_finished"):
            self.manager.on_request_finished(context)
