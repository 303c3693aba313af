"""What decisions cost: taking and freeing slots, finding the longest prefix, and the index's own memory."""

from __future__ import annotations

import gc
import hashlib
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np

from kvtier.bench.turns import Line
from kvtier.index.residency import Residency
from kvtier.index.tree import PrefixTree
from kvtier.model.keys import KEY_BYTES
from kvtier.tiers.dram import DramTier

LOOKUP_KEYS = 8192
_BATCH = 64
_SLOT_LIMIT_S = 1e-6
_LOOKUP_LIMIT_S = 1e-3
_INDEX_CHAINS, _CHAIN_BLOCKS = 200, 512


def bench_control(block_bytes: int, rounds: int) -> Iterator[Line]:
    """Lines in the same form as the tiers': bytes are those of the blocks (or keys) named, limits are targets."""
    tier = DramTier.over(np.zeros(4096 * 512, dtype=np.uint8), 512, 4096, 512)

    def reserve_and_release() -> None:
        slots = tier.reserve(_BATCH)
        assert slots is not None
        tier.release(slots)

    seconds = _timed(reserve_and_release, 500 * rounds)
    tier.close()
    yield _line("dram", "reserve+release", block_bytes, _BATCH, _BATCH * block_bytes, seconds, _SLOT_LIMIT_S * _BATCH)
    lookup = prefix_lookup(LOOKUP_KEYS)
    seconds = _timed(lookup, 50 * rounds)
    yield _line("index", "lookup", KEY_BYTES, LOOKUP_KEYS, LOOKUP_KEYS * KEY_BYTES, seconds, _LOOKUP_LIMIT_S)


def prefix_lookup(n_keys: int) -> Callable[[], None]:
    """One longest-prefix lookup of `n_keys` keys, all resident, in a tree that branches on the way."""
    tree = PrefixTree()
    residency = Residency("dram", tree, 2 * n_keys, 1)
    trunk = _chain(0, n_keys)
    for start in range(0, n_keys, n_keys // 16):
        for chain in (trunk, trunk[: start * KEY_BYTES] + _chain(start + 1, 8)):
            tree.insert(chain)
    match = tree.walk(trunk)
    residency.publish(match.path, np.arange(n_keys), 0, np.arange(n_keys, dtype=np.int32))

    def lookup() -> None:
        found = tree.walk(trunk)
        assert len(residency.slots_of(found)) == n_keys

    return lookup


def index_bytes_per_block() -> float:
    """Memory the prefix tree and one tier's residency take for a block, chains of 512 blocks."""
    n = _INDEX_CHAINS * _CHAIN_BLOCKS
    slots = np.arange(n, dtype=np.int32)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tree = PrefixTree()
    residency = Residency("dram", tree, n, 1)
    for i in range(_INDEX_CHAINS):
        chain = _chain(i, _CHAIN_BLOCKS)  # made here: the tree keeps its keys
        tree.insert(chain)
        own = slots[i * _CHAIN_BLOCKS : (i + 1) * _CHAIN_BLOCKS]
        residency.publish(tree.walk(chain).path, np.arange(_CHAIN_BLOCKS), 0, own)
    del chain
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / n


def _chain(seed: int, n: int) -> bytes:
    return b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(n))


def _timed(call: Callable[[], None], n: int) -> list[float]:
    for _ in range(10):
        call()
    seconds = []
    for _ in range(n):
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
    return seconds


def _line(tier: str, op: str, block: int, depth: int, n_bytes: int, seconds: list[float], limit_s: float) -> Line:
    median_s = float(np.median(seconds))
    return Line(
        tier=tier,
        op=op,
        block_bytes=block,
        depth=depth,
        bytes_per_s=round(n_bytes / median_s),
        limit=f"{limit_s * 1e6:g} us a call",
        limit_bytes_per_s=round(n_bytes / limit_s),
        ratio=round(limit_s / median_s, 3),
        p99_s=round(float(np.quantile(seconds, 0.99)), 7),
    )
