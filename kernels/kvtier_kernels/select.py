"""Which tokens of a paged prefix matter to some queries: scores, and the gathering of the best.

`window_scores` is SnapKV's form: mean attention weight of the last queries, over the queries of a KV head's group.
`speculative_scores` is InfiniGen's: partial queries against partial keys, the largest over the group. `gather_tokens`
fetches chosen tokens through the block table. All of them serve research paths; no engine attends to a subset.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtier.errors import EngineMismatchError
from kvtier_kernels.pages import PagedKV, checked_blocks, require_room

_KEY_TILE = 64


@triton.jit
def _logits_tile(queries, key_base, table, n_tokens, block_stride, token_stride, scale,
                 TOKENS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, tile):  # fmt: skip
    """[ROWS, KEYS] scaled products of query rows with a tile of paged keys; -inf beyond the prefix."""
    position = tile * KEYS + tl.arange(0, KEYS)
    inside = position < n_tokens
    block = tl.load(table + position // TOKENS, mask=inside, other=0)
    dims = tl.arange(0, DIM)
    start = tl.multiple_of(block * block_stride + (position % TOKENS) * token_stride, 8)
    place = tl.max_contiguous(tl.multiple_of(start[:, None] + dims[None, :], (1, 8)), (1, 8))
    keys = tl.load(key_base + place, mask=inside[:, None], other=0.0)
    rows = tl.load(queries + tl.arange(0, ROWS)[:, None] * DIM + dims[None, :])
    products = tl.dot(rows, tl.trans(keys)) * scale
    return tl.where(inside[None, :], products, float("-inf"))


@triton.jit
def _normaliser(pointers, elements, table, queries, partial, layer, n_tokens,
                block_stride, head_stride, token_stride, scale,
                TOKENS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """One (head, key tile): the maximum and the sum of exponentials of each query row."""
    head, tile = tl.program_id(0), tl.program_id(1)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16) + tl.multiple_of(head * head_stride, 8)
    logits = _logits_tile(queries + head * ROWS * DIM, base, table, n_tokens, block_stride, token_stride, scale,
                          TOKENS, DIM, ROWS, KEYS, tile)  # fmt: skip
    peak = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - peak[:, None]), axis=1)
    out = partial + ((head * tl.num_programs(1) + tile) * 2) * ROWS + tl.arange(0, ROWS)
    tl.store(out, peak)
    tl.store(out + ROWS, total)


@triton.jit
def _weights(pointers, elements, table, queries, normaliser, scores, layer, n_tokens, n_rows,
             block_stride, head_stride, token_stride, scale,
             TOKENS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """One (head, key tile): the mean attention weight of each key over the query rows."""
    head, tile = tl.program_id(0), tl.program_id(1)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16) + tl.multiple_of(head * head_stride, 8)
    logits = _logits_tile(queries + head * ROWS * DIM, base, table, n_tokens, block_stride, token_stride, scale,
                          TOKENS, DIM, ROWS, KEYS, tile)  # fmt: skip
    rows = tl.arange(0, ROWS)
    weight = tl.exp(logits - tl.load(normaliser + head * ROWS + rows)[:, None])
    weight = tl.where((rows < n_rows)[:, None], weight, 0.0)
    position = tile * KEYS + tl.arange(0, KEYS)
    tl.store(scores + head * n_tokens + position, tl.sum(weight, axis=0) / n_rows, mask=position < n_tokens)


@triton.jit
def _speculate(queries, keys, scores, n_tokens, ROWS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """One (head, key tile): the largest partial product over the group's rows."""
    head, tile = tl.program_id(0), tl.program_id(1)
    position = tile * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, WIDTH)
    inside = position < n_tokens
    some = tl.load(
        keys + (head * n_tokens + position)[:, None] * WIDTH + columns[None, :], mask=inside[:, None], other=0.0
    )
    rows = tl.load(queries + (head * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + columns[None, :])
    products = tl.dot(rows, tl.trans(some))
    tl.store(scores + head * n_tokens + position, tl.max(products, axis=0), mask=inside)


@triton.jit
def _fetch(pointers, elements, table, chosen, out, layer, n_chosen,
           block_stride, head_stride, token_stride, part_stride,
           TOKENS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """One (head, tile of chosen tokens): their K and V, [head, part, chosen, dim]."""
    head, tile = tl.program_id(0), tl.program_id(1)
    index = tile * TILE + tl.arange(0, TILE)
    inside = index < n_chosen
    token = tl.load(chosen + head * n_chosen + index, mask=inside, other=0)
    block = tl.load(table + token // TOKENS, mask=inside, other=0)
    dims = tl.arange(0, DIM)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16) + tl.multiple_of(head * head_stride, 8)
    start = tl.multiple_of(block * block_stride + (token % TOKENS) * token_stride, 8)
    place = tl.max_contiguous(tl.multiple_of(start[:, None] + dims[None, :], (1, 8)), (1, 8))
    for part in tl.static_range(PARTS):
        target = out + ((head * PARTS + part) * n_chosen + index)[:, None] * DIM + dims[None, :]
        tl.store(target, tl.load(base + part * part_stride + place, mask=inside[:, None]), mask=inside[:, None])


def window_scores(kv: PagedKV, layer: int, blocks: Sequence[int], n_tokens: int, queries: torch.Tensor) -> torch.Tensor:
    """Scores [heads, n_tokens] of a prefix under `queries` [heads, rows, head_dim] (a KV head's group together)."""
    table = _prefix(kv, layer, blocks, n_tokens)
    heads, n_rows, dim = queries.shape
    if heads != kv.heads or dim != kv.head_dim or queries.dtype != kv.dtype:
        raise EngineMismatchError("queries do not fit the cache's heads, channels and type")
    rows = max(16, triton.next_power_of_2(n_rows))
    padded = torch.zeros((heads, rows, dim), dtype=kv.dtype, device=queries.device)
    padded[:, :n_rows] = queries
    tiles, scale = triton.cdiv(n_tokens, _KEY_TILE), dim**-0.5
    partial = torch.empty((heads, tiles, 2, rows), dtype=torch.float32, device=queries.device)
    strides = (kv.block_stride, kv.head_stride, kv.token_stride, scale)
    sizes = {"TOKENS": kv.tokens, "DIM": dim, "ROWS": rows, "KEYS": _KEY_TILE, "num_warps": 4}
    grid = (heads, tiles)
    _normaliser[grid](kv.pointers, kv.layers[0], table, padded, partial, layer, n_tokens, *strides, **sizes)
    peak = partial[:, :, 0].amax(dim=1)
    total = (partial[:, :, 1] * torch.exp(partial[:, :, 0] - peak[:, None])).sum(dim=1)
    normaliser = (peak + total.log()).contiguous()
    scores = torch.empty((heads, n_tokens), dtype=torch.float32, device=queries.device)
    _weights[grid](
        kv.pointers, kv.layers[0], table, padded, normaliser, scores, layer, n_tokens, n_rows, *strides, **sizes
    )
    return scores


def window_scores_reference(
    kv: PagedKV, layer: int, blocks: Sequence[int], n_tokens: int, queries: torch.Tensor
) -> torch.Tensor:
    """What window_scores gives."""
    keys = _flat(kv, layer, 0, blocks, n_tokens).float()
    weights = torch.softmax(queries.float() @ keys.transpose(1, 2) * kv.head_dim**-0.5, dim=-1)
    return weights.mean(dim=1)


def speculative_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [heads, n] of partial keys [heads, n, width] under partial queries [heads, rows, width]; width from 16, a
    power of two."""
    heads, n_rows, width = queries.shape
    if (
        keys.shape[0] != heads
        or keys.shape[2] != width
        or width & (width - 1)
        or width < 16
        or keys.dtype != queries.dtype
    ):
        raise EngineMismatchError("partial queries and keys do not fit each other")
    rows, n = max(16, triton.next_power_of_2(n_rows)), keys.shape[1]
    padded = queries[:, :1].expand(-1, rows, -1).contiguous()  # repeats of a row leave the maximum alone
    padded[:, :n_rows] = queries
    scores = torch.empty((heads, n), dtype=torch.float32, device=queries.device)
    _speculate[(heads, triton.cdiv(n, _KEY_TILE))](
        padded, keys.contiguous(), scores, n, ROWS=rows, WIDTH=width, KEYS=_KEY_TILE, num_warps=4
    )
    return scores


def speculative_scores_reference(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What speculative_scores gives."""
    return (queries.float() @ keys.float().transpose(1, 2)).amax(dim=1)


def gather_tokens(kv: PagedKV, layer: int, blocks: Sequence[int], chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Fetch tokens `chosen` [heads, k] of a prefix into `out` [heads, parts, k, head_dim]. Bit-exact."""
    table = _prefix(kv, layer, blocks, 0)
    host = chosen.cpu()
    if host.dim() != 2 or len(host) != kv.heads:
        raise EngineMismatchError("chosen tokens need a row for each head")
    if host.numel() and (int(host.min()) < 0 or int(host.max()) >= len(table) * kv.tokens):
        raise EngineMismatchError("a chosen token lies outside the prefix")
    k = host.shape[1]
    require_room(out, kv.heads * kv.parts * k * kv.head_dim, "gathered tokens")
    if not k:
        return
    _fetch[(kv.heads, triton.cdiv(k, 32))](
        kv.pointers, kv.layers[0], table, chosen.to(torch.int64).contiguous(), out, layer, k,
        kv.block_stride, kv.head_stride, kv.token_stride, kv.part_stride,
        TOKENS=kv.tokens, DIM=kv.head_dim, PARTS=kv.parts, TILE=32, num_warps=4,
    )  # fmt: skip


def gather_tokens_reference(kv: PagedKV, layer: int, blocks: Sequence[int], chosen: torch.Tensor) -> torch.Tensor:
    """What gather_tokens writes."""
    n = len(blocks) * kv.tokens
    parts = [_flat(kv, layer, part, blocks, n) for part in range(kv.parts)]
    index = chosen.long()[:, :, None].expand(-1, -1, kv.head_dim)
    return torch.stack([part.gather(1, index) for part in parts], dim=1)


def _flat(kv: PagedKV, layer: int, part: int, blocks: Sequence[int], n_tokens: int) -> torch.Tensor:
    """[heads, n_tokens, head_dim] of a prefix."""
    found = kv.unit(layer, part)[torch.as_tensor(blocks)]
    return found.transpose(0, 1).reshape(kv.heads, -1, kv.head_dim)[:, :n_tokens]


def _prefix(kv: PagedKV, layer: int, blocks: Sequence[int], n_tokens: int) -> torch.Tensor:
    if not 0 <= layer < len(kv.layers):
        raise EngineMismatchError(f"layer {layer} of {len(kv.layers)}")
    if kv.head_dim & (kv.head_dim - 1) or kv.head_dim < 16:
        raise EngineMismatchError(f"the selection kernels need a power of two of channels from 16, not {kv.head_dim}")
    table = checked_blocks(kv, blocks)
    if n_tokens > len(table) * kv.tokens:
        raise EngineMismatchError(f"{n_tokens} tokens in {len(table)} blocks of {kv.tokens}")
    return table
