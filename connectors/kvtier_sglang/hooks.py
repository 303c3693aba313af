"""What kvtier learns from the scheduler it lives in, through SGLang's own hook registry.

Three things: that weights were changed under the server, how long prefill steps take (what the gate compares loads
with), and which requests come and go (what the radix eviction policy forecasts from). Hooks are applied when the first
observer comes, in the scheduler's process, and cost nothing elsewhere. A version without the registry, or with other
names, goes without: then nothing is declined.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class Observer(Protocol):
    """Told of what happens in the scheduler, on its thread. Must not raise and must be quick."""

    def weights_changed(self, version: str) -> None:
        """The weights were replaced by ones of this version. Also told to an observer that comes after the change."""
        ...

    def prefilled(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One step computed tokens [start, stop) of some prompts in `seconds`."""
        ...

    def stepped(self, scheduler: Any, requests: Sequence[Any]) -> None:
        """One step of these requests ended."""
        ...

    def part_failed(self, part: str) -> None:
        """Another part of kvtier in this process gave up: to be counted."""
        ...


_observers: list[Observer] = []
_applied = False
_last_result_s = 0.0
_weights = ""


def watch(observer: Observer) -> None:
    """Tell `observer` from now on."""
    _observers.append(observer)
    _apply()
    if _weights:
        observer.weights_changed(_weights)


def forget(observer: Observer) -> None:
    """Tell `observer` no more. Idempotent."""
    if observer in _observers:
        _observers.remove(observer)


def part_failed(part: str) -> None:
    """Tell those who count that a part of kvtier gave up."""
    for observer in tuple(_observers):
        observer.part_failed(part)


def weights_changed(result: Any, scheduler: Any, new_version: str | None = None) -> None:
    """After `record_weight_version_change`, which every way of updating weights ends with. Weights that were given no
    name get one that never comes again."""
    global _weights
    _weights = new_version or uuid.uuid4().hex
    for observer in _observers:
        observer.weights_changed(_weights)


def step_ended(answer: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """After a step's result was taken in. With overlapped scheduling the step began when it was launched or when the
    one before it ended, whichever is later."""
    global _last_result_s
    now, launched = time.monotonic(), getattr(batch, "launch_ts", None)
    began, _last_result_s = max(_last_result_s, launched or 0.0), now
    if not _observers:
        return
    starts, lengths = getattr(batch, "prefix_lens", None), getattr(batch, "extend_lens", None)
    spans = []
    if launched and starts and lengths and batch.forward_mode.is_extend():
        spans = [(start, start + length) for start, length in zip(starts, lengths, strict=False) if length > 0]
    for observer in tuple(_observers):  # one that fails leaves
        if spans:
            observer.prefilled(spans, now - began)
        observer.stepped(scheduler, batch.reqs)


def _apply() -> None:
    global _applied
    if _applied:
        return
    _applied = True
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        logger.warning(
            "kvtier: this SGLang has no hooks: no load is ever declined, and after weights are changed its storage "
            "must be cleared (POST /hicache/storage-backend/clear)"
        )
        return
    HookRegistry.register(f"{_SCHEDULER}.record_weight_version_change", weights_changed, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", step_ended, HookType.AFTER)
    HookRegistry.apply_hooks()
