"""`--radix-eviction-policy kvtier`: SGLang's radix tree, for device and host memory, evicts by kvtier's forecast.

SGLang asks for a priority of each of its nodes whenever it must evict. kvtier keeps its own prefix tree of the requests
it saw, with the same policy object that orders its tiers; a node's priority is the worth of the segment its last page
lies in while the guard trusts the forecast, and its recency otherwise. Needs the Python tree core.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from kvtier.clock import Clock, MonotonicClock
from kvtier.errors import ConfigError
from kvtier_sglang import hooks
from kvtier_sglang.request_feed import RequestFeed

logger = logging.getLogger(__name__)

TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
Priority = tuple[float, float]


class KVTierEvictionStrategy(EvictionStrategy):
    """What SGLang builds for the policy name "kvtier". Scheduler thread only.

    `ghost_blocks` pages are remembered beyond what the device holds; `guarded` false trusts the forecast blindly.
    """

    clock: Clock = MonotonicClock()

    def __init__(self, ghost_blocks: int = 200_000, guarded: bool = True) -> None:
        """Raises ConfigError under the Rust tree core, which cannot ask a policy written in Python."""
        if os.environ.get(TREE_CORE, "rust") != "python":
            raise ConfigError(
                f"--radix-eviction-policy kvtier needs SGLang's Python tree core: set {TREE_CORE}=python in the "
                f"environment, or choose another policy"
            )
        self._ghost_blocks = ghost_blocks
        self._guarded = guarded
        self._requests: RequestFeed | None = None
        self._gave_up = False
        hooks.watch(self)

    def get_priority(self, node: Any) -> Priority:
        """The lower, the sooner evicted."""
        return self._worth_of(node), float(node.last_access_time)

    def stepped(self, scheduler: Any, requests: Sequence[Any]) -> None:
        """Learn from the requests of a step."""
        try:
            self._learn(scheduler, requests)
        except Exception:  # noqa: BLE001 - engine boundary: SGLang's scheduler ends for good on an exception here
            self._give_up()

    def prefilled(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Of no interest here."""

    def weights_changed(self, version: str) -> None:
        """Of no interest here: SGLang flushes its tree itself."""

    def part_failed(self, part: str) -> None:
        """Of no interest here."""

    def _worth_of(self, node: Any) -> float:
        """By the forecast; 0 for all alike while recency decides."""
        requests = self._requests
        if requests is None or not requests.trusts_forecast:
            return 0.0
        try:
            segment = requests.segment_of(node)
            return 0.0 if segment is None else requests.policy.forecast.worth_of(segment.id, requests.now())
        except Exception:  # noqa: BLE001 - engine boundary, as above
            self._give_up()
            return 0.0

    def _learn(self, scheduler: Any, requests: Sequence[Any]) -> None:
        if self._gave_up:
            return
        if self._requests is None:
            page_tokens = int(getattr(scheduler, "page_size", 1) or 1)
            pages = max(1, int(scheduler.max_total_num_tokens) // page_tokens)
            self._requests = RequestFeed(page_tokens, pages, self._ghost_blocks, self._guarded, self.clock)
            logger.info("kvtier: evicting from a radix tree of %d pages of %d tokens by forecast", pages, page_tokens)
        self._requests.stepped(requests)

    def _give_up(self) -> None:
        """Something is wrong here: SGLang goes on without the forecast."""
        self._requests, self._gave_up = None, True
        hooks.forget(self)
        hooks.part_failed("radix_policy")
        logger.exception("kvtier: the radix policy failed; SGLang evicts by recency from here on")
