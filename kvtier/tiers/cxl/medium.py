"""The memory of the cxl tier: found, locked, sized, mapped and placed."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigError, TierIOError
from kvtier.tiers import numa
from kvtier.tiers.addresses import address_of
from kvtier.tiers.cxl.format import MAGIC, REGION_ALIGN_BYTES, SUPERBLOCK_BYTES
from kvtier.tiers.devices import cpuless_nodes, dax_devices, memory_nodes
from kvtier.tiers.memory import available_memory_bytes
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.nvme.space import allocated_bytes, holder_of, try_lock
from kvtier.tiers.protocol import TierProbe

AUTO = "auto"
_NODE = "node:"


class Place(NamedTuple):
    """What `cxl_path` names: a device or file to map (`path`), or memory of one NUMA node (`node`)."""

    path: str = ""
    node: int = -1
    is_device: bool = False
    size_bytes: int = 0
    align_bytes: int = REGION_ALIGN_BYTES
    hmat: TierProbe | None = None

    @property
    def name(self) -> str:
        """How an operator would write it."""
        return self.path or f"{_NODE}{self.node}"


def find_place(cxl_path: str, root: str = "/") -> Place:
    """Resolve `cxl_path`: "auto", "node:N", a devdax device or a file. Raises ConfigError."""
    devices = [
        Place(d.path, d.target_node, True, d.size_bytes, max(d.align_bytes, REGION_ALIGN_BYTES), d.hmat)
        for d in dax_devices(root)
    ]
    if cxl_path == AUTO:
        nodes = [Place(node=n.node, size_bytes=n.free_bytes, hmat=n.hmat) for n in cpuless_nodes(root)]
        free = [device for device in devices if _looks_unused(device.path)]
        if not (free or nodes):
            raise ConfigError(
                'cxl_path is "auto", but this machine shows no unused devdax device and no NUMA node without CPUs; '
                "name a device (/dev/dax0.0), a node (node:2) or a file, or remove cxl_path and cxl_bytes"
            )
        return (free or nodes)[0]
    if cxl_path.startswith(_NODE):
        number = cxl_path.removeprefix(_NODE)
        for node in memory_nodes(root):
            if number == str(node.node):
                return Place(node=node.node, size_bytes=node.free_bytes, hmat=node.hmat)
        present = ", ".join(str(node.node) for node in memory_nodes(root))
        raise ConfigError(f"cxl_path is {cxl_path!r}, but this machine has memory on these nodes only: {present}")
    for device in devices:
        if cxl_path == device.path:
            return device
    if Path(cxl_path).is_dir():
        raise ConfigError(f"cxl_path {cxl_path!r} is a directory; name a device, a node (node:2) or a file")
    return Place(cxl_path)


def _looks_unused(path: str) -> bool:
    """Whether a device found by itself may be taken: it holds nothing, or rows of ours. Somebody else's data stays."""
    try:
        with open(path, "rb") as file:
            try:
                head = file.read(SUPERBLOCK_BYTES)
            except OSError:  # devdax cannot be read, only mapped
                with mmap.mmap(file.fileno(), REGION_ALIGN_BYTES, prot=mmap.PROT_READ) as mapping:
                    head = mapping[:SUPERBLOCK_BYTES]
    except (OSError, ValueError):
        return False
    return head.startswith(MAGIC) or not head.strip(b"\0")


class Medium:
    """One mapped, exclusively locked region. `view` is `size_bytes` long; `fresh` if it cannot hold rows of ours.

    A file is made if it is not there, grown or shrunk to size, and left when closed; one that holds something else is
    refused, not overwritten. A node's memory is anonymous and goes with the process.
    """

    def __init__(
        self,
        place: Place,
        size_bytes: int,
        front_bytes: int,
        *,
        syscalls: Syscalls | None = None,
        fault: Callable[[str], None],
    ) -> None:
        """The first `front_bytes` of a file get their room now, for they are written before anything is populated: a
        file system that is full must be an error, not a SIGBUS. Raises ConfigError (path, size, in use, foreign) or
        TierIOError (the medium fails)."""
        self.place = place
        self.size_bytes = size_bytes
        self._front_bytes = front_bytes
        self._sys = syscalls if syscalls is not None else Syscalls()
        self.fd = -1
        self.fresh = place.node >= 0 and not place.path
        try:
            self._map = self._map_node() if self.fresh else self._map_path(place.path)
        except OSError as error:
            raise TierIOError(f"cxl_path {place.name!r} cannot be mapped: {error}") from error
        self.view = memoryview(self._map)[:size_bytes]
        if not place.is_device:
            with contextlib.suppress(OSError):  # a kernel, or a file system, without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if place.node >= 0 and not place.is_device:
            try:
                numa.bind(address_of(self.view), size_bytes, place.node)
            except OSError as error:
                fault("numa_not_bound")
                if self.fresh:
                    raise TierIOError(f"memory cannot be bound to NUMA node {place.node}: {error}") from error

    @property
    def whole(self) -> bool:
        """False once somebody has cut off the file: touching what is gone would kill the process."""
        if self.fd < 0 or self.place.is_device:
            return True
        try:
            return os.fstat(self.fd).st_size >= self.size_bytes
        except OSError:
            return False

    def occupied_bytes(self) -> int:
        """Bytes of the medium that a file occupies; the whole size of anything else."""
        if self.fd < 0 or self.place.is_device:
            return self.size_bytes
        return allocated_bytes(self.place.path)

    def close(self) -> None:
        """Unmap (once no view is left) and unlock. Raises nothing."""
        self.view = memoryview(b"")
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self._sys.close(self.fd)
            self.fd = -1

    def _map_node(self) -> mmap.mmap:
        room = min(self.place.size_bytes, available_memory_bytes())
        if self.size_bytes > room:
            raise ConfigError(
                f"cxl_bytes asks for {self.size_bytes} but {self.place.name} has {room} bytes free; "
                f"set cxl_bytes to {room // (1 << 20)}MiB at most"
            )
        return mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _map_path(self, path: str) -> mmap.mmap:
        flags = os.O_RDWR | (0 if self.place.is_device else os.O_CREAT)
        try:
            self.fd = self._sys.open(path, flags)
        except OSError as error:
            raise ConfigError(
                f"cxl_path {path!r} cannot be opened ({error.strerror}); name a device, a node or a file this process "
                "may write"
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(self._sys.close, self.fd)
            if not try_lock(self.fd, self._sys):
                raise ConfigError(
                    f"cxl_path {path!r} is in use by {holder_of(self.fd)}; give this engine another one, or stop it"
                )
            if self.place.is_device:
                if self.size_bytes > self.place.size_bytes:
                    raise ConfigError(
                        f"cxl_bytes is {self.size_bytes} but {path} has {self.place.size_bytes}; lower cxl_bytes"
                    )
            else:
                self._size_file(path)
            mapping = mmap.mmap(self.fd, self.size_bytes, flags=mmap.MAP_SHARED)
            undo.pop_all()
        return mapping

    def _size_file(self, path: str) -> None:
        state = os.fstat(self.fd)
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"cxl_path {path!r} is neither a devdax device that sysfs knows nor a file")
        if state.st_size and not self._is_ours():
            raise ConfigError(
                f"the file {path!r} holds something that is not kvtier's; name another cxl_path, or remove the file"
            )
        medium = os.fstatvfs(self.fd)
        room = medium.f_bavail * medium.f_frsize + state.st_blocks * 512
        if self.size_bytes > room:
            raise ConfigError(
                f"cxl_bytes asks for {self.size_bytes} but the medium of {path!r} has room for {room}; "
                f"set cxl_bytes to {room // (1 << 20)}MiB at most"
            )
        self.fresh = state.st_size == 0
        if state.st_size != self.size_bytes:
            self._sys.ftruncate(self.fd, self.size_bytes)
        try:
            self._sys.fallocate(self.fd, 0, self._front_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise

    def _is_ours(self) -> bool:
        head = bytearray(SUPERBLOCK_BYTES)
        n = self._sys.preadv(self.fd, [memoryview(head)], 0)
        return head.startswith(MAGIC) or not bytes(head[:n]).strip(b"\0")
