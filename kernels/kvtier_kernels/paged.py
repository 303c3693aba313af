"""Gather blocks of all layers into contiguous rows, and scatter rows back into blocks. Bit-exact.

Rows are [blocks, layers, heads, tokens, parts * head_dim]: kvtier's axes "lhtkd", whatever the engine's order is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtier_kernels.pages import PagedKV, checked_blocks, require_room


@triton.jit
def _copy_unit(
    pointers, rows, table, block_stride, head_stride, token_stride, part_stride,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    PARTS: tl.constexpr, TOKEN_TILE: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """One (block, layer, head x part x token tile): tokens of K or of V between the cache and a row."""
    block_index, layer, rest = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (TOKENS + TOKEN_TILE - 1) // TOKEN_TILE
    tile, part, head = rest % tiles, rest // tiles % PARTS, rest // tiles // PARTS
    tokens = tile * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    dims = tl.arange(0, DIM_TILE)
    block = tl.load(table + block_index)
    base = tl.load(pointers + layer).to(rows.dtype)
    base = tl.multiple_of(base, 16)
    start = tl.multiple_of(block * block_stride + head * head_stride + part * part_stride, 8)
    inner = tl.multiple_of(tokens * token_stride, 8)[:, None] + dims[None, :]
    paged = base + start + tl.max_contiguous(tl.multiple_of(inner, (1, 8)), (1, 8))
    unit = ((block_index.to(tl.int64) * LAYERS + layer) * HEADS + head) * TOKENS
    row_inner = tl.multiple_of(tokens * (PARTS * DIM), 8)[:, None] + dims[None, :]
    packed = (
        rows
        + tl.multiple_of((unit * PARTS + part) * DIM, 8)
        + tl.max_contiguous(tl.multiple_of(row_inner, (1, 8)), (1, 8))
    )
    mask = (tokens < TOKENS)[:, None] & (dims < DIM)[None, :]
    if GATHER:
        tl.store(packed, tl.load(paged, mask=mask), mask=mask)
    else:
        tl.store(paged, tl.load(packed, mask=mask), mask=mask)


def row_elements(kv: PagedKV) -> int:
    """Numbers in one row: a block of all layers."""
    return len(kv.layers) * kv.heads * kv.tokens * kv.parts * kv.head_dim


def gather(kv: PagedKV, blocks: torch.Tensor | Sequence[int], rows: torch.Tensor) -> None:
    """Copy blocks into `rows` (n * row_elements numbers of the cache's type)."""
    table = checked_blocks(kv, blocks)
    require_room(rows, len(table) * row_elements(kv), "rows to gather into")
    _launch(kv, table, rows, gather_not_scatter=True)


def scatter(kv: PagedKV, blocks: torch.Tensor | Sequence[int], rows: torch.Tensor) -> None:
    """Copy `rows` into blocks, which must be distinct."""
    table = checked_blocks(kv, blocks, distinct=True)
    require_room(rows, len(table) * row_elements(kv), "rows to scatter from")
    _launch(kv, table, rows, gather_not_scatter=False)


def _launch(kv: PagedKV, table: torch.Tensor, rows: torch.Tensor, *, gather_not_scatter: bool) -> None:
    if not len(table):
        return
    tile = min(triton.next_power_of_2(kv.tokens), 64)
    grid = (len(table), len(kv.layers), kv.heads * kv.parts * triton.cdiv(kv.tokens, tile))
    _copy_unit[grid](
        kv.pointers, rows, table, kv.block_stride, kv.head_stride, kv.token_stride, kv.part_stride,
        LAYERS=len(kv.layers), HEADS=kv.heads, TOKENS=kv.tokens, DIM=kv.head_dim,
        DIM_TILE=triton.next_power_of_2(kv.head_dim), PARTS=kv.parts, TOKEN_TILE=tile, GATHER=gather_not_scatter,
        num_warps=4,
    )  # fmt: skip


def gather_reference(kv: PagedKV, blocks: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """What gather writes, as [n, layers, heads, tokens, parts, head_dim]."""
    table = checked_blocks(kv, blocks)
    units = [
        torch.stack([kv.unit(layer, part)[table] for part in range(kv.parts)], dim=3) for layer in range(len(kv.layers))
    ]
    return torch.stack(units, dim=1)


def scatter_reference(kv: PagedKV, blocks: torch.Tensor | Sequence[int], rows: torch.Tensor) -> None:
    """What scatter writes, from [n, layers, heads, tokens, parts, head_dim]."""
    table = checked_blocks(kv, blocks, distinct=True)
    shaped = rows.view(len(table), len(kv.layers), kv.heads, kv.tokens, kv.parts, kv.head_dim)
    for layer in range(len(kv.layers)):
        for part in range(kv.parts):
            kv.unit(layer, part)[table] = shaped[:, layer, :, :, part]
