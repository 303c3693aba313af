"""KVTierConnector: vLLM's own offloading connector with kvtier's decisions.

vLLM's connector keeps what it does well: block tables, job fencing, preemption, hybrid groups, GPU copies. Here
requests get their context, lookups are answered once and remembered, prefill is timed, and outcomes reach the forecast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier_vllm.compat import answer_prefixes_at_once, check_version
from kvtier_vllm.device import Device, watch_device
from kvtier_vllm.manager import KVTierManager
from kvtier_vllm.options import cache_config
from kvtier_vllm.plugin import SPEC
from kvtier_vllm.rows import check_pages
from kvtier_vllm.sealed_worker import SealedWorker
from kvtier_vllm.spec import building

Span = tuple[int, int]


class KVTierConnector(OffloadingConnector):
    """Enabled with `--kv-transfer-config '{"kv_connector":"KVTierConnector","kv_role":"kv_both",…}'`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_version()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        cache_config(transfer.kv_connector_extra_config)
        _name_spec(transfer.kv_connector_extra_config)
        token = building.set((vllm_config, kv_cache_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            building.reset(token)
        # A load that read damaged bytes is computed: a cache never fails a request.
        transfer.kv_load_failure_policy = "recompute"
        self._loading: dict[int, str] = {}  # worker side: the request of each load
        self._steps: deque[tuple[float, Sequence[Span]]] = deque(maxlen=8)
        self._last_output_s = 0.0
        self._device: Device | None = None
        if role == KVConnectorRole.SCHEDULER:
            answer_prefixes_at_once(self.scheduler, self.manager.prefix)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped block is a future miss, never a reason to recompute a preempted request."""
        return False

    @property
    def manager(self) -> KVTierManager:
        """Scheduler side only."""
        manager = self.scheduler.manager
        assert isinstance(manager, KVTierManager)
        return manager

    # --- worker side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        if cache_config(transfer.kv_connector_extra_config).codecs:
            check_pages(kv_caches, self._kv_cache_config)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        self._loading.update((job_id, job.req_id) for job_id, job in metadata.load_jobs.items())
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        if isinstance(worker, SealedWorker):
            results.failed_recving |= {self._loading[job_id] for job_id in worker.take_failed()}
        if results.finished_recving:
            self._loading = {job: name for job, name in self._loading.items() if name not in results.finished_recving}
        return results

    # --- scheduler side -----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._device = watch_device(gpu_block_pool, self.manager, self._vllm_config)

    def on_new_request(self, request: Request) -> None:
        self.manager.announce(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        manager = self.manager
        if self._device is not None:
            self._device.before_admission()
        tracked = manager.tracked(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        # vLLM asks a waiting request about every step; while nothing changed, the answer costs no walk.
        if not manager.plan(tracked, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        manager = self.manager
        tracked = manager.tracked(request.request_id)
        if tracked is None or manager.cache.window_groups or not num_external_tokens:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return manager.load_sources(tracked, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._steps.append((time.perf_counter(), _prefill_spans(scheduler_output)))
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._time_step()
        super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        # The last thing vLLM asks for after it freed what the step no longer needs.
        if self._device is not None:
            self._device.after_step()
        return super().take_events()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.manager.note_outcome(request)
        return super().request_finished_all_groups(request, block_ids)

    def _time_step(self) -> None:
        """Learn what a prefill step costs. Steps that overlap are timed from the end of the one before."""
        if not self._steps:
            return
        began, spans = self._steps.popleft()
        now = time.perf_counter()
        seconds = now - max(began, self._last_output_s)
        self._last_output_s = now
        if spans:
            self.manager.cache.observe_prefill(spans, seconds)

    # --- API server -----------------------------------------------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        # The API server never builds the connector, but declares the metrics of the spec named here.
        assert vllm_config.kv_transfer_config is not None
        _name_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _name_spec(extra_config: dict[str, Any]) -> None:
    extra_config.setdefault("spec_name", SPEC)
    extra_config.setdefault("spec_module_path", "kvtier_vllm.spec")


def _prefill_spans(scheduler_output: SchedulerOutput) -> list[Span]:
    """Token ranges of prompts this step computes; decode steps of one token are left out."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    starts = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
    starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(start, start + scheduled[req_id]) for req_id, start in starts if scheduled.get(req_id, 0) > 1]
