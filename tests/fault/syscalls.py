"""Operating systems that misbehave on order, for the nvme tier."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.tiers.addresses import address_of
from kvtier.tiers.nvme.io import Syscalls
from kvtier.tiers.nvme.uring import Ring

STEPS = ("open", "close", "preadv", "pwritev", "fallocate", "ftruncate", "fdatasync", "rename", "unlink", "flock")


class PowerCut(BaseException):
    """The process or the machine died here. Not an Exception: nothing may catch it."""


class StepSyscalls(Syscalls):
    """Counts every call and does something else at one of them.

    `at(step)` is asked before each call, with its number; it answers None to let the call through, an OSError to raise,
    "short" to move only part of the bytes, or PowerCut to die, after half of a write. Once dead, everything dies.
    After every call the bytes on the medium are held against `cap_bytes`.
    """

    latest: StepSyscalls | None = None

    def __init__(
        self, folder: Path, cap_bytes: int, at: Callable[[int, str], OSError | str | PowerCut | None] | None = None
    ) -> None:
        self.folder = folder
        self.cap_bytes = cap_bytes
        self.at = at if at is not None else lambda step, name: None
        self.step = 0
        self.names: list[str] = []
        self.dead = False
        self.most_bytes = 0
        self.fds: set[int] = set()
        StepSyscalls.latest = self

    def occupied_bytes(self) -> int:
        """What `du` counts: the folder and everything in it."""
        total = os.lstat(self.folder).st_blocks
        for entry in os.scandir(self.folder):
            try:
                total += entry.stat(follow_symlinks=False).st_blocks
            except FileNotFoundError:
                continue
        return total * 512

    def kill(self) -> None:
        """What the kernel does for a dead process: close its files, and so drop its locks."""
        self.dead = True
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def _call(self, name: str, *arguments: Any, carry_out: Callable[..., Any] | None = None) -> Any:
        if self.dead:
            raise PowerCut
        step, self.step = self.step, self.step + 1
        self.names.append(name)
        fault = self.at(step, name)
        if isinstance(fault, OSError) and name == "close":
            fault = None  # the descriptor is gone whatever close says
        if isinstance(fault, OSError):
            raise fault
        moving = name in ("preadv", "pwritev")
        if moving and fault is not None:
            fd, buffers, offset = arguments
            whole = sum(b.nbytes for b in buffers)
            # A short transfer ends on a sector, as the kernel would end it.
            arguments = (fd, _head(buffers, max(min(512, whole), whole // 2 // 512 * 512)), offset)
        result = None
        if not isinstance(fault, PowerCut) or moving:
            result = carry_out(*arguments) if carry_out else getattr(Syscalls, name)(self, *arguments)
        if isinstance(fault, PowerCut):
            self.dead = True
            raise fault
        if name == "open":
            self.fds.add(result)
        elif name == "close":
            self.fds.discard(arguments[0])
        self.most_bytes = max(self.most_bytes, self.occupied_bytes())
        assert self.most_bytes <= self.cap_bytes, f"{self.most_bytes} bytes after step {step} ({name})"
        return result


def _forward(name: str) -> Callable[..., Any]:
    def call(self: StepSyscalls, *arguments: Any) -> Any:
        return self._call(name, *arguments)

    return call


for _name in STEPS:
    setattr(StepSyscalls, _name, _forward(_name))


def _head(buffers: Sequence[memoryview], n_bytes: int) -> list[memoryview]:
    """The first `n_bytes` of some buffers."""
    head = []
    for buffer in buffers:
        if n_bytes <= 0:
            break
        head.append(buffer[:n_bytes])
        n_bytes -= buffer.nbytes
    return head


class SteppingRing(Ring):
    """A real ring whose every transfer is a step of the StepSyscalls made last, which would not see it by itself."""

    def __init__(self, entries: int) -> None:
        super().__init__(entries)
        assert StepSyscalls.latest is not None
        self._steps = StepSyscalls.latest

    def run(self, fd: int, calls: Sequence[tuple[int, int, int, int]]) -> list[int]:
        return [self._step(fd, *call) for call in calls]

    def _step(self, fd: int, opcode: int, offset: int, address: int, count: int) -> int:
        pieces = [(ctypes.c_uint64 * 2).from_address(address + 16 * i) for i in range(count)]
        buffers = [memoryview((ctypes.c_char * length).from_address(start)).cast("B") for start, length in pieces]

        def carry_out(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            vector = (ctypes.c_uint64 * (2 * len(buffers)))()
            for i, buffer in enumerate(buffers):
                vector[2 * i : 2 * i + 2] = [address_of(buffer), buffer.nbytes]
            call = (opcode, offset, ctypes.addressof(vector), len(buffers))
            return _moved(super(SteppingRing, self).run(fd, [call]))

        try:
            name = "pwritev" if opcode == 2 else "preadv"
            return int(self._steps._call(name, fd, buffers, offset, carry_out=carry_out))
        except OSError as error:
            return -(error.errno or errno.EIO)


def _moved(results: list[int]) -> int:
    (moved,) = results
    if moved < 0:
        raise OSError(-moved, os.strerror(-moved))
    return moved


class LosingSyscalls(StepSyscalls):
    """A machine whose power fails: a `share` of the blocks written since the last sync of their file is lost."""

    def __init__(self, *arguments: Any, draw: random.Random, share: float = 0.4) -> None:
        super().__init__(*arguments)
        self._draw, self._share = draw, share
        self._paths: dict[int, str] = {}
        self._unsynced: dict[int, list[tuple[int, bytes]]] = {}

    def _call(self, name: str, *arguments: Any, carry_out: Callable[..., Any] | None = None) -> Any:
        if name == "pwritev" and not self.dead:
            fd, buffers, offset = arguments
            length = sum(b.nbytes for b in buffers)
            plain = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            before = os.pread(plain, length, offset).ljust(length, b"\0")
            os.close(plain)
            self._unsynced.setdefault(os.fstat(fd).st_ino, []).append((offset, before))
        result = super()._call(name, *arguments, carry_out=carry_out)
        if name == "fdatasync":
            self._unsynced.pop(os.fstat(arguments[0]).st_ino, None)
        return result

    def lose(self) -> None:
        """Undo a random part of what was not synced, newest first, in blocks of the medium."""
        for entry in list(os.scandir(self.folder)):
            undo = self._unsynced.get(entry.inode(), [])
            fd = os.open(entry.path, os.O_RDWR)
            for offset, before in reversed(undo):
                for start in range(0, len(before), 4096):
                    if self._draw.random() < self._share:
                        os.pwrite(fd, before[start : start + 4096], offset + start)
            os.close(fd)


def os_error(code: int) -> OSError:
    """An OSError as the kernel raises it."""
    return OSError(code, os.strerror(code))


EIO, ENOSPC = errno.EIO, errno.ENOSPC
