"""kvtier as the storage level of SGLang's HiCache. See docs/sglang.md.

`KVTierStorage` is imported when asked for: SGLang loads this package in processes that have no use for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_sglang.storage import KVTierStorage

__all__ = ["KVTierStorage"]


def __getattr__(name: str) -> Any:
    if name == "KVTierStorage":
        from kvtier_sglang.storage import KVTierStorage

        return KVTierStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
