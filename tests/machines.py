"""Made-up machines: folders that look like the parts of /sys and /dev that kvtier reads."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def add_node(
    root: Path, node: int, *, cpus: str = "", total: int = 4 * GIB, free: int = 3 * GIB, hmat: tuple[int, ...] = ()
) -> None:
    """A NUMA node; `hmat` is read latency (ns) and bandwidth (MB/s), then write."""
    folder = root / f"sys/devices/system/node/node{node}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpus + "\n")
    (folder / "meminfo").write_text(
        f"Node {node} MemTotal:       {total >> 10} kB\nNode {node} MemFree:        {free >> 10} kB\n"
    )
    if hmat:
        figures = folder / "access0/initiators"
        figures.mkdir(parents=True)
        names = ("read_latency", "read_bandwidth", "write_latency", "write_bandwidth")
        for name, value in zip(names, hmat, strict=True):
            (figures / name).write_text(f"{value}\n")


def add_dax(root: Path, name: str, size: int, *, node: int = -1, align: int = 2 << 20) -> Path:
    """A devdax device whose character device is an ordinary sparse file."""
    folder = root / "sys/bus/dax/devices" / name
    folder.mkdir(parents=True)
    for key, value in (("size", size), ("target_node", node), ("align", align)):
        (folder / key).write_text(f"{value}\n")
    device = root / "dev" / name
    device.parent.mkdir(exist_ok=True)
    with device.open("wb") as file:
        file.truncate(size)
    return device
