"""Watches vLLM's block pool, so that kvtier's view of the device is what the pool holds.

Two things tell everything: `BlockPool.cache_full_blocks`, which names the request and the position of every block that
gets a hash, and the pool's own map from hashes to blocks, which every hash leaves through `pop`. Both are written down
as they happen, at the cost of one tuple a call or a block, and read by `refresh`, a bounded number of rows at a time.
A reset of the prefix cache shows as another map.

vLLM keeps several blocks of one hash. One of them stands in the view; when it goes, another takes its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

from kvtier.cache.device import DeviceView
from kvtier.errors import EngineMismatchError
from kvtier.model.keys import chain_length

Slots = npt.NDArray[np.int32]

_ROWS_A_REFRESH = 4096
_ARGUMENTS = (
    "request",
    "blocks",
    "num_cached_blocks",
    "num_full_blocks",
    "block_size",
    "kv_cache_group_id",
    "block_mask",
)


class Owner(NamedTuple):
    """Whose blocks get hashes: `chain` gives the keys known by now; it grows until the request is `over`."""

    chain: Callable[[], bytes]
    over: Callable[[], bool] = lambda: False


class _Cached(NamedTuple):
    owner: Owner
    column: int
    first: int
    ids: Slots


class _Map(BlockHashToBlockMap):  # type: ignore[misc]
    """The pool's map, and a log of what leaves it."""

    def __init__(self, inner: BlockHashToBlockMap, left: Callable[[tuple[bytes, int]], None]) -> None:
        super().__init__()
        self._cache = inner._cache
        self._left = left

    def pop(self, key: Any, block_id: int) -> Any:
        block = super().pop(key, block_id)
        if block is not None:
            self._left((key, block_id))
        return block


class PoolWatch:
    """Keeps a DeviceView in step with one BlockPool. All calls come from the scheduler's thread.

    `parts` is how many device blocks of a group make one block of kvtier's, `columns` the view's first column of every
    group, `owner_of` finds a request by its id. Raises EngineMismatchError if the pool is not built as expected.
    """

    def __init__(
        self,
        pool: BlockPool,
        view: DeviceView,
        parts: int,
        columns: dict[int, int],
        owner_of: Callable[[str], Owner | None],
    ) -> None:
        check_pool(pool)
        self.view = view
        self.unplaced = 0
        self._pool = pool
        self._parts = parts
        self._columns = columns
        self._owner_of = owner_of
        self._log: deque[_Cached | tuple[bytes, int] | None] = deque()
        self._early: dict[int, _Cached] = {}
        self._cache_full_blocks = pool.cache_full_blocks
        self._map = self._watch_map()
        pool.cache_full_blocks = self._cache_full

    @property
    def behind(self) -> bool:
        """Whether something happened that the view does not show yet."""
        return bool(self._log) or self._pool.cached_block_hash_to_block is not self._map

    def refresh(self, rows: int = _ROWS_A_REFRESH) -> bool:
        """Bring the view up to date, as far as `rows` go. True if nothing is left to do."""
        self._notice_reset()
        if self._early:
            self._place_early()
        gone: list[int] = []
        while self._log and rows > 0:
            entry = self._log.popleft()
            if entry is not None and not isinstance(entry, _Cached):
                rows -= 1
                self._left(entry, gone)
                continue
            if gone:
                self.view.gone(np.array(gone, np.int32))
                gone = []
            if entry is None:
                self._early.clear()
                self.view.clear()
            else:
                rows -= len(entry.ids)
                self._place(entry)
        if gone:
            self.view.gone(np.array(gone, np.int32))
        return not self._log

    # --- what the pool calls ------------------------------------------------------------------------------------

    def _cache_full(
        self,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        self._notice_reset()
        self._cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        if num_cached_blocks >= num_full_blocks:
            return
        owner, column = self._owner_of(request.request_id), self._columns.get(kv_cache_group_id)
        if owner is None or column is None:
            self.unplaced += num_full_blocks - num_cached_blocks
            return
        ids = np.array([block.block_id for block in blocks[num_cached_blocks:num_full_blocks]], np.int32)
        if block_mask is not None:
            ids[~np.asarray(block_mask, np.bool_)] = self._pool.null_block.block_id
        self._log.append(_Cached(owner, column, num_cached_blocks, ids))

    def _notice_reset(self) -> None:
        if self._pool.cached_block_hash_to_block is not self._map:
            self._log.clear()
            self._log.append(None)
            self._map = self._watch_map()

    def _watch_map(self) -> _Map:
        watched = _Map(self._pool.cached_block_hash_to_block, self._log.append)
        self._pool.cached_block_hash_to_block = watched
        return watched

    # --- from the log to the view -------------------------------------------------------------------------------

    def _left(self, entry: tuple[bytes, int], gone: list[int]) -> None:
        key, block_id = entry
        self._early.pop(block_id, None)
        if not self.view.holds(block_id):
            return
        other = self._map.get_one_block(key)
        if other is not None and other.block_id != block_id and not self.view.holds(other.block_id):
            self.view.swap(block_id, other.block_id)
        else:
            gone.append(block_id)

    def _place(self, entry: _Cached) -> None:
        """Place the blocks whose key is known. The first blocks of a chunk that is not full yet have none."""
        index = entry.first + np.arange(len(entry.ids))
        chain = entry.owner.chain()
        known = index // self._parts < chain_length(chain)
        real = entry.ids != self._pool.null_block.block_id
        here = known & real
        index_here = index[here]
        self.view.place(
            chain,
            (index_here // self._parts).astype(np.intp),
            (entry.column + index_here % self._parts).astype(np.intp),
            entry.ids[here],
        )
        for i in np.flatnonzero(~known & real).tolist():
            self._early[int(entry.ids[i])] = entry._replace(first=int(index[i]), ids=entry.ids[i : i + 1])

    def _place_early(self) -> None:
        waiting, self._early = self._early, {}
        for block_id, entry in waiting.items():
            if entry.first // self._parts < chain_length(entry.owner.chain()):
                self._place(entry)
            elif not entry.owner.over():
                self._early[block_id] = entry


def check_pool(pool: BlockPool) -> None:
    """Raise EngineMismatchError if this pool is not built the way `PoolWatch` and `Steering` rely on."""
    problem = ""
    if tuple(signature(pool.cache_full_blocks).parameters) != _ARGUMENTS:
        problem = "cache_full_blocks takes other arguments"
    elif not isinstance(pool.cached_block_hash_to_block, BlockHashToBlockMap):
        problem = "the map from hashes to blocks is of another kind"
    elif not all(hasattr(BlockHashToBlockMap, name) for name in ("get_one_block", "contain", "insert", "pop")):
        problem = "the map from hashes to blocks has other methods"
    elif not hasattr(pool.cached_block_hash_to_block, "_cache"):
        problem = "the map from hashes to blocks keeps them elsewhere"
    elif any(block.block_id != i for i, block in enumerate(pool.blocks)):
        problem = "block ids are not positions"
    if problem:
        raise EngineMismatchError(f"vLLM's block pool is not the one kvtier knows: {problem}")
