"""SGLang's requests and radix nodes, as kvtier's policy sees them.

The policy keeps a prefix tree of its own over the requests it saw. Its keys are chained 64-bit hashes of token pages:
they only order evictions, so a collision costs a bad guess and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from kvtier.cache.ghosts import Ghosts
from kvtier.cache.locator import Locator
from kvtier.clock import Clock
from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.place.worth import WorthPolicy

_KEY_BYTES = 8
_MOST_RUNNING = 100_000
_OVER_REMEMBERED = 4_096


class DeviceView:
    """The device as the policy sees it. What is resident is SGLang's own business; only the capacity is known."""

    name = "hbm"

    def __init__(self, tree: PrefixTree, capacity_rows: int) -> None:
        self.tree = tree
        self.capacity_rows = capacity_rows
        self.resident_rows = 0

    def extent(self, segment: Segment) -> int:
        return 0

    def evictable_from(self, segment: Segment) -> int:
        return 0

    def rows(self, segment: Segment, start: int) -> int:
        return 0

    def leaves(self) -> Iterable[Segment]:
        return ()

    @property
    def residency(self) -> DeviceView:
        """The view itself: `Ghosts` asks a level for its residency."""
        return self


class RequestFeed:
    """Turns SGLang's requests into visits of kvtier's policy. One thread."""

    def __init__(self, page_tokens: int, capacity_pages: int, ghost_blocks: int, guarded: bool, clock: Clock) -> None:
        self._page_tokens = page_tokens
        self._clock = clock
        self.tree = PrefixTree(_KEY_BYTES)
        view = DeviceView(self.tree, capacity_pages)
        self.policy = WorthPolicy(view, guarded=guarded)
        self._locator = Locator(self.tree)
        self._ghosts = Ghosts(self.tree, lambda: [view], ghost_blocks)
        self._running: OrderedDict[str, RequestContext] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()

    @property
    def trusts_forecast(self) -> bool:
        """Whether the forecast orders evictions now."""
        return self.policy.guard is None or self.policy.guard.trusts_forecast

    def now(self) -> float:
        """Seconds of the policy's clock."""
        return self._clock.now()

    def stepped(self, requests: Sequence[Any]) -> None:
        """Requests seen for the first time arrived; those that finished have ended."""
        for request in requests:
            # With overlapped scheduling a request that has finished is in one more step.
            if request.rid in self._over:
                continue
            if request.rid not in self._running:
                self._arrived(request)
            if request.finished():
                self._ended(request)

    def segment_of(self, node: Any) -> Segment | None:
        """The segment a radix node's last page lies in, if the tree knows it."""
        key = self._end_key(node)
        place = self._locator.find(key) if key else None
        return None if place is None else place.segment

    def _arrived(self, request: Any) -> None:
        tokens = request.origin_input_ids
        path = self.tree.insert(self._chain(request, tokens))
        context = RequestContext(request_id=request.rid, arrival_s=self.now(), prompt_tokens=len(tokens))
        self._running[request.rid] = context
        if len(self._running) > _MOST_RUNNING:
            self._running.popitem(last=False)
        if path:
            self.policy.on_arrival(path, context, self.now())
            self._ghosts.visited(path)

    def _ended(self, request: Any) -> None:
        context = self._running.pop(request.rid)
        self._over[request.rid] = None
        if len(self._over) > _OVER_REMEMBERED:
            self._over.popitem(last=False)
        generated = list(request.output_ids)
        path = self.tree.insert(self._chain(request, [*request.origin_input_ids, *generated]))
        if path:
            outcome = Outcome(
                finished_s=self.now(), stop_reason=_stop_reason(request.finished_reason), output_tokens=len(generated)
            )
            self.policy.on_finish(path, context, outcome, self.now())
            self._ghosts.visited(path)
        self._ghosts.prune()

    def _chain(self, request: Any, tokens: Sequence[int]) -> bytes:
        seed = _seed(getattr(request, "extra_key", None), getattr(request, "cache_salt", None))
        return _page_keys(tokens, self._page_tokens, seed)

    def _end_key(self, node: Any) -> bytes:
        """The key of a node's last page, remembered on the node: splitting a node does not change where it ends."""
        known: bytes | None = getattr(node, "kvtier_end_key", None)
        if known is not None:
            return known
        unknown = []
        while known is None and node.key is not None and node.parent is not None:
            unknown.append(node)
            node = node.parent
            known = getattr(node, "kvtier_end_key", None)
        end = known or b""
        for node in reversed(unknown):
            key = node.key
            if getattr(key, "is_bigram", False):
                return b""
            seed = end or _seed(getattr(key, "extra_key", None), getattr(key, "cache_salt", None))
            tokens = key.raw_token_ids() if hasattr(key, "raw_token_ids") else key.token_ids
            pages = _page_keys(tokens, self._page_tokens, seed)
            end = pages[-_KEY_BYTES:] or end
            node.kvtier_end_key = end
        return end


def _page_keys(tokens: Sequence[int], page_tokens: int, before: bytes) -> bytes:
    """Chained 64-bit hashes of the full pages of `tokens`. They only order evictions: a collision costs a bad guess."""
    packed = np.asarray(tokens, dtype="<i8").tobytes()
    size, keys = 8 * page_tokens, []
    for at in range(0, len(packed) // size * size, size):
        before = xxhash.xxh3_64_digest(before + packed[at : at + size])
        keys.append(before)
    return b"".join(keys)


def _seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """What keeps adapters and tenants apart."""
    return f"{extra_key or ''}\0{cache_salt or ''}".encode()


def _stop_reason(reason: Any) -> StopReason:
    kind = (reason.to_json() if hasattr(reason, "to_json") else {}).get("type", "")
    return {
        "stop": StopReason.END_TURN,
        "length": StopReason.LENGTH,
        "abort": StopReason.ABORTED,
    }.get(str(kind), StopReason.UNKNOWN)
