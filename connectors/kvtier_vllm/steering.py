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
from kvtier.clock import Clock
from kvtier.observe.metrics import Recorder

logger = init_logger("vllm.kvtier")

MOVES_A_STEP = 256
_AGAIN_S = 1.0  # worth changes with time: put in order anew, although nothing came or went


class Steering:
    """Orders the head of one pool's free queue. `window` is how many blocks one engine step may take."""

    def __init__(self, pool: BlockPool, view: DeviceView, window: int, recorder: Recorder, clock: Clock) -> None:
        self._pool = pool
        self._view = view
        self._window = max(1, min(window, MOVES_A_STEP))
        self._recorder = recorder
        self._clock = clock
        self._moves_left = MOVES_A_STEP
        self._state = (-1, -1, -1)  # of the queue and the view when it was put in order last
        self._again_s = 0.0
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
        first = queue.fake_free_list_head.next_free_block
        state = (queue.num_free_blocks, first.block_id, self._view.residency.resident_rows)
        if state == self._state and self._clock.now() < self._again_s:
            return
        bare = self._bare(window)
        rows = min(window, queue.num_free_blocks) - len(bare)
        if rows > 0:
            blocks = self._pool.blocks
            chosen = [block for i in self._view.next_out(rows) if self._may_move(block := blocks[i])][:rows]
            if chosen and not self._lead(bare, chosen):
                self._move(bare, chosen)
        first = queue.fake_free_list_head.next_free_block
        self._state = (queue.num_free_blocks, first.block_id, self._view.residency.resident_rows)
        self._again_s = self._clock.now() + _AGAIN_S

    def _move(self, bare: list[Any], chosen: list[Any]) -> None:
        queue, out = self._pool.free_block_queue, []
        free = queue.num_free_blocks
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

    def _bare(self, limit: int) -> list[Any]:
        """The blocks without a hash at the head of the queue, `limit` at most."""
        bare: list[Any] = []
        block, end = self._pool.free_block_queue.fake_free_list_head.next_free_block, self._end
        while block is not end and block.block_hash is None and len(bare) < limit:
            bare.append(block)
            block = block.next_free_block
        return bare

    def _lead(self, bare: list[Any], chosen: list[Any]) -> bool:
        """Whether the queue goes on with `chosen`, in this order, after `bare`."""
        before = bare[-1] if bare else self._pool.free_block_queue.fake_free_list_head
        for block in chosen:
            if before.next_free_block is not block:
                return False
            before = block
        return True

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
