"""Fused gather -> recipe D or M, and back: the payload of kvtier's block-quantised codecs, made and read on the device.

One program holds one unit (block, layer, K|V, head) as a tile of tokens x channels: un-rotate keys (and subtract the
mean key), Hadamard-rotate where the recipe says so, quantise by channel or by token with the unit's own bits, pack into
the two planes, and the inverse. The first block of a prompt keeps its sinks apart and goes through the CPU codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.codec.arithmetic import F16_SLACK, F16_TINY, PLANES, hadamard_matrix, range_shares
from kvtier.codec.block_quant import BlockQuantCodec
from kvtier.codec.rope import rope_tables
from kvtier.errors import EngineMismatchError
from kvtier_kernels.paged import gather_reference
from kvtier_kernels.pages import PagedKV, checked_blocks, require_room
from kvtier_kernels.rounding import nearest, to_bfloat16


@triton.jit
def _mix(x, matrix, TOKENS: tl.constexpr, DIM: tl.constexpr, MIXED: tl.constexpr):
    """Hadamard over every MIXED channels. x is split into two bfloat16 parts, so that tensor cores lose nothing."""
    rows: tl.constexpr = TOKENS * DIM // MIXED
    shaped = tl.reshape(x, (rows, MIXED))
    high = to_bfloat16(shaped)
    low = to_bfloat16(shaped - high.to(tl.float32))
    mixed = tl.dot(high, matrix) + tl.dot(low, matrix)
    return tl.reshape(mixed * (1.0 / tl.sqrt(MIXED * 1.0)), (TOKENS, DIM))


@triton.jit
def _turned(first, second, cos, sin, sign):
    return first * cos - second * (sin * sign), second * cos + first * (sin * sign)


@triton.jit
def _pack_plane(codes, target, WIDTH: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Store the low WIDTH bits of int32 codes [TOKENS, DIM]; token t shares a byte with t + T/k, t + 2T/k, ..."""
    shares: tl.constexpr = 8 // WIDTH
    rows: tl.constexpr = TOKENS // shares
    cut = tl.reshape(codes & ((1 << WIDTH) - 1), (shares, rows, DIM))
    weight = tl.exp2((tl.arange(0, shares) * WIDTH).to(tl.float32)).to(tl.int32)
    packed = tl.sum(cut * weight[:, None, None], axis=0).to(tl.uint8)
    offset = tl.arange(0, rows)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(target + tl.max_contiguous(tl.multiple_of(offset, (1, 16)), (1, 16)), packed)


@triton.jit
def _unpack_plane(source, WIDTH: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """int32 codes [TOKENS, DIM] of a plane of WIDTH bits."""
    rows: tl.constexpr = TOKENS * WIDTH // 8
    tokens = tl.arange(0, TOKENS)
    offset = (tl.multiple_of((tokens % rows) * DIM, 16))[:, None] + tl.arange(0, DIM)[None, :]
    byte = tl.load(source + tl.max_contiguous(tl.multiple_of(offset, (1, 16)), (1, 16))).to(tl.int32)
    return (byte >> ((tokens // rows) * WIDTH)[:, None]) & ((1 << WIDTH) - 1)


@triton.jit
def _encode_unit(
    pointers, elements, table, payload, units, levels, shares, cosine, sine, means, matrix,
    block_stride, head_stride, token_stride, part_stride, payload_bytes, slack, tiny,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, MIXED: tl.constexpr,
    GROUPS: tl.constexpr, PART: tl.constexpr, TURN: tl.constexpr, MEAN: tl.constexpr, MIX: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One (block, layer, head) of K (PART 0) or V. `units`: bits, and offsets of base, residual, scales, minima."""
    block_index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = DIM // 2
    tokens, halves = tl.arange(0, TOKENS), tl.arange(0, half)
    block = tl.load(table + block_index)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16)
    base += tl.multiple_of(block * block_stride + head * head_stride + PART * part_stride, 8)
    inner = tl.multiple_of(tokens * token_stride, 8)[:, None]
    unit = (layer * 2 + PART) * HEADS + head
    if TURN:
        place = tl.max_contiguous(tl.multiple_of(inner + halves[None, :], (1, 8)), (1, 8))
        first, second = tl.load(base + place).to(tl.float32), tl.load(base + half + place).to(tl.float32)
        table_at = block_index * (TOKENS * half) + tokens[:, None] * half + halves[None, :]
        cos, sin = tl.load(cosine + table_at), tl.load(sine + table_at)
        first, second = _turned(first, second, cos, sin, -1.0)
        if MEAN:
            mean = means + (layer * HEADS + head) * DIM + halves
            first -= tl.load(mean)[None, :]
            second -= tl.load(mean + half)[None, :]
        x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (TOKENS, DIM))
    else:
        dims = tl.arange(0, DIM)
        place = tl.max_contiguous(tl.multiple_of(inner + dims[None, :], (1, 8)), (1, 8))
        x = tl.load(base + place).to(tl.float32)
    if MIX:
        hadamard = tl.load(matrix + tl.arange(0, MIXED)[:, None] * MIXED + tl.arange(0, MIXED)[None, :])
        x = _mix(x, hadamard, TOKENS, DIM, MIXED)
    out = payload + block_index.to(tl.int64) * payload_bytes
    fields = units + unit * 5
    bits, base_at, residual_at = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    scales = (out + tl.load(fields + 3)).to(tl.pointer_type(tl.float16))
    minima = (out + tl.load(fields + 4)).to(tl.pointer_type(tl.float16))
    top = tl.load(levels + unit)
    if PER_CHANNEL:
        x = tl.reshape(x, (GROUPS, TOKENS // GROUPS, DIM))
        low, high = tl.min(x, axis=1), tl.max(x, axis=1)
        at = tl.arange(0, GROUPS)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    else:
        low, high = tl.min(x, axis=1), tl.max(x, axis=1)
        at = tokens
    reach = (high - low) * (0.5 * tl.load(shares + unit))
    centre = (high + low) * 0.5
    low, high = centre - reach, centre + reach
    minimum = (low - tl.abs(low) * slack - tiny).to(tl.float16)
    offset = minimum.to(tl.float32)
    scale = ((high - offset) * ((1.0 + slack) / top) + tiny).to(tl.float16)
    tl.store(scales + at, scale)
    tl.store(minima + at, minimum)
    inverse = 1.0 / scale.to(tl.float32)
    shift = -offset * inverse
    if PER_CHANNEL:
        codes = nearest(x * inverse[:, None, :] + shift[:, None, :]).to(tl.int32)
        codes = tl.reshape(codes, (TOKENS, DIM))
    else:
        codes = nearest(x * inverse[:, None] + shift[:, None]).to(tl.int32)
    codes = tl.minimum(tl.maximum(codes, 0), top.to(tl.int32))
    base_plane, residual_plane = out + tl.multiple_of(base_at, 16), out + tl.multiple_of(residual_at, 16)
    if bits == 2:
        _pack_plane(codes, base_plane, 2, TOKENS, DIM)
    elif bits == 3:
        _pack_plane(codes >> 1, base_plane, 2, TOKENS, DIM)
        _pack_plane(codes, residual_plane, 1, TOKENS, DIM)
    elif bits == 4:
        _pack_plane(codes, base_plane, 4, TOKENS, DIM)
    elif bits == 5:
        _pack_plane(codes >> 1, base_plane, 4, TOKENS, DIM)
        _pack_plane(codes, residual_plane, 1, TOKENS, DIM)
    elif bits == 6:
        _pack_plane(codes >> 2, base_plane, 4, TOKENS, DIM)
        _pack_plane(codes, residual_plane, 2, TOKENS, DIM)
    else:
        _pack_plane(codes >> 4, base_plane, 4, TOKENS, DIM)
        _pack_plane(codes, residual_plane, 4, TOKENS, DIM)


@triton.jit
def _decode_unit(
    pointers, elements, table, payload, units, cosine, sine, means, matrix,
    block_stride, head_stride, token_stride, part_stride, payload_bytes,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, MIXED: tl.constexpr,
    GROUPS: tl.constexpr, PART: tl.constexpr, TURN: tl.constexpr, MEAN: tl.constexpr, MIX: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The inverse of _encode_unit, into the cache."""
    block_index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = DIM // 2
    tokens, dims = tl.arange(0, TOKENS), tl.arange(0, DIM)
    unit = (layer * 2 + PART) * HEADS + head
    source = payload + block_index.to(tl.int64) * payload_bytes
    fields = units + unit * 5
    bits, base_at, residual_at = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    base_plane, residual_plane = source + tl.multiple_of(base_at, 16), source + tl.multiple_of(residual_at, 16)
    if bits == 2:
        codes = _unpack_plane(base_plane, 2, TOKENS, DIM)
    elif bits == 3:
        codes = _unpack_plane(base_plane, 2, TOKENS, DIM) * 2 + _unpack_plane(residual_plane, 1, TOKENS, DIM)
    elif bits == 4:
        codes = _unpack_plane(base_plane, 4, TOKENS, DIM)
    elif bits == 5:
        codes = _unpack_plane(base_plane, 4, TOKENS, DIM) * 2 + _unpack_plane(residual_plane, 1, TOKENS, DIM)
    elif bits == 6:
        codes = _unpack_plane(base_plane, 4, TOKENS, DIM) * 4 + _unpack_plane(residual_plane, 2, TOKENS, DIM)
    else:
        codes = _unpack_plane(base_plane, 4, TOKENS, DIM) * 16 + _unpack_plane(residual_plane, 4, TOKENS, DIM)
    scales = (source + tl.load(fields + 3)).to(tl.pointer_type(tl.float16))
    minima = (source + tl.load(fields + 4)).to(tl.pointer_type(tl.float16))
    if PER_CHANNEL:
        at = tl.arange(0, GROUPS)[:, None] * DIM + dims[None, :]
        step, low = tl.load(scales + at).to(tl.float32), tl.load(minima + at).to(tl.float32)
        grouped = tl.reshape(codes.to(tl.float32), (GROUPS, TOKENS // GROUPS, DIM))
        x = tl.reshape(grouped * step[:, None, :] + low[:, None, :], (TOKENS, DIM))
    else:
        step, low = tl.load(scales + tokens).to(tl.float32), tl.load(minima + tokens).to(tl.float32)
        x = codes.to(tl.float32) * step[:, None] + low[:, None]
    if MIX:
        hadamard = tl.load(matrix + tl.arange(0, MIXED)[:, None] * MIXED + tl.arange(0, MIXED)[None, :])
        x = _mix(x, hadamard, TOKENS, DIM, MIXED)
    if MEAN:
        x += tl.load(means + (layer * HEADS + head) * DIM + dims)[None, :]
    if TURN:
        halves = tl.arange(0, half)
        table_at = block_index * (TOKENS * half) + tokens[:, None] * half + halves[None, :]
        cos, sin = tl.load(cosine + table_at), tl.load(sine + table_at)
        first, second = tl.split(tl.permute(tl.reshape(x, (TOKENS, 2, half)), (0, 2, 1)))
        first, second = _turned(first, second, cos, sin, 1.0)
        x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (TOKENS, DIM))
    block = tl.load(table + block_index)
    base = tl.multiple_of(tl.load(pointers + layer).to(elements.dtype), 16)
    base += tl.multiple_of(block * block_stride + head * head_stride + PART * part_stride, 8)
    place = tl.multiple_of(tokens * token_stride, 8)[:, None] + dims[None, :]
    place = tl.max_contiguous(tl.multiple_of(place, (1, 8)), (1, 8))
    if elements.dtype.element_ty == tl.bfloat16:
        tl.store(base + place, to_bfloat16(x))
    else:
        tl.store(base + place, x.to(elements.dtype.element_ty))


class DevicePlan(NamedTuple):
    """A codec's tables on the device: made once, used for every transfer."""

    codec: BlockQuantCodec
    units: torch.Tensor
    levels: torch.Tensor
    shares: torch.Tensor
    means: torch.Tensor
    matrix: torch.Tensor
    frequencies: tuple[float, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one encoded block, without the header."""
        return self.codec.plan.payload_bytes


def device_plan(codec: BlockQuantCodec, kv: PagedKV) -> DevicePlan:
    """Put a codec's plan on the cache's device. Raises EngineMismatchError where the kernels do not cover it."""
    form, recipe, plan = codec.form, codec.recipe, codec.plan
    have = (len(kv.layers), kv.heads, kv.tokens, kv.head_dim, kv.parts)
    if have != (form.layers, form.heads, form.tokens, form.head_dim, form.parts):
        raise EngineMismatchError(f"the codec's rows are {form}, the cache has {have}")
    whole_value = plan.value_groups == 1 and (recipe.key_group is not None or plan.key_groups == 1)
    powers = all(size & (size - 1) == 0 and size >= 16 for size in (form.tokens, form.head_dim))
    if not whole_value or not powers or (recipe.unrotate and len(codec.frequencies) * 2 != form.head_dim):
        raise EngineMismatchError(
            "kernels need one group a token, powers of two from 16 and rotary embeddings of all channels"
        )
    device = kv.pointers.device
    fields = np.zeros((form.units, 5), dtype=np.int64)
    size = form.tokens * form.head_dim
    for c in plan.classes:
        for unit in np.flatnonzero((plan.rank >= c.start) & (plan.rank < c.start + c.count)):
            place, (high, low) = int(plan.rank[unit]) - c.start, PLANES[c.bits]
            base, residual = c.base_offset + place * size * high // 8, c.residual_offset + place * size * low // 8
            fields[unit, :3] = c.bits, base, residual
    fields[:, 3:] = codec.scale_offsets()
    means = codec.means if codec.means is not None else np.zeros((form.layers, form.heads, form.head_dim), np.float32)
    drawn_in = range_shares(plan.levels)
    shares = np.ones_like(plan.levels) if drawn_in is None else drawn_in.reshape(-1)
    signs = torch.from_numpy(np.sign(hadamard_matrix(codec.mixed))).to(torch.bfloat16)
    return DevicePlan(
        codec,
        torch.from_numpy(fields).to(device),
        torch.from_numpy(plan.levels).to(device),
        torch.from_numpy(np.ascontiguousarray(shares)).to(device),
        torch.from_numpy(np.ascontiguousarray(means)).to(device),
        signs.to(device),
        codec.frequencies,
    )


def gather_encode(
    plan: DevicePlan, kv: PagedKV, blocks: Sequence[int], payload: torch.Tensor, first: Sequence[int]
) -> None:
    """Encode blocks into `payload` (uint8 [n * payload_bytes]); `first` is each block's first token position (> 0)."""
    _run(plan, kv, blocks, payload, first, encode=True)


def decode_scatter(
    plan: DevicePlan,
    kv: PagedKV,
    blocks: Sequence[int],
    payload: torch.Tensor,
    first: Sequence[int],
) -> None:
    """Decode into distinct blocks at token positions `first`, wherever they were when encoded at a known position."""
    _run(plan, kv, blocks, payload, first, encode=False)


def _run(
    plan: DevicePlan, kv: PagedKV, blocks: Sequence[int], payload: torch.Tensor, first: Sequence[int],
    *, encode: bool,
) -> None:  # fmt: skip
    table = checked_blocks(kv, blocks, distinct=not encode)
    require_room(payload, len(table) * plan.payload_bytes, "payload")
    if len(first) != len(table) or min(first, default=1) <= 0:
        raise EngineMismatchError(
            "every block needs a first token position; the first block of a prompt is not for kernels"
        )
    if not len(table):
        return
    codec, recipe = plan.codec, plan.codec.recipe
    cosine, sine = _rope(plan, kv.tokens, first, table.device)
    grid = (len(table), len(kv.layers), kv.heads)
    strides = (kv.block_stride, kv.head_stride, kv.token_stride, kv.part_stride, plan.payload_bytes)
    for part in (0, 1):
        keys = part == 0
        flags = {
            "LAYERS": len(kv.layers), "HEADS": kv.heads, "TOKENS": kv.tokens, "DIM": kv.head_dim, "MIXED": codec.mixed,
            "GROUPS": codec.plan.key_groups if keys and recipe.key_group is not None else 1, "PART": part,
            "TURN": keys and recipe.unrotate, "MEAN": keys and recipe.subtract_mean,
            "MIX": recipe.hadamard_keys if keys else recipe.hadamard_values,
            "PER_CHANNEL": keys and recipe.key_group is not None,
            "num_warps": warps_for(kv.tokens * kv.head_dim, turned_and_mixed=keys and recipe.hadamard_keys),
        }  # fmt: skip
        shared = (plan.units,)
        if encode:
            _encode_unit[grid](
                kv.pointers, kv.layers[0], table, payload, *shared, plan.levels, plan.shares, cosine, sine,
                plan.means, plan.matrix,
                *strides, F16_SLACK, F16_TINY, **flags,
            )  # fmt: skip
        else:
            _decode_unit[grid](
                kv.pointers,
                kv.layers[0],
                table,
                payload,
                *shared,
                cosine,
                sine,
                plan.means,
                plan.matrix,
                *strides,
                **flags,
            )


def warps_for(tile_elements: int, *, turned_and_mixed: bool) -> int:
    """Warps a program runs on: enough numbers a thread for stores of 16 bytes, and no spills (read from the machine
    code; a tile that is both turned and mixed spills on sm_80 with twice the warps)."""
    return max(2, tile_elements // 2048) if turned_and_mixed else max(4, tile_elements // 1024)


def _rope(
    plan: DevicePlan, tokens: int, first: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary tables [n, tokens, head_dim / 2] for the positions the blocks have in the cache."""
    if not plan.codec.recipe.unrotate:
        nothing = torch.zeros(1, device=device)
        return nothing, nothing
    pairs = [rope_tables(plan.frequencies, origin, tokens) for origin in first]
    cosine, sine = (torch.from_numpy(np.stack(column)).to(device) for column in zip(*pairs, strict=True))
    return cosine, sine


def gather_encode_reference(
    plan: DevicePlan, kv: PagedKV, blocks: Sequence[int], first: Sequence[int]
) -> list[np.ndarray]:
    """The payloads the codec writes on the CPU for the same blocks."""
    rows = gather_reference(kv, blocks).cpu()
    form = plan.codec.form
    payloads = []
    for row, position in zip(rows, first, strict=True):
        canonical = row.permute(0, 3, 1, 2, 4).contiguous()
        raw = np.empty(form.row_bytes, np.uint8)
        form.numbers(raw)[...] = canonical.view(torch.int16).numpy().view(np.uint16)
        target = memoryview(bytearray(plan.codec.encoded_bytes))
        size = plan.codec.encode(raw.data, target, position)
        payloads.append(np.frombuffer(target, np.uint8)[96:size].copy())
    return payloads
