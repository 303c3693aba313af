"""How every engine of a benchmark is configured, whoever brings the cache."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.testing.prepared import cache_root

BLOCK_TOKENS = 32
"""The CPU attention kernel takes multiples of 32."""


def engine_settings(device_blocks: int, max_running: int = 8, max_tokens: int = 2_048) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: float32, in which cached and computed answers agree to the token, and a fixed pool."""
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": device_blocks,
        "max_model_len": max_tokens,
        "max_num_batched_tokens": max_tokens,
        "max_num_seqs": max_running,
        "disable_log_stats": False,  # tokens by source come from the statistics
        "seed": 0,
    }


def end_in_order() -> None:
    """Let SIGTERM unwind the stack like Ctrl-C does: engines are ended and scratch folders removed on the way."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """A temporary folder for stores and logs, beside the caches: /tmp may be memory, a disk tier is to be on disk."""
    parent = cache_root() / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=parent) as folder:
        yield Path(folder)
