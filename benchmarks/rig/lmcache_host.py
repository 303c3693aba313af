"""LMCache's missing device connector: host memory to host memory."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class HostConnector(GPUConnectorInterface):
    """Copies between vLLM's blocks, [block, head, token, K then V], and LMCache's chunks, [K/V, layer, token, head]."""

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self._copy(memory_obj.tensor, kwargs["kvcaches"], kwargs["slot_mapping"][start:end], store=True)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self._copy(memory_obj.tensor, kwargs["kvcaches"], kwargs["slot_mapping"][start:end], store=False)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        layers, heads, width = len(self.kvcaches), self.kvcaches[0].shape[1], self.kvcaches[0].shape[3] // 2
        return torch.Size([2, layers, num_tokens, heads * width])

    def _copy(self, tokens: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor, *, store: bool) -> None:
        _, heads, block_tokens, width = caches[0].shape
        if len(slots) % block_tokens or int(slots[0]) % block_tokens:
            raise ValueError(f"{len(slots)} tokens from slot {int(slots[0])} are not whole blocks of {block_tokens}")
        blocks = slots[::block_tokens] // block_tokens
        for layer, cache in enumerate(caches):
            # One copy of whole blocks and one that reorders, whichever way they go.
            ours = tokens[:, layer].view(2, len(blocks), block_tokens, heads, width // 2).permute(1, 3, 2, 0, 4)
            if store:
                ours.copy_(cache.index_select(0, blocks).view(ours.shape))
            else:
                cache.index_copy_(0, blocks, ours.reshape(len(blocks), heads, block_tokens, width))
