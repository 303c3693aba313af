"""How an engine's paged KV is addressed by kernels, and the checks that keep kernels inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvtier.errors import EngineMismatchError

VECTOR_BYTES = 16


class PagedKV(NamedTuple):
    """All layers of one KV-cache group. Strides count elements and are the same in every layer; channels are adjacent.

    A part is K or V: they lie `part_stride` apart (head_dim for vLLM's [B, H, N, K‖V]). A latent has one part and one
    head.
    """

    layers: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    blocks: int
    heads: int
    tokens: int
    head_dim: int
    parts: int
    block_stride: int
    head_stride: int
    token_stride: int
    part_stride: int

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the cache."""
        return self.layers[0].dtype

    def unit(self, layer: int, part: int) -> torch.Tensor:
        """[blocks, heads, tokens, head_dim] view of K or V of a layer."""
        size = (self.blocks, self.heads, self.tokens, self.head_dim)
        stride = (self.block_stride, self.head_stride, self.token_stride, 1)
        base = self.layers[layer]
        return base.as_strided(size, stride, base.storage_offset() + part * self.part_stride)


def paged_kv(layers: Sequence[torch.Tensor], *, kind: str = "bhnc") -> PagedKV:
    """Address per-layer tensors by the shape of their view.

    `kind` names the axes: "bhnc" (vLLM from 0.30: K‖V in the last axis, any physical order), "bknhd" (K and V apart),
    "bnc" (a latent). Raises EngineMismatchError if layers differ in shape, strides, type or device, if channels are
    not adjacent, or if a row of channels does not start on 16 bytes (kernels move 16 bytes at a time).
    """
    first = layers[0]
    for layer in layers:
        if (layer.shape, layer.stride(), layer.dtype, layer.device) != (
            first.shape, first.stride(), first.dtype, first.device,
        ):  # fmt: skip
            raise EngineMismatchError("layers of one KV-cache group differ in shape, strides, type or device")
    shape, stride = first.shape, first.stride()
    if kind == "bhnc" and first.dim() == 4 and shape[3] % 2 == 0:
        sizes = (shape[0], shape[1], shape[2], shape[3] // 2, 2)
        strides = (stride[0], stride[1], stride[2], shape[3] // 2)
    elif kind == "bknhd" and first.dim() == 5 and shape[1] == 2:
        sizes = (shape[0], shape[3], shape[2], shape[4], 2)
        strides = (stride[0], stride[3], stride[2], stride[1])
    elif kind == "bnc" and first.dim() == 3:
        sizes, strides = (shape[0], 1, shape[1], shape[2], 1), (stride[0], 0, stride[1], 0)
    else:
        raise EngineMismatchError(f"a KV cache of shape {tuple(shape)} is not laid out as {kind!r}")
    vector = VECTOR_BYTES // first.element_size()
    aligned = all(s % vector == 0 for s in (*strides, sizes[3]))
    if stride[-1] != 1 or not aligned or any(layer.data_ptr() % VECTOR_BYTES for layer in layers):
        raise EngineMismatchError("a row of channels is not adjacent in memory or does not start on 16 bytes")
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=first.device)
    return PagedKV(tuple(layers), pointers, *sizes, *strides)


def checked_blocks(kv: PagedKV, blocks: torch.Tensor | Sequence[int], *, distinct: bool = False) -> torch.Tensor:
    """The block table as int64 on the cache's device.

    Raises EngineMismatchError if an entry is outside the cache or, where blocks are written, named twice. Costs one
    transfer where the table lies on the device already: keep tables on the host.
    """
    table = torch.as_tensor(blocks, dtype=torch.int64)
    host = table.cpu()
    if host.dim() != 1:
        raise EngineMismatchError("a block table has one dimension")
    if host.numel() and (int(host.min()) < 0 or int(host.max()) >= kv.blocks):
        raise EngineMismatchError(f"a block table names blocks outside 0..{kv.blocks - 1}")
    if distinct and host.unique().numel() != host.numel():
        raise EngineMismatchError("a block table names a block to write twice")
    return table.to(kv.pointers.device)


def require_room(buffer: torch.Tensor, n_elements: int, what: str) -> None:
    """Raise EngineMismatchError unless `buffer` is contiguous, 16-byte aligned and has exactly `n_elements`."""
    if buffer.numel() != n_elements or not buffer.is_contiguous() or buffer.data_ptr() % VECTOR_BYTES:
        raise EngineMismatchError(
            f"{what}: {buffer.numel()} elements given, {n_elements} contiguous and aligned needed"
        )
