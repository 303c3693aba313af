"""The one checksum of kvtier: xxh3, 64 bits, over the bytes as they are stored.

It guards against torn writes, flipped bits and mixed-up slots, not against an attacker. xxh3 runs several times faster
than memory can be copied, so checking every row costs a few percent of moving it. Releases the GIL on large buffers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

_PIECE_BYTES = 512 << 10

Buffer = bytes | bytearray | memoryview


def checksum64(data: Buffer, seed: int = 0) -> int:
    """xxh3-64 of a contiguous buffer, seeded. Stable across machines and versions (golden vectors)."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def copy_bytes(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy bytes in pieces that fit the CPU's cache together with where they go: a tenth faster than all at once."""
    for start in range(0, len(target), _PIECE_BYTES):
        np.copyto(target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])


def copy_checksummed(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
    """Copy bytes and return `checksum64` of what arrived in `target`.

    In pieces that are still in the CPU's cache when they are hashed: the second pass over memory, which costs a sixth
    of a copy by itself, all but disappears (`kvtier bench tiers`).
    """
    if len(target) <= _PIECE_BYTES:
        np.copyto(target, source)
        return checksum64(target.data)
    state = xxhash.xxh3_64()
    for start in range(0, len(target), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        np.copyto(piece, source[start : start + _PIECE_BYTES])
        state.update(piece.data)
    return state.intdigest()
