"""Blocks of a paged cache as int8 on the way to the host and back, so that the bus carries half the bytes.

The same courier serves every device: the dispatcher says whether a kernel encodes (CUDA) or torch does. What it writes
is the codec "int8", block by block: codes [layers, parts, heads, tokens, d], then a float16 scale a token and head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_kernels.dispatch import Dispatcher, Path
from kvtier_kernels.int8 import gather_int8, gather_int8_reference, scatter_int8, scatter_int8_reference
from kvtier_kernels.pages import PagedKV


def int8_block_bytes(kv: PagedKV) -> int:
    """Bytes of one block of all layers, encoded."""
    return len(kv.layers) * kv.parts * kv.heads * kv.tokens * (kv.head_dim + 2)


class Int8Courier:
    """Encodes and decodes blocks of one cache. Work is queued on the current stream; nothing here waits for it."""

    def __init__(self, kv: PagedKV, dispatcher: Dispatcher) -> None:
        self.kv = kv
        self._dispatcher = dispatcher
        self._units = len(kv.layers) * kv.parts * kv.heads * kv.tokens
        self.block_bytes = int8_block_bytes(kv)

    def encode(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Encode blocks into `rows` (int8 [block_bytes] each, on the host or the device). Returns what must live until
        the work is done. Raises EngineMismatchError for a block outside the cache."""
        if self._path(len(blocks)) is Path.TRITON:
            device = self.kv.pointers.device
            codes = torch.empty(len(blocks) * self._units * self.kv.head_dim, dtype=torch.int8, device=device)
            scales = torch.empty(len(blocks) * self._units, dtype=torch.float16, device=device)
            gather_int8(self.kv, blocks, codes, scales)
        else:
            codes, scales = gather_int8_reference(self.kv, blocks)
        parts = codes.reshape(len(blocks), -1), scales.reshape(len(blocks), -1).view(torch.int8)
        for i, row in enumerate(rows):
            size = parts[0].shape[1]
            row[:size].copy_(parts[0][i], non_blocking=True)
            row[size : self.block_bytes].copy_(parts[1][i], non_blocking=True)
        return [codes, scales]

    def decode(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decode `rows` into distinct blocks. Returns and raises as `encode`."""
        device, n = self.kv.pointers.device, len(blocks)
        size = self._units * self.kv.head_dim
        codes = torch.empty(n, size, dtype=torch.int8, device=device)
        scales = torch.empty(n, self._units, dtype=torch.float16, device=device)
        bits = scales.view(torch.int8)
        for i, row in enumerate(rows):
            codes[i].copy_(row[:size], non_blocking=True)
            bits[i].copy_(row[size : self.block_bytes], non_blocking=True)
        run = scatter_int8 if self._path(n) is Path.TRITON else scatter_int8_reference
        run(self.kv, blocks, codes.view(-1), scales.view(-1))
        return [codes, scales]

    def _path(self, blocks: int) -> Path:
        page = self.kv.heads * self.kv.tokens * self.kv.parts * self.kv.head_dim * self.kv.dtype.itemsize
        return self._dispatcher.choose(page_bytes=page, pages=blocks * len(self.kv.layers), encoded=True).path
