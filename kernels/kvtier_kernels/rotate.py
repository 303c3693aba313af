"""Turn the keys of blocks to other positions: R(delta) K in place, without recomputing anything.

Keys are stored rotated; rotations add up, so moving a block by delta tokens multiplies every key by R(delta). Computed
in float32 and rounded once: the result is within one bfloat16 rounding of rotating the unrotated key afresh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtier.errors import EngineMismatchError
from kvtier_kernels.pages import PagedKV, checked_blocks
from kvtier_kernels.rounding import to_bfloat16


@triton.jit
def _turn_unit(
    pointers, elements, table, cosine, sine, block_stride, head_stride, token_stride,
    TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One (block, layer, head): both halves of the channels of all its keys."""
    block_index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, dims = tl.arange(0, TOKENS), tl.arange(0, HALF)
    block = tl.load(table + block_index)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16)
    inner = tl.multiple_of(tokens * token_stride, 8)[:, None] + dims[None, :]
    first = (
        base
        + tl.multiple_of(block * block_stride + head * head_stride, 8)
        + tl.max_contiguous(tl.multiple_of(inner, (1, 8)), (1, 8))
    )
    cos = tl.load(cosine + block_index * HALF + dims)[None, :]
    sin = tl.load(sine + block_index * HALF + dims)[None, :]
    a, b = tl.load(first).to(tl.float32), tl.load(first + HALF).to(tl.float32)
    if elements.dtype.element_ty == tl.bfloat16:
        tl.store(first, to_bfloat16(a * cos - b * sin))
        tl.store(first + HALF, to_bfloat16(b * cos + a * sin))
    else:
        tl.store(first, (a * cos - b * sin).to(elements.dtype.element_ty))
        tl.store(first + HALF, (b * cos + a * sin).to(elements.dtype.element_ty))


def turn_keys(
    kv: PagedKV, blocks: torch.Tensor | Sequence[int], deltas: Sequence[int], frequencies: Sequence[float]
) -> None:
    """Move distinct blocks by `deltas` tokens each. `frequencies` are the rotary ones, head_dim / 2 of them.

    Raises EngineMismatchError for a latent, for partial rotary embeddings, or sizes that are no powers of two.
    """
    table = checked_blocks(kv, blocks, distinct=True)
    half = kv.head_dim // 2
    if kv.parts != 2 or len(frequencies) != half or half & (half - 1) or kv.tokens & (kv.tokens - 1):
        raise EngineMismatchError("turning keys needs K and V, a frequency a channel pair, and powers of two")
    if len(deltas) != len(table):
        raise EngineMismatchError(f"{len(deltas)} distances for {len(table)} blocks")
    if not len(table):
        return
    cosine, sine = _tables(deltas, frequencies, table.device)
    _turn_unit[(len(table), len(kv.layers), kv.heads)](
        kv.pointers, kv.layers[0], table, cosine, sine, kv.block_stride, kv.head_stride, kv.token_stride,
        TOKENS=kv.tokens, HALF=half, num_warps=4,
    )  # fmt: skip


def turn_keys_reference(
    kv: PagedKV, blocks: torch.Tensor | Sequence[int], deltas: Sequence[int], frequencies: Sequence[float]
) -> None:
    """What turn_keys does, in torch."""
    table = checked_blocks(kv, blocks, distinct=True)
    cosine, sine = (t[:, None, None, :] for t in _tables(deltas, frequencies, table.device))
    half = kv.head_dim // 2
    for layer in range(len(kv.layers)):
        keys = kv.unit(layer, 0)
        a, b = keys[table, :, :, :half].float(), keys[table, :, :, half:].float()
        keys[table] = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(kv.dtype)


def _tables(
    deltas: Sequence[int], frequencies: Sequence[float], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.tensor(list(deltas), dtype=torch.float64)[:, None] * torch.tensor(
        list(frequencies), dtype=torch.float64
    )
    return torch.cos(angle).float().to(device), torch.sin(angle).float().to(device)
