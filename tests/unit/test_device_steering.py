"""Steering where it must not: a queue that is not as expected, a pool of another vLLM, blocks somebody waits for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="steers vLLM's free queue")

from kvtier.errors import EngineMismatchError
from kvtier_vllm.device import watch_device
from kvtier_vllm.device_pool import check_pool
from kvtier_vllm.steering import Steering
from tests.e2e.scheduler_without_model import BLOCK_TOKENS, SchedulerWithoutModel

OFF = ("kvtier_faults", ("hbm", "steering_off"))


@pytest.fixture
def engine() -> Iterator[SchedulerWithoutModel]:
    found = SchedulerWithoutModel(17, "kvtier")
    yield found
    found.close()


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [seed] * (blocks * BLOCK_TOKENS)


def queue_of(engine: SchedulerWithoutModel) -> list[int]:
    return [block.block_id for block in engine._engine.block_pool.free_block_queue.get_all_free_blocks()]


def off_count(engine: SchedulerWithoutModel) -> float:
    return engine._cache.recorder.drain()[0].get(OFF, 0.0)


def test_a_queue_that_is_not_as_expected_is_left_alone_from_then_on(engine: SchedulerWithoutModel) -> None:
    for i in range(4):
        engine.serve(10.0 * i, prompt(i), [1])
    steering = engine._steering
    assert steering is not None
    assert not steering.off
    block: Any = engine._engine.block_pool.free_block_queue.fake_free_list_head.next_free_block
    block.ref_cnt += 1  # in the queue and in use: what a bug would do
    problem = steering._queue_is_sound(1)
    assert f"block {block.block_id} does not belong" in problem
    steering._check(problem)
    block.ref_cnt -= 1
    before, moved = queue_of(engine), steering.moved
    steering.steer()
    assert (queue_of(engine), steering.moved) == (before, moved)
    assert off_count(engine) == 1


def test_a_queue_without_the_methods_is_never_steered(
    engine: SchedulerWithoutModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = engine._engine.block_pool
    monkeypatch.setattr(type(pool.free_block_queue), "prepend_n", None)
    steering = Steering(pool, engine.device.watch.view, 8, engine._cache.recorder, engine._clock)
    assert steering.off == "the queue has no prepend_n"
    assert off_count(engine) == 1
    steering.steer()


def test_a_pool_of_another_vllm_is_left_to_vllm(engine: SchedulerWithoutModel) -> None:
    pool: Any = SimpleNamespace(enable_caching=True, cache_full_blocks=lambda request: None, blocks=[])
    with pytest.raises(EngineMismatchError, match="cache_full_blocks takes other arguments"):
        check_pool(pool)
    assert watch_device(pool, engine._manager, SimpleNamespace()) is None
    counted = engine._cache.recorder.drain()[0]
    assert counted["kvtier_faults", ("hbm", "not_opened")] == 1


def test_what_is_protected_is_not_named_until_then(engine: SchedulerWithoutModel) -> None:
    for i in range(3):
        engine.serve(10.0 * i, prompt(i), [1])
    cache, view = engine._cache, engine.device.watch.view
    now = engine._clock.now()
    paths = {i: cache.tree.walk(_chain_of(engine, i)).path for i in range(3)}
    held = {i: {int(b) for s in path for b in view.residency.held(s).ravel() if b >= 0} for i, path in paths.items()}
    assert cache.protect(paths[0], now + 60.0)
    assert not cache.protect([*paths[1], *paths[2]], now + 60.0), "never more than half of the pool"
    assert not held[0] & set(view.next_out(16))
    engine._clock.advance(61.0)
    assert held[0] <= set(view.next_out(16))


def _chain_of(engine: SchedulerWithoutModel, seed: int) -> bytes:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    request = Request("x", prompt(seed), SamplingParams(), None, block_hasher=engine._hasher)
    return engine._manager._key_space.adopt(list(request.block_hashes))
