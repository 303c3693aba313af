"""Control from outside the engine's thread: hints and state over HTTP, and a timekeeper for when the engine sleeps.

An engine without requests takes no steps, and that is when hints matter most: the tool runs, and its session is about
to be back. So whoever holds the cache's lock decides. Usually that is the engine's thread; the timekeeper comes in only
while there are hints and the lock is free (docs/decisions/0008).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.cache.tier_cache import TierCache
from kvtier.errors import HintError
from kvtier.observe.endpoint import TOKEN_VARIABLE, ControlServer, parse_address
from kvtier.place.hint_message import parse_hints
from kvtier.place.hints import Hint

_PATIENCE_S = 5.0
_BEAT_S = 0.1
_MOST_MESSAGES = 1000


class Control:
    """The control side of one cache. `close` ends its threads. Methods may be called from any thread."""

    def __init__(self, cache: TierCache, port_offset: int = 0) -> None:
        """Opens the endpoint if the configuration asks for one. Raises ConfigError if it cannot be had."""
        self._cache = cache
        self._closing = threading.Event()
        self._timekeeper: threading.Thread | None = None
        self.server: ControlServer | None = None
        if cache.config.control:
            host, port = parse_address(cache.config.control)
            routes = {
                "POST /v1/hints": self._hints,
                "POST /v1/tiers/detach": self._detach,
                "POST /v1/tiers/attach": self._attach,
                "GET /v1/state": self._state,
            }
            # From the environment: an engine prints its configuration.
            self.server = ControlServer(host, port + port_offset, os.environ.get(TOKEN_VARIABLE, ""), routes)
            self.keep_time()

    def keep_time(self) -> None:
        """From now on hints are carried out although the engine sleeps. Idempotent; call with the cache's lock."""
        if self._timekeeper is None and not self._closing.is_set():
            self._timekeeper = threading.Thread(target=self._beat, name="kvtier-timekeeper", daemon=True)
            self._timekeeper.start()

    def close(self) -> None:
        """Stop serving and keeping time. Idempotent; call without the cache's lock."""
        self._closing.set()
        if self.server is not None:
            self.server.close()
            self.server = None
        if self._timekeeper is not None:
            self._timekeeper.join(_PATIENCE_S)
            self._timekeeper = None

    # --- routes -------------------------------------------------------------------------------------------------

    def _hints(self, body: object) -> object:
        """One message or a list of them, taken in whole or not at all."""
        messages = body if isinstance(body, list) else [body]
        if len(messages) > _MOST_MESSAGES:
            raise HintError(f"{len(messages)} hints at once; send at most {_MOST_MESSAGES}")
        hints: list[Hint] = [hint for message in messages for hint in parse_hints(message, time.time())]
        with self._locked():
            answers = [self._cache.hinted.offer(hint) for hint in hints]
        return {
            "results": [
                {
                    "session": hint.session,
                    "kind": hint.kind.value,
                    "outcome": answer.outcome.value,
                    "reason": answer.reason,
                }
                for hint, answer in zip(hints, answers, strict=True)
            ]
        }

    def _state(self, body: object) -> object:
        """What the cache is doing now, and why the gate decided as it did."""
        cache = self._cache
        with self._locked():
            now = cache.clock.now()
            machine, signals = cache.watch.machine, cache.watch.signals(now)
            return {
                "mode": machine.mode.value,
                "mode_reason": machine.reason if machine.conservative else "",
                "signals": signals._asdict(),
                "hinted_sessions": len(cache.hinted),
                "leases": cache.leases(),
                "gpu_busy": cache.traffic.gpu_share(),
                "tiers": [
                    {
                        "name": level.name,
                        "rows": level.residency.resident_rows,
                        "capacity_rows": level.residency.capacity_rows,
                        "pinned_rows": level.residency.pinned_rows,
                        "row_bytes": level.row_bytes,
                        "link_busy": cache.traffic.link_share(level.name),
                    }
                    for level in (cache.memory, *cache.lower)
                ],
                "decisions": [
                    {
                        "request": d.request_id,
                        "start_token": d.start_token,
                        "prompt_tokens": d.prompt_tokens,
                        "found_blocks": d.cut.found,
                        "loaded_blocks": d.cut.blocks,
                        "load_s": d.cut.load_s,
                        "exposed_s": d.cut.exposed_s,
                        "recompute_s": d.cut.recompute_s,
                        "recompute_without_s": d.cut.recompute_all_s,
                        "queue_s": d.cut.queue_s,
                        "effective_hit": d.cut.effective_hit,
                        "gpu_busy": d.gpu_share,
                    }
                    for d in cache.traffic.decisions
                ],
            }

    def _detach(self, body: object) -> object:
        """Let go of the tier named; says whether it has gone, or still ends what it had begun."""
        name = _tier_named(body)
        with self._locked():
            gone = self._cache.detach(name, wait_s=0.0)
        deadline = time.monotonic() + _PATIENCE_S
        while not gone and time.monotonic() < deadline:
            time.sleep(0.02)
            with self._locked():
                self._cache.poll()
                gone = not self._cache.levels.is_leaving(name)
        return {"tier": name, "gone": gone}

    def _attach(self, body: object) -> object:
        """Open the tier named as it is configured and take it in; says how many rows it brings."""
        name, reopen = _tier_named(body), self._cache.reopen
        if reopen is None:
            raise HintError("this engine cannot open tiers again; restart it")
        with self._locked():
            self._cache.levels.refuse_twice(name)  # before a second one is opened on the same medium
        tier = reopen(name)
        try:
            return {"tier": name, "rows": self._cache.attach(tier)}
        except BaseException:
            tier.close()
            raise

    # --- inside -------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._cache.lock.acquire(timeout=_PATIENCE_S):
            raise TimeoutError
        try:
            yield
        finally:
            self._cache.lock.release()

    def _beat(self) -> None:
        cache = self._cache
        while not self._closing.wait(_BEAT_S):
            if len(cache.hinted) and cache.lock.acquire(blocking=False):
                try:
                    if not self._closing.is_set():
                        cache.poll()
                except Exception:  # noqa: BLE001 - thread boundary: hints of other sessions are still kept
                    cache.recorder.add("kvtier_faults", 1, "engine", "timekeeper")
                finally:
                    cache.lock.release()


def _tier_named(body: object) -> str:
    name = body.get("tier") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise HintError('name the tier, as {"tier": "nvme"}')
    return name
