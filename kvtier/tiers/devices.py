"""Which memory the machine has beside its ordinary one, as the kernel tells it in sysfs.

CXL memory shows up in two ways: as a NUMA node without CPUs (once `daxctl` made it system RAM) or as a devdax device
`/dev/daxX.Y` that a process maps itself. A node without CPUs can also be HBM, persistent memory or a GPU's memory;
the HMAT figures tell them apart where the firmware gives them. `root` lets a test present a made-up machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.tiers.protocol import TierProbe

_NODES = "sys/devices/system/node"
_DAX = "sys/bus/dax/devices"


class MemoryNode(msgspec.Struct, frozen=True):
    """A NUMA node. `hmat` is what the firmware says its memory costs from the best initiator, if it says anything."""

    node: int
    total_bytes: int
    free_bytes: int
    has_cpus: bool
    hmat: TierProbe | None = None


class DaxDevice(msgspec.Struct, frozen=True):
    """A devdax device: memory a process maps in multiples of `align_bytes`. `target_node` is -1 where unknown."""

    path: str
    size_bytes: int
    align_bytes: int
    target_node: int
    hmat: TierProbe | None = None


def memory_nodes(root: str = "/") -> list[MemoryNode]:
    """Every NUMA node that has memory, by number."""
    found = []
    for folder in _numbered(Path(root) / _NODES, "node"):
        sizes = _meminfo(folder / "meminfo")
        total = sizes.get("MemTotal", 0)
        if total:
            number = int(folder.name.removeprefix("node"))
            has_cpus = bool(_text(folder / "cpulist"))
            found.append(MemoryNode(number, total, sizes.get("MemFree", 0), has_cpus, _hmat(folder)))
    return found


def cpuless_nodes(root: str = "/") -> list[MemoryNode]:
    """Nodes with memory and without CPUs, the fastest first where HMAT tells, else by number."""
    nodes = [node for node in memory_nodes(root) if not node.has_cpus]
    return sorted(nodes, key=lambda n: (-n.hmat.read_bytes_per_s if n.hmat else 0.0, n.node))


def dax_devices(root: str = "/") -> list[DaxDevice]:
    """Every devdax device that a process can map; those in use as system RAM have no character device."""
    base, found = Path(root), []
    with contextlib.suppress(OSError):
        for folder in sorted((base / _DAX).iterdir()):
            device = base / "dev" / folder.name
            size = _integer(folder / "size", 0)
            if size and device.exists():
                node = _integer(folder / "target_node", -1)
                hmat = _hmat(base / _NODES / f"node{node}") if node >= 0 else None
                found.append(DaxDevice(str(device), size, _integer(folder / "align", 2 << 20), node, hmat))
    return found


def node_of_device(pci_address: str, root: str = "/") -> int | None:
    """The NUMA node next to a PCI device such as "0000:3b:00.0"; None where the kernel does not say."""
    node = _integer(Path(root) / "sys/bus/pci/devices" / pci_address.lower() / "numa_node", -1)
    return node if node >= 0 else None


def _hmat(node: Path) -> TierProbe | None:
    """Latency (ns) and bandwidth (MB/s) from the nearest initiators, if all four figures are there."""
    folder = node / "access0/initiators"
    figures = [
        _integer(folder / f"{direction}_{what}", 0)
        for direction in ("read", "write")
        for what in ("latency", "bandwidth")
    ]
    if not all(figures):
        return None
    read_ns, read_mb_per_s, write_ns, write_mb_per_s = figures
    return TierProbe(read_ns / 1e9, read_mb_per_s * 1e6, write_ns / 1e9, write_mb_per_s * 1e6)


def _numbered(folder: Path, prefix: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        entries = [e for e in folder.iterdir() if e.name.startswith(prefix) and e.name[len(prefix) :].isdigit()]
        yield from sorted(entries, key=lambda e: int(e.name[len(prefix) :]))


def _meminfo(path: Path) -> dict[str, int]:
    """Sizes in bytes from lines such as "Node 2 MemTotal:  1024 kB"."""
    sizes = {}
    for line in _text(path).splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 4 and fields[3].isdigit():
            sizes[fields[2]] = int(fields[3]) << 10
    return sizes


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _integer(path: Path, default: int) -> int:
    try:
        return int(_text(path), 0)
    except ValueError:
        return default
