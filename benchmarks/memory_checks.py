"""What verifying a load from memory costs: time from lookup to offer and CPU of the threads, beside copying the rows.

    python benchmarks/memory_checks.py [--row-bytes 2097152] [--rows 128] [--repeats 9]

One prompt is stored once and looked up again and again, with `memory_checks` off and on; what is offered is then copied
by one thread, as a load would be. Prints one JSON object a line: medians of the repeats. The caller polls as an idle
engine steps: every millisecond.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from kvtier.cache.geometry import Geometry
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.codec.checksum import copy_bytes
from kvtier.config import CacheConfig
from kvtier.testing.fake_engine import FakeEngine
from kvtier.tiers.dram import DramTier

_STEP_S = 0.001


def measure(checks: bool, row_bytes: int, rows: int, repeats: int) -> dict[str, object]:
    """Store `rows` blocks, then look them up and copy them `repeats` times."""
    memory = DramTier.over(np.ones(rows * row_bytes, np.uint8), row_bytes, rows, row_bytes, checksums=False)
    cache = TierCache(
        CacheConfig(dram_bytes=1, gate=False, policy="lru", memory_checks=checks), Geometry(16), memory, memory.row
    )
    engine = FakeEngine(cache)
    first = engine.open(range(rows), 1)
    granted = cache.offer_store(first, [RowRef(block, 0) for block in range(rows)])
    cache.commit_store(first, [row for row, _ in granted])
    engine.finish(first)
    engine.settle()
    target = np.zeros(row_bytes, np.uint8)
    offered_s, copied_s, cpu_s = [], [], []
    for _ in range(repeats + 1):
        cpu, began = time.process_time(), time.perf_counter()
        request = engine.open(range(rows), 1)
        while (plan := cache.lookup(request, 0)) is None:
            time.sleep(_STEP_S)
            cache.poll()
        offered, spent = time.perf_counter(), time.process_time() - cpu
        if plan.blocks != rows:
            raise SystemExit(f"{plan.blocks} of {rows} blocks were offered")
        for slot in cache.take_load(request, [RowRef(block, 0) for block in range(rows)]).tolist():
            copy_bytes(target, np.frombuffer(memory.row(slot), np.uint8))
        ended = time.perf_counter()
        cache.end_load(request)
        engine.finish(request)
        offered_s.append(offered - began)
        copied_s.append(ended - offered)
        cpu_s.append(spent)
    cache.close()
    total = rows * row_bytes
    return {
        "memory_checks": checks,
        "bytes": total,
        "row_bytes": row_bytes,
        "offer_ms": round(1e3 * statistics.median(offered_s[1:]), 2),
        "offer_cpu_ms": round(1e3 * statistics.median(cpu_s[1:]), 2),
        "copy_ms": round(1e3 * statistics.median(copied_s[1:]), 2),
        "copy_bytes_per_s": round(total / statistics.median(copied_s[1:])),
    }


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    for checks in (False, True):
        print(json.dumps(measure(checks, given.row_bytes, given.rows, given.repeats)), flush=True)


if __name__ == "__main__":
    main()
