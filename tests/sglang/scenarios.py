"""SGLang's own pools, radix tree and HiCache controller over kvtier, without a server: run in SGLang's environment.

One process goes through every combination of pool and host layout in seconds, where a server takes most of a minute to
start. The bytes are made up; what is compared is that they come back to the device unchanged from every level.
"""

from __future__ import annotations

import fcntl
import itertools
import socket
import time
from pathlib import Path
from typing import Any

from tests.sglang.stack import DEVICE_TOKENS, PAGE_TOKENS, TOKENS, Stack, become_a_rank

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = ("mha", "mla")


def without_a_server(folder: str) -> dict[str, Any]:
    """All scenarios below, in one process: importing SGLang takes longer than any of them."""
    become_a_rank()
    return {
        "levels": every_level(folder),
        "hybrid": hybrid_is_refused(str(Path(folder) / "hybrid")),
        "whose": whose_pages(str(Path(folder) / "whose")),
        "races": aborted_requests(str(Path(folder) / "aborted")),
        "failures": failing_calls(str(Path(folder) / "failing")),
        "a file": start_over_a_file(str(Path(folder) / "file")),
        "degraded": degraded_start(str(Path(folder) / "degraded")),
    }


def every_level(folder: str) -> dict[str, dict[str, Any]]:
    """For every pool and layout: tokens found on the host, in storage, after a restart; whether bytes are the same."""
    results = {}
    for pool, layout in itertools.product(POOLS, LAYOUTS):
        nvme, tokens = str(Path(folder) / f"{pool}-{layout}"), list(range(1_000, 1_000 + TOKENS))
        stack = Stack(pool, layout, nvme)
        written = stack.compute(tokens)
        stack.evict()
        host = stack.load_back(tokens)
        stack.flush()
        fetched = [stack.prefetch(tokens, "flushed")]
        storage = stack.load_back(tokens)
        direct = not stack.storage._pages.staged
        stack.close()
        again = Stack(pool, layout, nvme)
        fetched.append(again.prefetch(tokens, "restarted"))
        restarted = again.load_back(tokens)
        leases = again.storage.cache.leases()
        again.close()
        levels = (host, storage, restarted)
        results[f"{pool}-{layout}"] = {
            "tokens": [found for found, _ in levels],
            "prefetched": fetched,
            "same_bytes": [arrived == written for _, arrived in levels],
            "in_place": direct,
            "leases": leases,
        }
    return results


def hybrid_is_refused(folder: str) -> dict[str, Any]:
    """What a model with sliding windows is told when SGLang registers the host pool of its second kind of state; and
    whether the folder is free afterwards."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from kvtier.errors import EngineMismatchError

    stack = Stack("mha", "page_first", folder)
    hybrid = SWAKVPool(
        size=DEVICE_TOKENS,
        size_swa=DEVICE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.float32,
        head_num=2,
        head_dim=32,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    second = MHATokenToKVPoolHost(
        hybrid.swa_kv_pool.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=DEVICE_TOKENS,
        start_layer=0,
        end_layer=2,
    )
    refusal = ""
    try:
        stack.storage.register_mem_host_pool_v2(second, PoolName.SWA)
    except EngineMismatchError as error:
        refusal = str(error)
    again = Stack("mha", "page_first", folder)
    levels = [level.name for level in again.storage.cache.levels]
    again.close()
    stack.close()
    return {"refusal": refusal, "levels_of_the_next": levels}


def whose_pages(folder: str) -> dict[str, int]:
    """The same tokens asked for by somebody else, and after new weights: tokens found."""
    stack, tokens = Stack("mha", "page_first", folder), list(range(5_000, 5_000 + TOKENS))
    stack.compute(tokens)
    found = {}
    for name, whose in (("salt", {"cache_salt": "b"}), ("adapter", {"extra_key": "b"}), ("own", {})):
        stack.flush()
        found[name] = stack.prefetch(tokens, name, **whose)
    stack.storage.weights_changed("step-2")
    stack.flush()
    found["new weights"] = stack.prefetch(tokens, "new weights")
    stack.close()
    return found


def aborted_requests(folder: str, rounds: int = 30) -> dict[str, Any]:
    """Requests that go away while their pages are on the way, at a different moment each time; then one that stays."""
    stack, tokens = Stack("mha", "page_first", folder), list(range(6_000, 6_000 + TOKENS))
    written = stack.compute(tokens)
    for number in range(rounds):
        stack.flush()
        handle = stack.begin_prefetch(tokens, f"aborted-{number}")
        time.sleep(number % 6 * 0.0004)
        stack.tree.check_hicache_events()
        stack.tree.release_aborted_request(handle)
        stack.tree.check_hicache_events()
    stack.flush()
    fetched = stack.prefetch(tokens, "stays")
    found, arrived = stack.load_back(tokens)
    stack.storage.cache.settle()
    stack.storage.cache.check_integrity()
    leases = stack.storage.cache.leases()
    stack.close()
    return {"fetched": fetched, "found": found, "same_bytes": arrived == written, "leases": leases}


def failing_calls(folder: str, prompts: int = 30, rounds: int = 2) -> dict[str, Any]:
    """SGLang's own failure injector on, from the first write: what is found has the right bytes, and tokens and misses
    are conserved."""
    from sglang.srt.environ import envs

    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.004),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
    ):
        stack = Stack("mha", "page_first", folder)
    texts = [list(range(start, start + TOKENS)) for start in range(10_000, 10_000 + 1_000 * prompts, 1_000)]
    written, rows = [], [0]
    for tokens in texts:
        stack.flush()
        written.append(stack.compute(tokens, stored=False))
        rows.append(stack.rows())
    kept = [after - before for before, after in itertools.pairwise(rows)]
    loads, wrong = [], 0
    for number, tokens in enumerate(texts * rounds):
        stack.flush()
        stack.prefetch(tokens, f"failing-{number}")
        found, arrived = stack.load_back(tokens)
        expected = [layer[: len(part)] for layer, part in zip(written[number % prompts], arrived, strict=True)]
        wrong += arrived != expected
        loads.append(found)
    stack.storage.cache.settle()
    stack.storage.cache.check_integrity()
    sums, _ = stack.storage.cache.drain()
    recomputed = sums.get(("kvtier_tokens", ("recompute",)), 0.0)
    misses = {labels[0]: value for (name, labels), value in sums.items() if name == "kvtier_miss_tokens"}
    leases = stack.storage.cache.leases()
    stack.close()
    return {
        "kept": kept,
        "loads": loads,
        "wrong": wrong,
        "leases": leases,
        "reasons": sorted(misses),
        "unexplained": recomputed - sum(misses.values()),
    }


def start_over_a_file(path: str) -> str:
    """Where the folder should be there is a file: what the attach fails with."""
    from kvtier.errors import ConfigError

    Path(path).write_text("in the way")
    try:
        Stack("mha", "page_first", path).close()
    except ConfigError as error:
        return str(error)
    return ""


def degraded_start(folder: str) -> dict[str, Any]:
    """Beside the nvme tier, a shared folder whose lock nobody gives back and a pool whose master takes connections and
    says nothing: what the attach took longer for them, what is counted, and whether the rest serves."""
    dead, tokens = Path(folder) / "dead", list(range(8_000, 8_000 + TOKENS))
    (dead / "kvtier").mkdir(parents=True)
    began = time.monotonic()
    Stack("mha", "page_first", str(Path(folder) / "plain")).close()
    plain_s = time.monotonic() - began
    with (dead / "kvtier" / "lock").open("w") as lock, socket.create_server(("127.0.0.1", 0)) as silent:
        fcntl.flock(lock, fcntl.LOCK_EX)
        master = f"127.0.0.1:{silent.getsockname()[1]}"
        options = {"shared_fs_path": str(dead), "shared_fs_bytes": "16MiB", "pool_master": master}
        began = time.monotonic()
        stack = Stack("mha", "page_first", str(Path(folder) / "nvme"), **options, pool_host="127.0.0.1")
        longer_s = time.monotonic() - began - plain_s
        written = stack.compute(tokens)
        stack.flush()
        stack.prefetch(tokens, "degraded")
        found, arrived = stack.load_back(tokens)
        sums, _ = stack.storage.cache.drain()
        levels = [level.name for level in stack.storage.cache.levels]
        stack.close()
    missing = [list(labels) for (name, labels) in sums if name == "kvtier_faults"]
    return {
        "longer_s": longer_s,
        "levels": levels,
        "missing": sorted(missing),
        "found": found,
        "same_bytes": arrived == written,
    }
