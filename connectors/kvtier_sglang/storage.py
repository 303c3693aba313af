"""KVTierStorage: SGLang's storage interface in front of a StorageCache.

SGLang calls from three threads: one asks (`batch_exists`), one reads (`batch_get_v1`), one writes (`batch_set_v1`); the
scheduler itself asks for statistics every step. Nothing here raises into those threads, for some versions of SGLang end
them for good on an exception (sglang#39269): what goes wrong is counted and is a miss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtier.cache.geometry import Geometry
from kvtier.cache.storage_cache import StorageCache
from kvtier.errors import EngineMismatchError
from kvtier.model.keys import Chain
from kvtier.tiers.open import open_lower_tiers, register_memory
from kvtier_sglang import hooks, metrics
from kvtier_sglang.above import pages_above
from kvtier_sglang.compat import check_version, refuse_adapters_without_names
from kvtier_sglang.encoding import encodings
from kvtier_sglang.identity import key_space_of, layout_of, updated_weights
from kvtier_sglang.options import cache_config
from kvtier_sglang.pages import HostPages
from kvtier_sglang.site import site_of

logger = logging.getLogger(__name__)

_EXPORT_EVERY_S = 0.5
Answer = TypeVar("Answer")


class KVTierStorage(HiCacheStorage):
    """What `--hicache-storage-backend dynamic` loads. Thread-safe once the host pool is registered."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Checks version and configuration. Raises ConfigError or EngineMismatchError; the attach fails with it."""
        self.version = check_version()
        self._storage_config = storage_config
        self._config = cache_config(getattr(storage_config, "extra_config", None))
        refuse_adapters_without_names()
        self._exports = bool(
            getattr(storage_config, "enable_storage_metrics", "PROMETHEUS_MULTIPROC_DIR" in os.environ)
        )
        self._export_lock = threading.Lock()
        self._next_export_s = 0.0
        self._pool: Any = None
        self._complained: set[str] = set()

    # --- SGLang's life cycle ------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for this pool's pages. Raises ConfigError or EngineMismatchError."""
        self.mem_pool_host = self._pool = mem_pool_host
        self._pages = HostPages(mem_pool_host)
        layout = layout_of(mem_pool_host, self._pages)
        self._base_space = self._space = key_space_of(self._storage_config, layout, self._config)
        geometry = Geometry(self._pages.page_tokens, self._pages.groups)
        site = site_of(self._config, self._storage_config, self._space, layout.digest, layout.row_bytes)
        pages, dtype = self._pages, str(mem_pool_host.dtype).removeprefix("torch.")
        codecs = encodings(self._config, layout.row_bytes, pages.groups, pages.page_tokens, dtype)
        tiers, missing = open_lower_tiers(replace(site, encodings=codecs))
        for memory in self._pages.memory:
            register_memory(tiers, memory)
        self.cache = StorageCache(self._config, geometry, tiers)
        for name in missing:
            self.cache.recorder.add("kvtier_faults", 1, name, "not_opened")
        hooks.watch(self)
        rows = " + ".join(f"{level.residency.capacity_rows} in {level.name}" for level in self.cache.levels)
        logger.info(
            "kvtier: SGLang %s, %s pages of %d tokens (%d rows of %d bytes, %s), room for %s rows, policy %s, keys %s",
            self.version,
            self._pages.layout,
            self._pages.page_tokens,
            self._pages.groups,
            self._pages.row_bytes,
            "gathered" if self._pages.staged else "in place",
            rows,
            self._config.policy,
            self._space.digest.hex()[:12],
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """The pool of a plain model comes again under the name "kv". Raises EngineMismatchError for any other: states
        that are not a cache of blocks (Mamba, sliding windows, draft models) are not stored yet."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != "kv":
            self.close()  # SGLang does not take back an attach that fails here: nothing may stay open
            raise EngineMismatchError(
                f"this model keeps a second kind of state ({name}) beside its KV cache, which kvtier's SGLang "
                "storage does not support yet; start it without --hicache-storage-backend"
            )

    def close(self) -> None:
        """Finish what is under way and close the tiers. Called on detach; idempotent."""
        hooks.forget(self)
        if self._pool is not None:
            self.cache.close()
            self._export(now=True)

    def clear(self) -> None:
        """Forget everything that is stored."""
        self._guarded("clear", self.cache.clear, None)

    # --- the v1 interface ---------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be loaded and are worth it; they stay where they are until loaded, for a while."""
        return self._guarded("exists", lambda: self.cache.find(self._chain(keys), self._head(extra_info)), 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool, verified. The content of a page that is False is undefined."""

        def get() -> list[bool]:
            chain, done = self._chain(keys), list[bool]()
            for part in self._pages.batches(len(keys)):
                indices = self._indices(host_indices, part)
                targets = self._pages.to_write_to(indices)
                arrived = self.cache.load(_part(chain, part), targets)
                self._pages.filled(indices, targets, arrived)
                done += arrived
            return done

        return self._guarded("get", get, [False] * len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write pages no tier has yet. True for those that are kept."""

        def put() -> list[bool]:
            chain, head, done = self._chain(keys), self._head(extra_info), list[bool]()
            for part in self._pages.batches(len(keys)):
                sources = self._pages.to_read_from(self._indices(host_indices, part))
                done += self.cache.store(_part(chain, part), sources, head)
                head = _part(chain, part)
            return done

        return self._guarded("set", put, [False] * len(keys))

    def exists(self, key: str) -> bool:
        """Whether one page can be loaded."""
        return self.batch_exists([key]) == 1

    def get_stats(self) -> None:
        """Called every step of the scheduler, so it does next to nothing: SGLang's own counters say the rest."""
        self._export()

    # --- the copying interface of old versions, which "interface_v1" replaces -----------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        raise EngineMismatchError(_NO_COPIES)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        raise EngineMismatchError(_NO_COPIES)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        raise EngineMismatchError(_NO_COPIES)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> NoReturn:
        raise EngineMismatchError(_NO_COPIES)

    # --- told by hooks ------------------------------------------------------------------------------------------

    def weights_changed(self, version: str) -> None:
        """The weights were changed under the server: nothing stored before is found again, unless they come back under
        the same name."""
        self._space = updated_weights(self._base_space, version)
        logger.info("kvtier: weights changed, key space %s from here on", self._space.digest.hex()[:12])

    def prefilled(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """What computing costs now: the gate compares loads with it."""
        self._guarded("prefilled", lambda: self.cache.observe_prefill(spans, seconds), None)

    def stepped(self, scheduler: Any, requests: Sequence[Any]) -> None:
        """Of no interest here: storage calls say what is wanted."""

    def part_failed(self, part: str) -> None:
        """Count it among the faults: this part has the metrics."""
        self.cache.note_fault(part)

    # --- inside -------------------------------------------------------------------------------------------------

    def _chain(self, keys: Sequence[str]) -> Chain:
        """SGLang's page hashes, moved into this key space."""
        return self._space.adopt([_digest(key) for key in keys])

    def _head(self, extra_info: Any) -> bytes:
        """The keys before the call's first one, if SGLang tells them (hicache_storage_pass_prefix_keys)."""
        prefix = getattr(extra_info, "prefix_keys", None)
        # 0.5.9 hands out a tuple that holds None.
        return self._chain([key for key in prefix if key is not None]) if prefix else b""

    def _indices(self, host_indices: Any, part: slice) -> Any:
        size = self._pages.page_tokens
        return host_indices[part.start * size : part.stop * size]

    def _guarded(self, call: str, action: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            answer = action()
        except Exception as error:
            self.cache.note_fault(f"{call}_{type(error).__name__}")
            if call not in self._complained:
                self._complained.add(call)
                logger.exception("kvtier: %s failed; counted in kvtier_faults, further ones are not logged", call)
            answer = otherwise
        self._export()
        return answer

    def _export(self, now: bool = False) -> None:
        """Hand the counters on, twice a second at most; another thread doing so now is enough."""
        if not self._exports or self._pool is None or (not now and time.monotonic() < self._next_export_s):
            return
        if self._export_lock.acquire(blocking=now):
            try:
                self._next_export_s = time.monotonic() + _EXPORT_EVERY_S
                page_bytes = self._pages.row_bytes * self._pages.groups
                above = {tier: pages * page_bytes for tier, pages in pages_above().items()}
                metrics.export(self.cache, above)
            finally:
                self._export_lock.release()


_NO_COPIES = 'kvtier reads and writes host pages in place; add "interface_v1": 1 to the extra configuration'


def _part(chain: bytes, part: slice) -> bytes:
    return chain[part.start * 32 : part.stop * 32]


def _digest(key: str) -> bytes:
    """A page hash as bytes. SGLang's are 64 hexadecimal digits; anything else is taken as it is."""
    try:
        return bytes.fromhex(key) if len(key) == 64 else key.encode()
    except ValueError:
        return key.encode()
