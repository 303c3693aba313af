"""vLLM's keys as rows, asked for by one or all at once: the answers must be the same."""

from __future__ import annotations

import inspect
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.cache.request import BlockState, LoadPlan
from kvtier.model.keys import KeySpace
from kvtier_vllm.compat import answer_prefixes_at_once
from kvtier_vllm.manager import KVTierManager
from kvtier_vllm.names import Names

CHUNK = 32
SPACE = KeySpace(weights="w", kv_dtype="float32", block_tokens=CHUNK, layout="l")


def prompt(blocks: int, groups: list[int], hash_bytes: int = 32) -> tuple[ReqContext, list[list[Any]], bytes]:
    context = ReqContext(req_id="r")
    digests = [os.urandom(hash_bytes) for _ in range(blocks)]
    keys = [[make_offload_key(digest, group) for digest in digests] for group in groups]
    for of_group in keys:
        for n, key in enumerate(of_group, 1):
            context.set_offload_key_position(key, n * CHUNK)
    return context, keys, SPACE.adopt(digests)


@pytest.mark.parametrize("hash_bytes", [32, 16])
def test_a_run_of_keys_is_what_its_keys_are(hash_bytes: int) -> None:
    context, (keys,), chain = prompt(40, [0], hash_bytes)
    names = Names({0: 0}, CHUNK)
    expected = [[block, 0] for block in range(7, 31)]
    assert names.run(keys[7:31], context, chain, SPACE).tolist() == expected
    assert names.rows(keys[7:31], context).tolist() == expected
    assert names.run([], context, chain, SPACE).shape == (0, 2)


def test_keys_that_are_no_run_are_named_one_by_one() -> None:
    context, (keys,), chain = prompt(40, [0])
    names, mixed = Names({0: 0}, CHUNK), [5, 3, 4, 6]
    assert names.run([keys[i] for i in mixed], context, chain, SPACE)[:, 0].tolist() == mixed
    with_a_hole = [3, 4, 6, 7]
    assert names.run([keys[i] for i in with_a_hole], context, chain, SPACE)[:, 0].tolist() == with_a_hole
    short = chain[: 32 * 5]  # the chain does not name the last of them yet
    assert names.run(keys[3:7], context, short, SPACE)[:, 0].tolist() == [3, 4, 5, 6]


def test_groups_have_their_columns() -> None:
    context, keys, chain = prompt(4, [2, 5])
    names = Names({2: 0, 5: 1}, CHUNK)
    both = keys[0][1:3] + keys[1][:2]
    expected = [[1, 0], [2, 0], [0, 1], [1, 1]]
    assert names.rows(both, context).tolist() == names.run(both, context, chain, SPACE).tolist() == expected


def test_a_prefix_is_what_asking_for_every_key_finds() -> None:
    draw = random.Random(0)
    context, keys, _ = prompt(12, [0, 1])
    for _ in range(300):
        start = draw.randrange(4)
        weights = draw.choice([(0, 1, 0), (1, 8, 0), (1, 8, 4), (0, 1, 1)])
        states = np.array(draw.choices(list(BlockState), weights, k=2 * 6), np.uint8).reshape(6, 2)
        manager = answering(LoadPlan(start, 6, states, 0), context)
        for group in (0, 1):
            first, n = draw.randrange(start, 12), draw.randrange(12)
            asked = [manager.lookup(key, context) for key in keys[group][first : first + n]]
            hits = asked.index(LookupResult.MISS) if LookupResult.MISS in asked else len(asked)
            expected = None if LookupResult.HIT_PENDING in asked[:hits] else hits
            assert manager.prefix(context, group, first, len(asked)) == expected


def test_sources_count_every_token_once() -> None:
    context, _, _ = prompt(10, [0])
    manager = answering(None, context)
    came = np.zeros(10, np.bool_)
    came[2:5] = True
    tracked: Any = SimpleNamespace(computed_tokens=CHUNK + 16, cached=SimpleNamespace(promoted_from={"nvme": came}))
    assert manager.load_sources(tracked, 3 * CHUNK) == {
        CacheHitSource.DISK: 2 * CHUNK + 16,
        CacheHitSource.HOST: 16,
    }


def test_vllm_asks_as_it_is_known_to() -> None:
    """A vLLM that asks otherwise is still answered, key by key: ten times as long. This says so."""
    scheduler: Any = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    scheduler._events_tracker = SimpleNamespace(self_describing_enabled=False)
    asked = []

    def prefix(context: Any, group: int, first: int, count: int) -> int | None:
        asked.append((context, group, first, count))
        return 3

    assert answer_prefixes_at_once(scheduler, prefix)
    group = SimpleNamespace(group_idx=1)
    assert scheduler._maximal_prefix_lookup([b"a", b"b"], "context", None, group, 7) == 3
    assert asked == [("context", 1, 7, 2)]


def test_where_events_describe_every_key_or_the_method_is_another_keys_are_asked_for() -> None:
    scheduler: Any = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    own = inspect.unwrap(scheduler._maximal_prefix_lookup)
    scheduler._events_tracker = SimpleNamespace(self_describing_enabled=True)
    assert not answer_prefixes_at_once(scheduler, lambda *arguments: 0)
    assert scheduler._maximal_prefix_lookup == own
    other: Any = SimpleNamespace(_maximal_prefix_lookup=lambda keys: 0, _events_tracker=SimpleNamespace())
    assert not answer_prefixes_at_once(other, lambda *arguments: 0)


def answering(plan: LoadPlan | None, context: ReqContext) -> KVTierManager:
    """A manager that has planned for one request of two groups."""
    memory = SimpleNamespace(name="dram")
    manager: Any = KVTierManager.__new__(KVTierManager)
    manager.cache = SimpleNamespace(memory=memory)
    manager.group_columns, manager._chunk_tokens = {0: 0, 1: 1}, CHUNK
    manager._tracked = {context.req_id: SimpleNamespace(cached=SimpleNamespace(plan=plan))}
    return manager
