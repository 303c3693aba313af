"""A StorageCache under test, with an engine whose bytes follow from its keys, so that a wrong one shows."""

from __future__ import annotations

import numpy as np

from kvtier.cache.geometry import Geometry
from kvtier.cache.storage_cache import StorageCache
from kvtier.config import CacheConfig
from kvtier.model.keys import KeySpace
from kvtier.testing.clock import VirtualClock
from kvtier.tiers.protocol import Tier

ROW = 64
TOKENS = 16
SPACE = KeySpace(weights="w", kv_dtype="f32", block_tokens=4, layout="l")


def keys_of(*tokens: int) -> bytes:
    """Keys of blocks that all hold one repeated token; equal prefixes give equal keys."""
    return SPACE.chain_keys([t for token in tokens for t in [token] * 4])


def pages(chain: bytes, groups: int = 1) -> list[list[bytes]]:
    """What the engine computes for these blocks: bytes that follow from the key, another for every group."""
    out = []
    for i in range(0, len(chain), 32):
        seed = np.frombuffer(chain[i : i + 32], np.uint8)
        out.append([(np.tile(seed, ROW // 32) + group).astype(np.uint8).tobytes() for group in range(groups)])
    return out


def views(content: list[list[bytes]]) -> list[list[memoryview]]:
    return [[memoryview(bytes(row)) for row in block] for block in content]


def blank(n: int, groups: int = 1) -> list[list[memoryview]]:
    return [[memoryview(bytearray(ROW)) for _ in range(groups)] for _ in range(n)]


class Bench:
    """A cache over one or more tiers, and the engine's three calls with made-up bytes."""

    def __init__(self, *tiers: Tier, groups: int = 1, **options: object) -> None:
        self.clock = VirtualClock()
        config = CacheConfig(io_threads=2, **options)  # type: ignore[arg-type]
        self.groups = groups
        self.cache = StorageCache(config, Geometry(TOKENS, groups), tiers, self.clock)
        self.counts: dict[tuple[str, tuple[str, ...]], float] = {}

    def store(self, chain: bytes, start: int = 0, head: bytes | None = None) -> list[bool]:
        part = chain[start * 32 :]
        return self.cache.store(part, views(pages(part, self.groups)), chain[: start * 32] if head is None else head)

    def find(self, chain: bytes, start: int = 0, head: bytes | None = None) -> int:
        return self.cache.find(chain[start * 32 :], chain[: start * 32] if head is None else head)

    def load(self, chain: bytes) -> list[bool]:
        """Load blocks; those said to be there must hold exactly their own bytes."""
        targets = blank(len(chain) // 32, self.groups)
        done = self.cache.load(chain, targets)
        for ok, target, content in zip(done, targets, pages(chain, self.groups), strict=True):
            assert not ok or [bytes(view) for view in target] == content
        return done

    def count(self, name: str, *labels: str) -> float:
        sums, _ = self.cache.drain()
        for key, value in sums.items():
            self.counts[key] = self.counts.get(key, 0.0) + value
        return sum(v for (n, found), v in self.counts.items() if n == name and (not labels or found == labels))

    def check(self) -> None:
        self.cache.settle()
        assert self.cache.leases() == 0
        self.cache.check_integrity()
        assert self.count("kvtier_tokens", "recompute") == self.count("kvtier_miss_tokens")
