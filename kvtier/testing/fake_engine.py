"""An engine without a model: drives TierCache as a connector does and knows what every byte must be.

The KV of a block is a function of its key and group, so a wrong byte is found wherever it is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cache.request import BlockState, CachedRequest
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.errors import IntegrityError
from kvtier.model.keys import Chain, key_at
from kvtier.model.request import Outcome, RequestContext, StopReason


def token_chain(tokens: Sequence[int]) -> Chain:
    """Chained keys for a prompt of one token a block: the shortest way to prompts that share prefixes."""
    keys, parent = [], b""
    for token in tokens:
        parent = hashlib.sha256(parent + token.to_bytes(4, "little")).digest()
        keys.append(parent)
    return Chain(b"".join(keys))


def content_of(key: bytes, group: int, row_bytes: int) -> bytes:
    """What the model would compute for this block."""
    return hashlib.shake_128(key + bytes([group])).digest(row_bytes)


class FakeEngine:
    """One engine over one cache. Not thread-safe."""

    def __init__(self, cache: TierCache) -> None:
        self.cache = cache
        self.loaded_blocks = 0
        self.computed_blocks = 0
        self._count = 0

    def open(self, tokens: Sequence[int], extra_tokens: int = 0, session: str = "") -> CachedRequest:
        """A request with this prompt (one token a block of the cache's size) arrives."""
        self._count += 1
        chain = token_chain(tokens)
        context = RequestContext(
            request_id=f"r{self._count}",
            arrival_s=self.cache.clock.now(),
            prompt_tokens=len(tokens) * self.cache.block_tokens + extra_tokens,
            session_id=session,
        )
        return self.cache.open(context, chain)

    def lookup(self, request: CachedRequest, start: int = 0, patience: int = 10_000) -> int | None:
        """Ask until the answer is there; the blocks offered after `start`. None if patience runs out."""
        for _ in range(patience):
            self.cache.poll()
            plan = self.cache.lookup(request, start)
            if plan is not None:
                return plan.blocks
            self.cache.mover.drain(5.0)
        return None

    def load(self, request: CachedRequest, start: int = 0) -> int:
        """Load what the last lookup offered and check every byte; start over if memory has damaged any, as engines do.
        Returns the number of blocks."""
        plan = request.plan
        if plan is None or plan.blocks == 0:
            return 0
        hits = np.argwhere(plan.states == BlockState.HIT)
        rows = [RowRef(plan.start + int(block), int(group)) for block, group in hits]
        slots = self.cache.take_load(request, rows)
        if self.cache.config.memory_checks and not all(self.cache.seals.intact(slots, self._views(slots))):
            self.cache.end_load(request)
            self.lookup(request, start)
            return self.load(request, start)
        for row, slot in zip(rows, slots.tolist(), strict=True):
            self._check(request.chain, row, slot)
        self.loaded_blocks += plan.blocks
        return plan.blocks

    def compute(self, request: CachedRequest, start: int = 0, stop: int | None = None) -> list[RowRef]:
        """Compute blocks [start, stop) and offer them; writes what the cache takes, as a worker would. Returns the
        rows written and not yet committed."""
        stop = request.blocks if stop is None else stop
        self.computed_blocks += max(0, stop - start)
        rows = [RowRef(block, group) for group in range(self.cache.groups) for block in range(start, stop)]
        granted = self.cache.offer_store(request, rows)
        for row, slot in granted:
            self.cache.memory_row(slot)[:] = content_of(
                key_at(request.chain, row.block), row.group, self.cache.memory.row_bytes
            )
        if self.cache.config.memory_checks:
            slots = np.array([slot for _, slot in granted], np.int32)
            self.cache.seals.set(slots, self._views(slots))
        return [row for row, _ in granted]

    def finish(self, request: CachedRequest, stop: StopReason = StopReason.END_TURN) -> None:
        """The request ends."""
        self.cache.close_request(request, Outcome(finished_s=self.cache.clock.now(), stop_reason=stop))

    def serve(self, tokens: Sequence[int], extra_tokens: int = 1, session: str = "") -> int:
        """A whole request: look up, load, compute the rest, store, end. Returns the blocks loaded."""
        request = self.open(tokens, extra_tokens, session)
        self.lookup(request)
        return self.run(request)

    def run(self, request: CachedRequest) -> int:
        """The request runs: it loads what was offered, computes the rest, stores it and ends."""
        loaded = self.load(request)
        self.cache.end_load(request)
        self.cache.started(request)
        self.cache.commit_store(request, self.compute(request, loaded))
        self.finish(request)
        return loaded

    def settle(self) -> None:
        """Let everything that moves arrive."""
        self.cache.mover.drain(10.0)
        self.cache.poll()

    def _views(self, slots: npt.NDArray[np.int32]) -> list[memoryview]:
        return [self.cache.memory_row(slot) for slot in slots.tolist()]

    def _check(self, chain: bytes, row: RowRef, slot: int) -> None:
        expected = content_of(key_at(chain, row.block), row.group, self.cache.memory.row_bytes)
        if bytes(self.cache.memory_row(slot)) != expected:
            raise IntegrityError(f"slot {slot} does not hold block {row.block} of group {row.group}")
