"""NUMA placement by raw system calls: bind memory, ask where a page lies, prefer nodes while something is built.

The calls exist on every Linux; a kernel without NUMA, or a sandbox that forbids them, answers with an error, which is
raised as OSError so that the caller can count it and go on with memory where it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

# mbind, set_mempolicy, move_pages: numbers of the system calls, by machine.
_NUMBERS = {"x86_64": (237, 238, 279), "aarch64": (235, 237, 239)}
_MPOL_DEFAULT, _MPOL_PREFERRED, _MPOL_BIND, _MPOL_INTERLEAVE = range(4)
_WORD_BITS = 64
_MOST_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def bind(address: int, length: int, node: int) -> None:
    """Let [address, address + length) take pages from `node` and from nowhere else. Raises OSError."""
    _mbind(address, length, _MPOL_BIND, [node])


def prefer(address: int, length: int, nodes: Sequence[int]) -> None:
    """Let fresh pages come from `nodes`: one is preferred, several take turns. Raises OSError."""
    _mbind(address, length, *_preferring(nodes))


@contextmanager
def preferred(nodes: Sequence[int]) -> Iterator[None]:
    """Memory this thread touches first meanwhile comes from `nodes` where there is room; nothing changes for none.

    For memory that somebody else maps and populates. Raises OSError.
    """
    if not nodes:
        yield
        return
    mode, mask_nodes = _preferring(nodes)
    mask, bits = _mask(mask_nodes)
    _call(1, ctypes.c_int(mode), mask, ctypes.c_ulong(bits))
    try:
        yield
    finally:
        _call(1, ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0))


def nodes_of(address: int, length: int, most: int = 256) -> npt.NDArray[np.int32]:
    """The node of up to `most` pages spread evenly over a range; -errno (-2: untouched) where there is none.
    Raises OSError."""
    page = os.sysconf("SC_PAGESIZE")
    first = address // page * page
    n_pages = max(1, (address + length - first) // page)
    step = max(1, n_pages // most)
    pages = [first + i * page for i in range(0, n_pages, step)][:most]
    given = (ctypes.c_void_p * len(pages))(*pages)
    found = np.zeros(len(pages), dtype=np.int32)
    at = ctypes.c_void_p(found.__array_interface__["data"][0])
    _call(2, ctypes.c_int(0), ctypes.c_ulong(len(pages)), given, None, at, ctypes.c_int(0))
    return found


def _mbind(address: int, length: int, mode: int, nodes: Sequence[int]) -> None:
    page = os.sysconf("SC_PAGESIZE")
    first = address // page * page
    mask, bits = _mask(nodes)
    span = ctypes.c_ulong(address + length - first)
    _call(0, ctypes.c_void_p(first), span, ctypes.c_int(mode), mask, ctypes.c_ulong(bits), ctypes.c_uint(0))


def _preferring(nodes: Sequence[int]) -> tuple[int, Sequence[int]]:
    return (_MPOL_PREFERRED if len(nodes) == 1 else _MPOL_INTERLEAVE), nodes


def _mask(nodes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_ulong], int]:
    if not nodes or not all(0 <= node < _MOST_NODES for node in nodes):
        raise OSError(errno.EINVAL, f"no such NUMA nodes: {list(nodes)}")
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << (node % _WORD_BITS)
    return words, len(words) * _WORD_BITS + 1  # the kernel counts one bit more than it reads


def _call(which: int, *arguments: object) -> None:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"NUMA calls are not known for {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[which]), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
