"""A checksum of rows on the device: catches a row that went wrong between the cache and host memory.

Two sums modulo 2^32 over 32-bit words, the second weighted by position, joined to 64 bits: order matters, any single
flipped bit shows. Rows on a medium are guarded by xxh3 on the host; this one never leaves a transfer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.errors import EngineMismatchError

_TILE = 4096


@triton.jit
def _sum_tile(words, partial, n_words, TILE: tl.constexpr):
    """One (row, tile): the two partial sums of up to TILE words."""
    row, tile = tl.program_id(0), tl.program_id(1)
    index = tile * TILE + tl.arange(0, TILE)
    mask = index < n_words
    address = words + tl.multiple_of(row.to(tl.int64) * n_words, 4) + tl.max_contiguous(tl.multiple_of(index, 4), 4)
    word = tl.load(address, mask=mask, other=0).to(tl.uint32, bitcast=True)
    weight = (index + 1).to(tl.uint32)
    out = partial + (row * tl.num_programs(1) + tile) * 2
    tl.store(out, tl.sum(word, axis=0).to(tl.uint32).to(tl.int32, bitcast=True))
    tl.store(out + 1, tl.sum(word * weight, axis=0).to(tl.uint32).to(tl.int32, bitcast=True))


def row_checksums(rows: torch.Tensor) -> torch.Tensor:
    """int64 [n] of `rows` [n, bytes] uint8, whose rows are multiples of 16 bytes. Raises EngineMismatchError if not."""
    words = _words(rows)
    n, n_words = words.shape
    tiles = triton.cdiv(n_words, _TILE)
    partial = torch.empty((n, tiles, 2), dtype=torch.int32, device=rows.device)
    _sum_tile[(n, tiles)](words, partial, n_words, TILE=_TILE, num_warps=8)
    return _joined(partial.long().sum(dim=1))


def row_checksums_reference(rows: torch.Tensor) -> torch.Tensor:
    """What row_checksums gives."""
    words = _words(rows).long() & 0xFFFF_FFFF
    weight = torch.arange(1, words.shape[1] + 1, device=rows.device)
    low = (words * (weight & 0xFFFF)) & 0xFFFF_FFFF  # 64-bit products must not overflow: the weight in two halves
    high = (((words * (weight >> 16)) & 0xFFFF) << 16) & 0xFFFF_FFFF
    return _joined(torch.stack([words.sum(dim=1), (low + high).sum(dim=1)], dim=1))


def _words(rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] % 16 or not rows.is_contiguous():
        raise EngineMismatchError("checksums are taken over contiguous uint8 rows of a multiple of 16 bytes")
    return rows.view(torch.int32)


def _joined(sums: torch.Tensor) -> torch.Tensor:
    low, high = (sums[:, 0] & 0xFFFF_FFFF), (sums[:, 1] & 0xFFFF_FFFF)
    return low | (high << 32)
