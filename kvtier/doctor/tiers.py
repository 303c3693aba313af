"""Checks of the configured tiers. Nothing that lies on their media is changed, locked or opened for writing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from kvtier.config import CacheConfig
from kvtier.doctor.curves import far_memory, folder_curve, memory_curve
from kvtier.doctor.findings import CurvePoint, Finding, Report, State
from kvtier.doctor.locks import holder_of_path
from kvtier.doctor.machine import check_machine
from kvtier.doctor.slabs import check_slabs
from kvtier.errors import ConfigError
from kvtier.tiers.cxl.format import MAGIC
from kvtier.tiers.cxl.medium import find_place
from kvtier.tiers.memory import available_memory_bytes
from kvtier.tiers.open import configured_tiers

_CONNECT_S = 2.0
_TierCheck = Callable[[CacheConfig, str], tuple[list[Finding], list[CurvePoint]]]


def examine(config: CacheConfig, root: str = "/") -> Report:
    """Check the machine and every tier the configuration names."""
    findings, curves = check_machine(root), {}
    names = [*(["dram"] if config.dram_bytes else []), *configured_tiers(config)]
    for name in names:
        found, curve = _CHECKS[name](config, root)
        findings += found
        if curve:
            curves[name] = curve
    if not names:
        fix = "give the options the engine gets, for example --set dram_bytes=32GiB --set nvme_path=/cache"
        findings.append(Finding("machine", "configuration", State.ABSENT, f"no tier is configured: {fix}"))
    return Report(findings, curves)


def _dram(config: CacheConfig, root: str) -> tuple[list[Finding], list[CurvePoint]]:
    available = available_memory_bytes(root)
    says = f"dram_bytes is {config.dram_bytes}, {available} bytes of memory are available"
    if config.dram_bytes > available:
        fix = f"set dram_bytes to {available >> 20}MiB at most, or free memory"
        return [Finding("dram", "memory", State.FAULT, says, fix)], []
    found = [Finding("dram", "memory", State.OK, says)]
    shm = Path(root) / "dev/shm"
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        says = f"/dev/shm, where vLLM keeps this memory, has {free} bytes free"
        lacking = config.dram_bytes > free
        fix = "lower dram_bytes or enlarge /dev/shm (docker: --shm-size)" if lacking else ""
        found.append(Finding("dram", "shared_memory", State.FAULT if lacking else State.OK, says, fix))
    return found, memory_curve()


def _cxl(config: CacheConfig, root: str) -> tuple[list[Finding], list[CurvePoint]]:
    try:
        place = find_place(config.cxl_path, root)
    except ConfigError as error:
        return [Finding("cxl", "path", State.FAULT, str(error), "name a device, a node or a file in cxl_path")], []
    found = [Finding("cxl", "path", State.OK, f"{config.cxl_path!r} is {place.name}")]
    if place.hmat is not None:
        rates = f"reads {place.hmat.read_bytes_per_s / 1e9:g} GB/s, latency {place.hmat.read_latency_s * 1e9:g} ns"
        found.append(Finding("cxl", "hmat", State.OK, f"the firmware says: {rates}"))
    if place.size_bytes and config.cxl_bytes > place.size_bytes:
        says = f"cxl_bytes is {config.cxl_bytes}, but {place.name} has {place.size_bytes}"
        found.append(Finding("cxl", "room", State.FAULT, says, f"set cxl_bytes to {place.size_bytes >> 20}MiB at most"))
    if place.path and not place.is_device:
        found += _cxl_file(Path(place.path), config.cxl_bytes)
    try:
        memory = far_memory(place)
    except OSError as error:
        says = f"memory at {place.name} cannot be had: {error.strerror}"
        return [*found, Finding("cxl", "memory", State.FAULT, says, "name another cxl_path")], []
    return found, [] if memory is None else memory_curve(memory)


def _cxl_file(path: Path, cap_bytes: int) -> list[Finding]:
    """A file that stands for the device, or will."""
    if not path.exists():
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            says = f"{str(path.parent)!r} is not a folder this process may write"
            return [Finding("cxl", "file", State.FAULT, says, "make it, or name another cxl_path")]
        free = shutil.disk_usage(path.parent).free
        state = State.FAULT if cap_bytes > free else State.OK
        fix = f"set cxl_bytes to {free >> 20}MiB at most" if state is State.FAULT else ""
        return [Finding("cxl", "file", state, f"will be made; {free} bytes are free there", fix)]
    found = []
    try:
        holder = holder_of_path(str(path))
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        return [Finding("cxl", "file", State.FAULT, f"cannot be read: {error.strerror}", "mend its rights")]
    if not stat.S_ISREG(path.stat().st_mode) or (head.strip(b"\0") and not head.startswith(MAGIC)):
        says = "holds something that is not kvtier's"
        found.append(Finding("cxl", "file", State.FAULT, says, "name another cxl_path, or remove the file"))
    if holder:
        found.append(Finding("cxl", "lock", State.OK, f"in use by {holder}: another engine needs another cxl_path"))
    return found


def _nvme(config: CacheConfig, root: str) -> tuple[list[Finding], list[CurvePoint]]:
    found, curve = _folder("nvme", config.nvme_path, config.direct_io)
    if Path(config.nvme_path).is_dir():
        found += check_slabs(Path(config.nvme_path), config.nvme_bytes)
    return found, curve


def _shared_fs(config: CacheConfig, root: str) -> tuple[list[Finding], list[CurvePoint]]:
    return _folder("shared_fs", config.shared_fs_path, config.direct_io)


def _pool(config: CacheConfig, root: str) -> tuple[list[Finding], list[CurvePoint]]:
    """Whether the master answers at all. Joining the pool to measure it would lend and move other engines' bytes."""
    found = []
    if importlib.util.find_spec("mooncake") is None:
        fix = "pip install kvtier[pool]"
        found.append(Finding("pool", "client", State.FAULT, "Mooncake's client is not installed", fix))
    host, _, port = config.pool_master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            found.append(Finding("pool", "master", State.OK, f"{config.pool_master} answers"))
    except (OSError, ValueError) as error:
        says = f"no connection to {config.pool_master!r}: {error}"
        found.append(Finding("pool", "master", State.FAULT, says, "start mooncake_master there, or mend pool_master"))
    return found, []


def _folder(tier: str, path: str, direct_io: bool) -> tuple[list[Finding], list[CurvePoint]]:
    """Whether a folder can be used, how fast it is, and whether I/O there can be direct."""
    key = f"{tier}_path"
    nearest = Path(path)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return [Finding(tier, "path", State.FAULT, f"{str(nearest)!r} is not a folder", f"name another {key}")], []
    says = f"{path!r} is there" if nearest == Path(path) else f"{path!r} will be made in {str(nearest)!r}"
    try:
        curve, direct = folder_curve(str(nearest))
    except OSError as error:
        fix = f"give this process the right to write there, free space, or name another {key}"
        return [Finding(tier, "path", State.FAULT, f"writing to {str(nearest)!r} fails: {error.strerror}", fix)], []
    found = [Finding(tier, "path", State.OK, says)]
    if direct:
        found.append(Finding(tier, "direct_io", State.OK, "this file system takes direct I/O"))
    elif direct_io:
        found.append(Finding(tier, "direct_io", State.ABSENT, "no direct I/O here: reads and writes are buffered"))
    return found, curve


_CHECKS: dict[str, _TierCheck] = {"dram": _dram, "cxl": _cxl, "nvme": _nvme, "shared_fs": _shared_fs, "pool": _pool}
