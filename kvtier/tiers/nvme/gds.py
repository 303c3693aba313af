"""GPUDirect Storage through cuFile, behind the thinnest protocol there is.

Not run in this project's tests, which have no driver: they drive this code with an object of the same signatures.
`cufile.driver_open` spins forever where there is no driver (libcufile 1.20, seen by us), so nothing here calls into the
library before `gds_missing` has seen one.
"""

from __future__ import annotations

import ctypes.util
import errno
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from kvtier.tiers.addresses import address_of
from kvtier.tiers.nvme.io import DirectFile

if TYPE_CHECKING:
    from kvtier.tiers.nvme.batch import Request


class CuFile(Protocol):
    """What is used of `cuda.bindings.cufile`. `descr` and `file` are handles, `buffer` is an address."""

    def driver_open(self) -> None: ...
    def driver_close(self) -> None: ...
    def handle_register(self, descr: int) -> int: ...
    def handle_deregister(self, file: int) -> None: ...
    def read(self, file: int, buffer: int, size: int, file_offset: int, buffer_offset: int) -> int: ...
    def write(self, file: int, buffer: int, size: int, file_offset: int, buffer_offset: int) -> int: ...


def gds_missing(root: str = "/") -> str:
    """Why cuFile must not be opened here; empty if it may be."""
    if ctypes.util.find_library("cuda") is None:
        return "there is no NVIDIA driver (libcuda)"
    if not any((Path(root) / "dev").glob("nvidia[0-9]*")):
        return "there is no NVIDIA device (/dev/nvidia0)"
    if not (Path(root) / "proc/driver/nvidia-fs").exists():
        return "the nvidia-fs kernel module is not loaded"
    try:
        found = importlib.util.find_spec("cuda.bindings.cufile")
    except ModuleNotFoundError:
        found = None
    return "" if found else "cuda-bindings is not installed (pip install kvtier[gds])"


def load_cufile() -> CuFile:
    """NVIDIA's own binding. Only after `gds_missing` found nothing missing."""
    return cast(CuFile, importlib.import_module("cuda.bindings.cufile"))


class CuFileIo:
    """A `BatchIo` over cuFile. Buffers may lie in device or host memory: an address is an address."""

    name = "cufile"
    depth = 1

    def __init__(self, file: DirectFile, library: CuFile, *, descr: int | None = None) -> None:
        """Opens the driver and registers the file. Raises OSError if either fails."""
        self._file = file
        self._library = library
        self._descr = _descriptor(file.fd) if descr is None else descr
        try:
            library.driver_open()
        except RuntimeError as error:
            raise OSError(errno.ENODEV, f"cuFile cannot be opened: {error}") from error
        try:
            self._handle = library.handle_register(self._descr)
        except RuntimeError as error:
            library.driver_close()
            raise OSError(errno.EINVAL, f"cuFile refuses the file: {error}") from error

    def transfer(self, requests: Sequence[Request], *, write: bool) -> list[OSError | None]:
        return [self._one(request, write) for request in requests]

    def close(self) -> None:
        self._library.handle_deregister(self._handle)
        self._library.driver_close()

    def _one(self, request: Request, write: bool) -> OSError | None:
        call = self._library.write if write else self._library.read
        offset = request.offset
        for buffer in request.buffers:
            address, done = address_of(buffer), 0
            while done < buffer.nbytes:
                try:
                    moved = call(self._handle, address, buffer.nbytes - done, offset, done)
                except RuntimeError as error:  # cuFileError is one
                    return OSError(errno.EIO, f"cuFile: {error}", self._file.path)
                if moved <= 0:
                    return OSError(-moved or errno.EIO, "cuFile moved nothing", self._file.path)
                done, offset = done + moved, offset + moved
        return None


def _descriptor(fd: int) -> int:
    """The address of a CUfileDescr_t for an open file."""
    cufile = importlib.import_module("cuda.bindings.cufile")
    descr = cufile.Descr()
    descr.type = cufile.FileHandleType.OPAQUE_FD
    descr.handle.fd = fd
    _kept.append(descr)
    return int(descr.ptr)


_kept: list[object] = []
"""Descriptors cuFile points into: as many as tiers were opened."""
