"""The offloading spec: how big a row is, where the shared rows live, and who moves and who manages them."""

from __future__ import annotations

import contextlib
import os
import shutil
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtier.cache.seals import Seals
from kvtier.cache.tier_cache import TierCache
from kvtier.codec.form import RowForm
from kvtier.errors import ConfigError
from kvtier.model.layout import Layout
from kvtier.predict.roles import ChatMarkers
from kvtier.tiers.dram import DramTier
from kvtier.tiers.open import Share, Site, open_lower_tiers, open_tier, register_memory
from kvtier.tiers.protocol import Tier
from kvtier_vllm.identity import geometry_of, key_space_of, layout_of
from kvtier_vllm.manager import KVTierManager
from kvtier_vllm.markers import chat_markers
from kvtier_vllm.metrics import metric_definitions
from kvtier_vllm.options import cache_config
from kvtier_vllm.placement import near_device
from kvtier_vllm.rows import encodings, memory_form
from kvtier_vllm.sealed_worker import SealedWorker, shared_seals
from kvtier_vllm.sizes import check_sizes
from kvtier_vllm.worker import HostWorker

logger = init_logger("vllm.kvtier")

# vLLM's factory builds the spec from a reduced configuration; the connector that asks for it leaves the whole one here.
building: ContextVar[tuple[VllmConfig, KVCacheConfig]] = ContextVar("kvtier_building")


class KVTierOffloadingSpec(CPUOffloadingSpec):
    """Rows in a shared memory region, as vLLM's own CPU offloading lays them out, managed by TierCache."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return ()

    def __init__(self, config: OffloadingConfig) -> None:
        self._vllm_config, self._kv_cache_config = building.get()
        self._cache_config = cache_config(config.extra_config)
        _refuse_unsupported(config, self._vllm_config)
        extra = dict(config.extra_config)
        extra["cpu_bytes_to_use"] = self._cache_config.dram_bytes
        extra["offload_prompt_only"] = not self._cache_config.store_generated
        super().__init__(_with_extra(config, extra))
        groups = [group.group_id for group in config.groups]
        self._memory_form = memory_form(
            self._vllm_config, self._kv_cache_config, self._cache_config, groups, self.blocks_per_chunk
        )
        if self._memory_form is not None:
            self._shrink_rows(self._memory_form)
        if self.num_chunks < 1:
            raise ConfigError(
                f"dram_bytes is {self._cache_config.dram_bytes}, less than one block of this model "
                f"({self.kv_bytes_per_chunk} bytes); raise it"
            )
        if self.blocks_per_chunk > 1 and any(group.window_tokens for group in self._layout().groups):
            # vLLM offers a chunk whose first blocks a window has dropped already, and does not say which are missing:
            # what lies there would be served to whoever loads the whole chunk.
            raise ConfigError(
                f"blocks_per_chunk is {self.blocks_per_chunk}, but this model has sliding windows, whose chunks vLLM "
                "stores with blocks missing; remove blocks_per_chunk (or block_size) from kv_connector_extra_config"
            )

    def _shrink_rows(self, form: RowForm) -> None:
        """Memory keeps rows as int8: as many more of them fit, and the bus carries as many fewer bytes."""
        ranks = 1 if self.replicated_layout else self.config.parallel.world_size
        self.cpu_page_size_per_worker = form.units * form.tokens * (form.head_dim + 2)
        self.kv_bytes_per_chunk = round_up(self.cpu_page_size_per_worker * ranks, self.BLOCK_SIZE_ALIGNMENT)
        self.num_chunks = self._cache_config.dram_bytes // self.kv_bytes_per_chunk

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._build_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = self._open_region(self._region_rank)
            if current_platform.is_cuda_alike() or current_platform.is_xpu():
                worker = self._device_worker(kv_caches, region)
            else:
                worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
            if self._cache_config.memory_checks:
                rows = np.frombuffer(region.create_kv_memoryview().cast("B"), np.uint8).reshape(self.num_chunks, -1)
                first = self._region_rank * self.cpu_page_size_per_worker
                rows = rows[:, first : first + self.cpu_page_size_per_worker]
                worker = SealedWorker(worker, self._seals(), self._region_rank, rows)
            self._worker = worker
        return self._worker

    def _device_worker(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> OffloadingWorker:
        """vLLM's own copy worker over our region, or ours where memory is encoded. Not run in this project's tests:
        they have no GPU."""
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, pin_mmap_region

        try:
            if self._memory_form is not None:
                from kvtier_vllm.coded_worker import CodedWorker, courier_of

                pin_mmap_region(region)
                return CodedWorker(courier_of(kv_caches, self._memory_form), region, self.blocks_per_chunk)
            return CPUOffloadingWorker(
                kv_caches=kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_cpu_chunks=self.num_chunks,
                mmap_region=region,
            )
        except BaseException:
            region.cleanup()
            raise

    def _uses_shared_region(self) -> bool:
        """Here on every platform: ranks that hold the same bytes (MLA) keep one copy on a CPU, too."""
        return True

    @property
    def _region_rank(self) -> int:
        """Whose part of a row this worker writes: its own, or the only one."""
        return 0 if self.replicated_layout else self.config.parallel.rank

    def _seals(self) -> Seals:
        """Of every rank's part of all rows, seen by all processes of the engine."""
        parts = 1 if self.replicated_layout else self.config.parallel.world_size
        return Seals(shared_seals(self._seals_path, self.num_chunks, parts), self.cpu_page_size_per_worker)

    @property
    def _seals_path(self) -> str:
        return f"/dev/shm/kvtier_seals_{self.config.engine_id}"

    def _open_region(self, rank: int | None) -> SharedOffloadRegion:
        if rank is not None:
            _check_shm(self._cache_config.dram_bytes, self.config.engine_id)
        with near_device(is_worker=rank is not None):
            return SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )

    def _build_manager(self) -> KVTierManager:
        region = self._open_region(None)
        # Every worker has mapped the region by now. Unlinking its name here is what keeps /dev/shm clean when the
        # engine is killed: vLLM's shutdown hooks do not run then.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(region.mmap_path)
        region._creator = False
        seals = self._seals()
        os.unlink(self._seals_path)
        config, layout = self._cache_config, self._layout()
        check_sizes(self._vllm_config, layout)
        rows = region.create_kv_memoryview().cast("B")
        memory = DramTier.over(
            rows,
            self.kv_bytes_per_chunk,
            self.num_chunks,
            self.kv_bytes_per_chunk,
            checksums=False,
        )
        key_space = key_space_of(self._vllm_config, layout, config, self.blocks_per_chunk)
        groups = [group.group_id for group in self.config.groups]
        codecs = encodings(
            self._vllm_config,
            self._kv_cache_config,
            config,
            groups,
            self.blocks_per_chunk,
            layout.ranks,
            self.kv_bytes_per_chunk,
        )
        site = Site(config, key_space.digest, layout.digest, self.kv_bytes_per_chunk, self._share(), codecs)
        lower, missing = open_lower_tiers(site)
        register_memory(lower, rows)
        cache = TierCache(config, geometry_of(layout, self.blocks_per_chunk), memory, memory.row, lower, seals=seals)

        def reopen(name: str) -> Tier:
            tier = open_tier(site, name)
            register_memory([tier], rows)
            return tier

        cache.reopen = reopen
        for name in missing:
            cache.recorder.add("kvtier_faults", 1, name, "not_opened")
        logger.info(
            "kvtier: dram %d rows of %d bytes, lower tiers %s, policy %s, key space %s",
            self.num_chunks,
            self.kv_bytes_per_chunk,
            [f"{tier.name} ({codecs[tier.name].name})" if tier.name in codecs else tier.name for tier in lower]
            or "none",
            config.policy,
            key_space.digest.hex()[:12],
        )
        return KVTierManager(
            cache,
            key_space,
            groups,
            self.blocks_per_chunk,
            self.tokens_per_hash,
            _markers_of(self._vllm_config),
            int(self.config.parallel.data_parallel_index),
        )

    def _share(self) -> Share:
        """Every data-parallel replica has a scheduler and an index of its own: a folder, and a part of the caps."""
        parallel = self._vllm_config.parallel_config
        if parallel.data_parallel_size == 1:
            return Share()
        return Share(max(1, parallel.data_parallel_size_local), f"dp{self.config.parallel.data_parallel_index}")

    def _layout(self) -> Layout:
        ranks = 1 if self.replicated_layout else self.config.parallel.world_size
        row_bytes = self.cpu_page_size_per_worker * ranks
        layout = layout_of(self._kv_cache_config, row_bytes, ranks, self.config.model.dtype)
        return layout if self._memory_form is None else msgspec.structs.replace(layout, engine="vllm+int8")


def _markers_of(vllm_config: VllmConfig) -> ChatMarkers:
    """The model's chat markers; none where there is no tokenizer. A forecast without them is weaker, not wrong."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return ChatMarkers()
    try:
        return chat_markers(cached_tokenizer_from_config(model))
    except Exception as error:  # noqa: BLE001 - engine boundary: any tokenizer may fail in its own way
        logger.warning("kvtier: tool calls stay unseen, the tokenizer cannot be asked for its markers: %s", error)
        return ChatMarkers()


def _with_extra(config: OffloadingConfig, extra: dict[str, Any]) -> OffloadingConfig:
    return replace(config, extra_config=extra)


def _check_shm(dram_bytes: int, engine_id: str) -> None:
    """Fail before the engine waits for memory that is not there. Only the first worker creates the region."""
    if Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").exists():
        return
    free = shutil.disk_usage("/dev/shm").free
    if dram_bytes > free:
        raise ConfigError(
            f"dram_bytes is {dram_bytes} but /dev/shm has {free} bytes free; lower dram_bytes or enlarge /dev/shm "
            "(docker: --shm-size, Kubernetes: an emptyDir of medium Memory)"
        )


def _refuse_unsupported(config: OffloadingConfig, vllm_config: VllmConfig) -> None:
    parallel = config.parallel
    for name, size in (
        ("pipeline", parallel.pp_size),
        ("prefill context", parallel.pcp_size),
        ("decode context", parallel.dcp_size),
    ):
        if size > 1:
            raise ConfigError(f"kvtier does not support {name} parallelism yet (size {size}); set it to 1")
    if config.canonical_layout:
        raise ConfigError("kvtier does not support canonical_layout; remove it from kv_connector_extra_config")
