"""Who is compared: plain vLLM, vLLM's native tiering, LMCache, kvtier. All get the same pool, memory and disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig import lmcache_environment
from benchmarks.rig.process import EngineSetup

BASELINE = "none"


@dataclass(frozen=True)
class Room:
    """What every contender may use."""

    dram_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Contender:
    """A way to run vLLM. `connector` and `environment` are functions of the store folder and the room."""

    name: str
    title: str
    connector: Callable[[Path, Room], dict[str, Any] | None]
    environment: Callable[[Path, Room], dict[str, str]] = lambda store, room: {}
    interpreter: Callable[[Callable[[str], None]], str] = lambda report: sys.executable
    """Return the Python to run under, building its environment first; raises Absent with the reason if it cannot."""

    def setup(self, python: str, model: Path, llm: Mapping[str, Any], store: Path, room: Room) -> EngineSetup:
        return EngineSetup(
            model=model,
            llm=llm,
            store=store,
            connector=self.connector(store, room),
            environment=self.environment(store, room),
            python=python,
        )


def _native(store: Path, room: Room) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "NativeTieringSpec",
            "spec_module_path": "benchmarks.rig.native_spec",
            "cpu_bytes_to_use": room.dram_bytes,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "fs", "root_dir": str(store)}],
        },
    }


def _kvtier(store: Path, room: Room) -> dict[str, Any]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "dram_bytes": room.dram_bytes,
            "nvme_path": str(store),
            "nvme_bytes": room.disk_bytes,
        },
    }


def _lmcache(store: Path, room: Room) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheOnHost",
        "kv_connector_module_path": "benchmarks.rig.lmcache_connector",
        "kv_role": "kv_both",
    }


def _lmcache_common(room: Room) -> dict[str, str]:
    return {
        "PYTHONHASHSEED": "0",  # without it, and a hash that is stable by itself, keys differ between processes
        "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor",
        "LMCACHE_CHUNK_SIZE": "32",  # as fine as everybody's blocks; the default of 256 would lose the tail of a prefix
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{room.dram_bytes / 2**30:.4f}",
        "LMCACHE_SAVE_DECODE_CACHE": "True",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }


def _lmcache_disk(store: Path, room: Room) -> dict[str, str]:
    disk = {"LMCACHE_LOCAL_DISK": f"file://{store}/", "LMCACHE_MAX_LOCAL_DISK_SIZE": f"{room.disk_bytes / 2**30:.4f}"}
    return _lmcache_common(room) | disk


def _lmcache_fs(store: Path, room: Room) -> dict[str, str]:
    return _lmcache_common(room) | {"LMCACHE_REMOTE_URL": f"fs://localhost:0{store}"}


CONTENDERS: tuple[Contender, ...] = (
    Contender(BASELINE, "no connector", lambda store, room: None),
    Contender("native", "vLLM native tiering + fs", _native),
    Contender("lmcache-disk", "LMCache, CPU + local disk", _lmcache, _lmcache_disk, lmcache_environment.interpreter),
    Contender("lmcache-fs", "LMCache, CPU + fs://", _lmcache, _lmcache_fs, lmcache_environment.interpreter),
    Contender("kvtier", "kvtier", _kvtier),
)


def contender(name: str) -> Contender:
    return next(known for known in CONTENDERS if known.name == name)
