"""Applies kvtier's order of eviction to vLLM's free queue.

vLLM takes new blocks from the head of its free queue, whatever they hold. Before it does, the blocks that should leave
first are moved there: behind those without a hash, which cost nothing to reuse, and before everything else. No block is
held, so capacity and `reset_prefix_cache` are what they were; the queue holds the same blocks in another order.

Every block is looked at again just before it is moved: it must be free, hashed, in the queue and awaited by nobody.
The queue is checked when steering begins and after every move; the first thing that is not as expected switches
steering off for good, and vLLM's own order stands.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool

from kvtier.cache.device import DeviceView
from kvtier.observe.metrics import Recorder

logger = init_logger("vllm.kvtier")

MOVES_A_STEP = 512  # about 0.3 ms


class Steering:
    """Orders the head of one pool's free queue. `window` is how many blocks one engine step may take."""

    def __init__(self, pool: BlockPool, view: DeviceView, window: int, recorder: Recorder) -> None:
        self._pool = pool
        self._view = view
        self._window = max(1, min(window, MOVES_A_STEP))
        self._recorder = recorder
        self._moves_left = MOVES_A_STEP
        self.off = ""
        self.moved = 0
        self._check(self._queue_is_sound(len(pool.blocks)))

    def new_step(self) -> None:
        """The bound on moves is one a step."""
        self._moves_left = MOVES_A_STEP

    def steer(self) -> None:
        """Put up to a window of blocks that should leave first at the head of the queue."""
        if self.off or self._moves_left <= 0:
            return
        try:
            self._steer()
        except (AttributeError, TypeError, RuntimeError, AssertionError) as error:
            self._check(f"{type(error).__name__}: {error}")

    def _steer(self) -> None:
        queue, window = self._pool.free_block_queue, min(self._window, self._moves_left)
        bare, front = self._front(window)
        rows = min(window, queue.num_free_blocks) - len(bare)
        if rows <= 0:
            return
        chosen = [block for i in self._view.next_out(rows) if self._may_move(block := self._pool.blocks[i])][:rows]
        if not chosen or all(one is other for one, other in zip(chosen, front, strict=False)):
            return
        free, out = queue.num_free_blocks, []
        try:
            for block in (*bare, *chosen):
                queue.remove(block)
                out.append(block)
        finally:
            queue.prepend_n(out)
        self._moves_left -= len(out)
        self.moved += len(chosen)
        self._recorder.add("kvtier_hbm_steered", len(chosen))
        problem = "" if queue.num_free_blocks == free else "the queue lost count"
        self._check(problem or self._queue_is_sound(len(out)))

    def _front(self, limit: int) -> tuple[list[Any], list[Any]]:
        """The blocks at the head of the queue: those without a hash, and those after them, `limit` together."""
        bare: list[Any] = []
        front: list[Any] = []
        block, end = self._pool.free_block_queue.fake_free_list_head.next_free_block, self._end
        while block is not end and len(bare) + len(front) < limit:
            if block.block_hash is None and not front:
                bare.append(block)
            else:
                front.append(block)
            block = block.next_free_block
        return bare, front

    @property
    def _end(self) -> Any:
        return self._pool.free_block_queue.fake_free_list_tail

    def _may_move(self, block: Any) -> bool:
        """Free, hashed, in the queue, and nobody told the pool to keep it readable until it is reused."""
        return (
            block.ref_cnt == 0
            and not block.is_null
            and block.block_hash is not None
            and block.next_free_block is not None
            and block.prev_free_block is not None
            and block.block_id not in self._pool._reuse_watchers
        )

    def _queue_is_sound(self, blocks: int) -> str:
        """What is wrong with the first `blocks` of the queue, if anything."""
        try:
            queue = self._pool.free_block_queue
            before, block = queue.fake_free_list_head, queue.fake_free_list_head.next_free_block
            for seen in range(min(blocks, queue.num_free_blocks)):
                if block is None or block is queue.fake_free_list_tail:
                    return f"the queue ends after {seen} of {queue.num_free_blocks} blocks"
                if block.prev_free_block is not before or block.ref_cnt != 0 or block.is_null:
                    return f"block {block.block_id} does not belong at place {seen} of the queue"
                before, block = block, block.next_free_block
            if not isinstance(self._pool._reuse_watchers, dict):
                return "reuse watchers are of another kind"
            for name in ("remove", "prepend_n"):
                if not callable(getattr(queue, name, None)):
                    return f"the queue has no {name}"
        except (AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _check(self, problem: str) -> None:
        if problem:
            self.off = problem
            self._recorder.add("kvtier_faults", 1, self._view.name, "steering_off")
            logger.error("kvtier: vLLM's own order of eviction stands on the device from now on: %s", problem)
