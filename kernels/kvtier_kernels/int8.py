"""Fused gather -> int8 and int8 -> scatter: half the bytes over the bus, the format of kvtier's codec "int8".

Codes [n, layers, parts, heads, tokens, head_dim] int8 and scales [n, layers, parts, heads, tokens] float16, symmetric
per token and head. Codes and scales equal the codec's bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtier.codec.arithmetic import F16_SLACK, F16_TINY
from kvtier.errors import EngineMismatchError
from kvtier_kernels.paged import gather_reference, scatter_reference
from kvtier_kernels.pages import PagedKV, checked_blocks, require_room
from kvtier_kernels.rounding import nearest, to_bfloat16

_SHARE = (1 + F16_SLACK) / 127.0


@triton.jit
def _int8_unit(
    pointers, codes, scales, table, elements, block_stride, head_stride, token_stride, part_stride, share, tiny,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    ENCODE: tl.constexpr,
):  # fmt: skip
    """One (block, layer, part, head): a tile of tokens x channels."""
    block_index, layer, rest = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, head = rest // HEADS, rest % HEADS
    tokens, dims = tl.arange(0, TOKENS), tl.arange(0, DIM)
    block = tl.load(table + block_index)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16)
    start = tl.multiple_of(block * block_stride + head * head_stride + part * part_stride, 8)
    inner = tl.multiple_of(tokens * token_stride, 8)[:, None] + dims[None, :]
    paged = base + start + tl.max_contiguous(tl.multiple_of(inner, (1, 8)), (1, 8))
    unit = ((block_index.to(tl.int64) * LAYERS + layer) * PARTS + part) * HEADS + head
    inside = tl.multiple_of(tokens * DIM, 16)[:, None] + dims[None, :]
    coded = (
        codes + tl.multiple_of(unit * (TOKENS * DIM), 16) + tl.max_contiguous(tl.multiple_of(inside, (1, 16)), (1, 16))
    )
    scaled = scales + unit * TOKENS + tokens
    if ENCODE:
        x = tl.load(paged).to(tl.float32)
        peak = tl.max(tl.abs(x), axis=1)
        scale = (peak * share + tiny).to(tl.float16)
        tl.store(scaled, scale)
        inverse = 1.0 / scale.to(tl.float32)
        tl.store(coded, nearest(x * inverse[:, None]).to(tl.int8))
    else:
        step = tl.load(scaled).to(tl.float32)
        x = tl.load(coded).to(tl.float32) * step[:, None]
        if elements.dtype.element_ty == tl.bfloat16:
            tl.store(paged, to_bfloat16(x))
        else:
            tl.store(paged, x.to(elements.dtype.element_ty))


def gather_int8(kv: PagedKV, blocks: torch.Tensor | Sequence[int], codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Encode blocks into `codes` (int8) and `scales` (float16)."""
    table = _checked(kv, blocks, codes, scales, distinct=False)
    _launch(kv, table, codes, scales, encode=True)


def scatter_int8(kv: PagedKV, blocks: torch.Tensor | Sequence[int], codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Decode into distinct blocks."""
    table = _checked(kv, blocks, codes, scales, distinct=True)
    _launch(kv, table, codes, scales, encode=False)


def _checked(
    kv: PagedKV, blocks: torch.Tensor | Sequence[int], codes: torch.Tensor, scales: torch.Tensor, *, distinct: bool
) -> torch.Tensor:
    for what, size in (("tokens", kv.tokens), ("head_dim", kv.head_dim)):
        if size & (size - 1):
            raise EngineMismatchError(f"the int8 kernel needs a power of two of {what}, not {size}")
    table = checked_blocks(kv, blocks, distinct=distinct)
    units = len(table) * len(kv.layers) * kv.parts * kv.heads * kv.tokens
    require_room(codes, units * kv.head_dim, "int8 codes")
    require_room(scales, units, "int8 scales")
    return table


def _launch(kv: PagedKV, table: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, encode: bool) -> None:
    if not len(table):
        return
    _int8_unit[(len(table), len(kv.layers), kv.parts * kv.heads)](
        kv.pointers, codes, scales, table, kv.layers[0],
        kv.block_stride, kv.head_stride, kv.token_stride, kv.part_stride, _SHARE, F16_TINY,
        LAYERS=len(kv.layers), HEADS=kv.heads, TOKENS=kv.tokens, DIM=kv.head_dim, PARTS=kv.parts, ENCODE=encode,
        num_warps=4 if kv.tokens * kv.head_dim <= 4096 else 8,
    )  # fmt: skip


def gather_int8_reference(kv: PagedKV, blocks: torch.Tensor | Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as gather_int8 writes them."""
    values = gather_reference(kv, blocks).float().permute(0, 1, 4, 2, 3, 5)
    scales = (values.abs().amax(dim=-1) * _SHARE + F16_TINY).half()
    codes = (values * (1.0 / scales.float())[..., None]).round().to(torch.int8)
    return codes, scales


def scatter_int8_reference(
    kv: PagedKV, blocks: torch.Tensor | Sequence[int], codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """What scatter_int8 writes."""
    n = len(torch.as_tensor(blocks))
    shape = (n, len(kv.layers), kv.parts, kv.heads, kv.tokens, kv.head_dim)
    values = codes.view(shape).float() * scales.view(shape[:-1]).float()[..., None]
    scatter_reference(kv, blocks, values.to(kv.dtype).permute(0, 1, 3, 4, 2, 5).contiguous())
