"""vLLM's OffloadingManager over TierCache: translates keys to blocks, holds no policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from kvtier.cache.control import Control
from kvtier.cache.request import CachedRequest
from kvtier.cache.tier_cache import TierCache
from kvtier.model.keys import KeySpace
from kvtier.model.request import Outcome
from kvtier.predict.roles import ChatMarkers
from kvtier_vllm.hints import hints_of
from kvtier_vllm.identity import adapter_fingerprint
from kvtier_vllm.metrics import drain
from kvtier_vllm.names import Names
from kvtier_vllm.requests import accepts_lossy, context_of, outcome_of, set_apart

_RESULTS = (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING)
"""By `BlockState`."""
_SOURCES = {"dram": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}
_GAUGE_INTERVAL_S = 1.0
_COMPLAINTS = 5

Params = ParamSpec("Params")
Result = TypeVar("Result")
logger = init_logger("vllm.kvtier")


def _locked(
    method: Callable[Concatenate[KVTierManager, Params], Result],
) -> Callable[Concatenate[KVTierManager, Params], Result]:
    """The engine's thread decides while it holds the cache's lock; the timekeeper may, while it does not."""

    @wraps(method)
    def call(self: KVTierManager, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        with self.cache.lock:
            return method(self, *args, **kwargs)

    return call


@dataclass(slots=True, eq=False)
class Tracked:
    """A vLLM request and what TierCache knows of it."""

    request: Request
    cached: CachedRequest
    key_space: KeySpace
    hashes_used: int
    outcome: Outcome | None = None
    computed_tokens: int = 0  # on the device, when it was last asked about


class KVTierManager(OffloadingManager):
    """One engine's manager. All calls come from the scheduler's thread, and hold the cache's lock where they decide."""

    def __init__(
        self,
        cache: TierCache,
        key_space: KeySpace,
        group_ids: Sequence[int],
        blocks_per_chunk: int,
        tokens_per_hash: int,
        markers: ChatMarkers,
        replica: int = 0,
    ) -> None:
        """`replica` sets the control endpoints of a node's data-parallel replicas apart: port, port + 1, …"""
        self.cache = cache
        self.control = Control(cache, replica)
        self._complaints = 0
        self._markers = markers
        self._needs_roles = cache.config.policy == "beta16"
        self._key_space = key_space
        self.blocks_per_chunk = blocks_per_chunk
        self.group_columns = {group_id: column for column, group_id in enumerate(group_ids)}
        self._chunk_tokens = cache.block_tokens
        self._names = Names(self.group_columns, cache.block_tokens)
        self._hashes_per_chunk = cache.block_tokens // tokens_per_hash
        self._adapters: dict[tuple[int, str, str], KeySpace] = {}
        self._announced: Request | None = None
        self._tracked: dict[str, Tracked] = {}
        self._gauges_due_s = 0.0

    # --- for the connector --------------------------------------------------------------------------------------

    def announce(self, request: Request) -> None:
        """The next `on_new_request` is about this request: vLLM's context alone names no session and no tokens."""
        if self.cache.levels.lossy and accepts_lossy(request, self.cache.config.lossy_requests == "opt_out"):
            set_apart(request)
        self._announced = request

    def tracked(self, request_id: str) -> Tracked | None:
        """What is known of a running request."""
        return self._tracked.get(request_id)

    def chain_of(self, tracked: Tracked) -> bytes:
        """Keys of all blocks the request has filled by now."""
        self._grow(tracked)
        return tracked.cached.chain

    @_locked
    def plan(self, tracked: Tracked, computed_tokens: int) -> bool:
        """Look up what can be loaded after the device's own hit. False: still on its way, ask again next step."""
        self.cache.poll()
        self._grow(tracked)
        tracked.computed_tokens = computed_tokens
        return self.cache.lookup(tracked.cached, computed_tokens // self._chunk_tokens) is not None

    @_locked
    def note_outcome(self, request: Request) -> None:
        """The request ended; its last blocks may still be offered before `on_request_finished`."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            tracked.outcome = outcome_of(request, self.cache.clock.now(), self._markers)
            self._grow(tracked)
            self.cache.finish(tracked.cached, tracked.outcome)

    # --- OffloadingManager --------------------------------------------------------------------------------------

    @_locked
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request, self._announced = self._announced, None
        if request is not None and request.request_id == req_context.req_id:
            key_space = self._space_of(request)
            hashes = list(request.block_hashes)[self._hashes_per_chunk - 1 :: self._hashes_per_chunk]
            context = context_of(request, self.cache.clock.now(), self._markers, self._chunk_tokens, self._needs_roles)
            cached = self.cache.open(context, key_space.adopt(hashes))
            self._take_hints(request, cached)
            tracked = Tracked(request, cached, key_space, len(hashes))
            req_context.set_state(tracked)
            self._tracked[req_context.req_id] = tracked
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        tracked = self._tracked.get(req_context.req_id)
        plan = tracked.cached.plan if tracked is not None else None
        if plan is None:
            return LookupResult.MISS
        # Asked once a key where vLLM asks so: written out, for every call counts ten thousand times.
        end_token = req_context.get_offload_key_position(key)
        assert end_token is not None
        offset = end_token // self._chunk_tokens - 1 - plan.start
        if not 0 <= offset < plan.blocks:
            return LookupResult.MISS
        columns = self.group_columns
        column = 0 if len(columns) == 1 else columns[int.from_bytes(key[-4:], "big")]
        return _RESULTS[plan.packed[offset * len(columns) + column]]

    def prefix(self, req_context: ReqContext, group_id: int, start_chunk: int, chunks: int) -> int | None:
        """What `lookup` says of `chunks` keys of a group from one on: how many hits come first; None: ask again."""
        tracked = self._tracked.get(req_context.req_id)
        plan = tracked.cached.plan if tracked is not None else None
        return 0 if plan is None else plan.prefix(start_chunk, self.group_columns[group_id], chunks)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        tracked = self._tracked.get(req_context.req_id)
        if tracked is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        block = np.array([self._names.block(key, req_context)])
        tier = next(iter(tracked.cached.promoted(block)), self.cache.memory.name)
        return _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)

    def load_sources(self, tracked: Tracked, tokens: int) -> dict[CacheHitSource, int]:
        """Where so many tokens after those the device had came from: all of them at once."""
        first, stop = tracked.computed_tokens, tracked.computed_tokens + tokens
        size = self._chunk_tokens
        blocks = np.arange(first // size, -(-stop // size))
        inside = np.minimum(stop, (blocks + 1) * size) - np.maximum(first, blocks * size)
        sources: dict[CacheHitSource, int] = {}
        left = tokens
        for tier, came in tracked.cached.promoted_from.items():
            known = blocks < len(came)
            count = int(inside[known][came[blocks[known]]].sum())
            left -= count
            if count:
                source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
                sources[source] = sources.get(source, 0) + count
        if left:
            sources[_SOURCES[self.cache.memory.name]] = left
        return sources

    @_locked
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        tracked = self._tracked[req_context.req_id]
        rows = self._names.run(list(keys), req_context, tracked.cached.chain, tracked.key_space)
        # An array: the specification makes one of its list, number by number.
        return CPULoadStoreSpec(self.cache.take_load(tracked.cached, rows))  # type: ignore[arg-type]

    @_locked
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        tracked = req_context.get_state(Tracked)
        if tracked is not None:
            self.cache.end_load(tracked.cached)

    @_locked
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        tracked = self._tracked.get(req_context.req_id)
        if tracked is None:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        self._grow(tracked)
        offered = list(keys)
        rows = self._names.rows(offered, req_context)
        known = np.flatnonzero(rows[:, 0] < tracked.cached.blocks)
        granted = self.cache.offer_store(tracked.cached, rows[known])
        chosen = [offered[i] for i in known[granted.at].tolist()]
        return PrepareStoreOutput(chosen, CPULoadStoreSpec(granted.slots), [])  # type: ignore[arg-type]

    @_locked
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        tracked = req_context.get_state(Tracked)
        if tracked is not None:
            self.cache.commit_store(tracked.cached, self._names.rows(keys, req_context))

    @_locked
    def on_request_finished(self, req_context: ReqContext) -> None:
        tracked = self._tracked.pop(req_context.req_id, None)
        if tracked is not None:
            self._grow(tracked)
            now = self.cache.clock.now()
            self.cache.close_request(tracked.cached, tracked.outcome or Outcome(finished_s=now))

    @_locked
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request_id in context.new_req_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                self.cache.started(tracked.cached)
        self.cache.stepped()

    def has_pending_work(self) -> bool:
        return self.cache.busy

    @_locked
    def reset_cache(self) -> None:
        self.cache.reset()

    @_locked
    def get_stats(self) -> OffloadingConnectorStats | None:
        now = time.monotonic()
        if now >= self._gauges_due_s:
            self._gauges_due_s = now + _GAUGE_INTERVAL_S
            self.cache.gauges()
        return drain(self.cache.recorder)

    def take_events(self) -> Iterable[object]:
        return ()

    def shutdown(self) -> None:
        self.control.close()
        with self.cache.lock:
            self.cache.close()

    def _take_hints(self, request: Request, cached: CachedRequest) -> None:
        hints, errors = hints_of(request, cached.context.params, cached.context.session_id)
        cached.hints += hints
        if hints:
            self.control.keep_time()
        for error in errors:
            self.cache.recorder.add("kvtier_hints", 1, "message", "rejected")
            self._complaints += 1
            if self._complaints <= _COMPLAINTS:
                logger.warning("kvtier: a hint of request %s is left out: %s", request.request_id, error)

    # --- keys ---------------------------------------------------------------------------------------------------

    def _grow(self, tracked: Tracked) -> None:
        """Take in the blocks vLLM has hashed since the last call."""
        have = len(tracked.request.block_hashes) // self._hashes_per_chunk
        if have > tracked.hashes_used:
            first = (tracked.hashes_used + 1) * self._hashes_per_chunk - 1
            more = list(tracked.request.block_hashes)[first :: self._hashes_per_chunk]
            self.cache.extend(tracked.cached, tracked.key_space.adopt(more))
            tracked.hashes_used = have

    def _space_of(self, request: Request) -> KeySpace:
        lora = request.lora_request
        if lora is None:
            return self._key_space
        # Read once, as vLLM does: what lies on disk now may not be what it loaded under this id.
        loaded = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        if loaded not in self._adapters or getattr(lora, "load_inplace", False):
            self._adapters[loaded] = self._key_space.with_adapter(adapter_fingerprint(lora))
        return self._adapters[loaded]
