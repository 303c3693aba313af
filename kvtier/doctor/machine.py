"""What the machine offers, whatever is configured."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from kvtier.doctor.findings import Finding, State
from kvtier.tiers.devices import cpuless_nodes, dax_devices, memory_nodes
from kvtier.tiers.nvme.gds import gds_missing
from kvtier.tiers.nvme.uring import uring_missing


def check_machine(root: str = "/") -> list[Finding]:
    """Capabilities: none of them is a fault by itself."""
    return [
        _huge_pages(root),
        _numa(root),
        _far_memory(root),
        _capability("io_uring", uring_missing(), "submits a batch with one system call"),
        _capability("gpudirect", gds_missing(root), "cuFile can be opened"),
        _module("mooncake", "the pool tier", "pip install kvtier[pool]"),
        _tool("fio", "kvtier bench tiers measures nvme against it", "apt install fio"),
    ]


def _capability(check: str, missing: str, says: str) -> Finding:
    return Finding("machine", check, State.ABSENT if missing else State.OK, missing or says)


def _huge_pages(root: str) -> Finding:
    try:
        text = (Path(root) / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("machine", "huge_pages", State.ABSENT, "this kernel has no transparent huge pages")
    mode = text[text.find("[") + 1 : text.find("]")]
    if mode == "never":
        return Finding("machine", "huge_pages", State.ABSENT, "transparent huge pages are off (never)")
    return Finding("machine", "huge_pages", State.OK, f"transparent huge pages: {mode}")


def _numa(root: str) -> Finding:
    nodes = memory_nodes(root)
    if len(nodes) < 2:
        return Finding("machine", "numa", State.ABSENT, "one NUMA node: nothing to place")
    return Finding("machine", "numa", State.OK, f"memory on nodes {', '.join(str(node.node) for node in nodes)}")


def _far_memory(root: str) -> Finding:
    devices = [f"{device.path} ({device.size_bytes >> 20} MiB)" for device in dax_devices(root)]
    nodes = [f"node:{node.node} ({node.total_bytes >> 20} MiB)" for node in cpuless_nodes(root)]
    if not devices + nodes:
        return Finding("machine", "cxl", State.ABSENT, "no devdax device and no NUMA node without CPUs")
    return Finding("machine", "cxl", State.OK, "for cxl_path: " + ", ".join(devices + nodes))


def _module(name: str, what: str, how: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding("machine", name, State.ABSENT, f"{what} needs it: {how}")
    return Finding("machine", name, State.OK, f"{what} can use it")


def _tool(name: str, what: str, how: str) -> Finding:
    found = shutil.which(name, path=os.environ.get("PATH"))
    return Finding("machine", name, State.OK if found else State.ABSENT, what if found else f"{what}: {how}")
