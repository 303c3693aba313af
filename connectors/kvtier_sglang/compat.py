"""The version handshake, and everything about SGLang that differs between its versions.

The storage interface is the same from 0.5.9 to 0.5.23 (two positional arguments, the v1 calls); around it names moved.
So this file asks for what it needs by name and says what is missing, instead of listing versions.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from kvtier.errors import EngineMismatchError

OLDEST, NEWEST = (0, 5, 9), (0, 5, 23)


def check_version(version: str | None = None) -> str:
    """Raise EngineMismatchError unless SGLang is one of the supported versions. Returns the version."""
    try:
        found = version if version is not None else importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineMismatchError("SGLang is not installed; install kvtier[sglang]") from error
    parts = re.match(r"^(\d+)\.(\d+)\.(\d+)", found)
    number = tuple(int(part) for part in parts.groups()) if parts else (0, 0, 0)
    if not OLDEST <= number <= NEWEST:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise EngineMismatchError(f"this kvtier supports SGLang {low} to {high}, found {found}; install one of those")
    return found


def server_settings() -> Any:
    """The server's own arguments, an object to read fields from with `getattr`; None where this process has none."""
    try:
        from sglang.srt.runtime_context import get_server_args as current
    except ImportError:
        try:
            from sglang.srt.server_args import get_global_server_args as current
        except ImportError:
            return None
    try:
        return current()
    except (ValueError, RuntimeError, AttributeError):  # outside a server: nothing was published
        return None


def keys_name_tenants() -> bool:
    """Whether SGLang's page keys differ between adapters and between cache salts (from 0.5.20 on they do)."""
    try:
        from sglang.srt.mem_cache.utils import storage_namespace_seed  # noqa: F401
    except ImportError:
        return False
    return True


def refuse_adapters_without_names() -> None:
    """Before 0.5.20 pages of two adapters have equal keys: raises EngineMismatchError if adapters are served there."""
    settings = server_settings()
    adapters = bool(getattr(settings, "enable_lora", None) or getattr(settings, "lora_paths", None))
    if adapters and not keys_name_tenants():
        raise EngineMismatchError(
            "this SGLang does not say in its page keys which adapter a page was computed with; upgrade to 0.5.20 or "
            "later, or serve adapters without a storage level"
        )
