"""The one checksum of kvtier: xxh3, 64 bits, over the bytes as they are stored.

It guards against torn writes, flipped bits and mixed-up slots, not against an attacker. xxh3 runs several times faster
than memory can be copied, so checking every row costs a few percent of moving it. Releases the GIL on large buffers.
"""

from __future__ import annotations

import xxhash

Buffer = bytes | bytearray | memoryview


def checksum64(data: Buffer, seed: int = 0) -> int:
    """xxh3-64 of a contiguous buffer, seeded. Stable across machines and versions (golden vectors)."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)
