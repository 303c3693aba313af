"""A SGLang plug-in that lets HiCache run on a machine without a GPU. Test-only; no file of SGLang is edited.

SGLang 0.5.23 reaches for CUDA in three places when `--enable-hierarchical-cache --device cpu` is given: it pins host
memory, registers it with the driver, and copies pages with CUDA kernels. Here memory is left unpinned and the copies
are done by torch indexing. Threads, trees, queues, metrics and events are SGLang's own. What this cannot exercise is
ordering between CUDA streams.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor


def install() -> None:
    """The entry point, called in every SGLang process. Does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    _never_pin(base.HostKVCache)
    common._cuda_host_register = lambda buffer, *args, **kwargs: None
    for module in (mha, mla):
        for function in COPIES:
            setattr(module, function.__name__, function)
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
    _attend_to_latents()
    if "KVTIER_TEST_CLOCK" in os.environ:
        _read_the_time_from(Path(os.environ["KVTIER_TEST_CLOCK"]))


def _read_the_time_from(path: Path) -> None:
    """Let the radix policy live in the time of a stream of requests, which waits for nobody (benchmarks/radix.py)."""
    from kvtier_sglang.radix import KVTierEvictionStrategy

    class ClockOfTheStream:
        def now(self) -> float:
            return float(path.read_text())

    KVTierEvictionStrategy.clock = ClockOfTheStream()


def _attend_to_latents() -> None:
    """Let models with latent attention (MLA) always attend to the latents themselves.

    The torch_native backend cannot run the other form SGLang would choose for a prompt without a cached prefix.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _never_pin(pool_class: Any) -> None:
    """Make every host pool ignore `pin_memory`, which asks the CUDA driver."""
    init = pool_class.__init__
    if getattr(init, "unpinned", False):
        return

    parameters = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def without_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        position = parameters.index("pin_memory") - 1
        if len(args) > position:
            args = (*args[:position], False, *args[position + 1 :])
        else:
            kwargs["pin_memory"] = False
        init(self, *args, **kwargs)

    without_pinning.unpinned = True
    pool_class.__init__ = without_pinning


# --- layer_first: rows of one layer lie side by side, on the device and on the host ---------------------------------


def transfer_kv_per_layer(
    src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any
) -> None:
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_per_layer_mla(src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any) -> None:
    dst[dst_indices] = src[src_indices].reshape(len(src_indices), *dst.shape[1:])


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(sources, targets, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for layer in range(num_layers):
        source = _rows_at(int(src_layers[layer]), src_indices, item_size)
        _rows_at(int(dst_layers[layer]), dst_indices, item_size)[dst_indices] = source[src_indices]


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].reshape(len(src_indices), *target.shape[1:])


# --- page_first: a token's rows of all layers lie side by side on the host ------------------------------------------


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    **_: Any,
) -> None:
    transfer_kv_per_layer_mla_pf_lf(src_k, dst_k, src_indices, dst_indices, layer_id)
    transfer_kv_per_layer_mla_pf_lf(src_v, dst_v, src_indices, dst_indices, layer_id)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices, layer_id].reshape(len(src_indices), *dst.shape[1:])


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_k_layers, dst_k, src_indices, dst_indices, item_size, num_layers)
    transfer_kv_all_layer_mla_lf_pf(src_v_layers, dst_v, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    target = dst.view(torch.uint8).reshape(dst.shape[0], num_layers, item_size)
    for layer in range(num_layers):
        target[dst_indices, layer] = _rows_at(int(src_layers[layer]), src_indices, item_size)[src_indices]


# --- page_first_direct: a page's rows of one layer lie side by side, the layers of a page after each other ----------


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows = source[src_indices // page_size, layer_id, src_indices % page_size]
        target[dst_indices] = rows.reshape(len(src_indices), *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target, layer = dst_ptrs[number // layers], number % layers
        rows = source[src_indices].reshape(len(src_indices), *target.shape[3:])
        target[dst_indices // page_size, layer, dst_indices % page_size] = rows


def _rows_at(pointer: int, indices: Tensor, item_size: int) -> Tensor:
    """The rows of `item_size` bytes that start at an address, as far as `indices` reach."""
    n_bytes = (int(indices.max()) + 1) * item_size
    memory = (ctypes.c_uint8 * n_bytes).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.uint8).reshape(-1, item_size)


COPIES = (
    transfer_kv_per_layer,
    transfer_kv_per_layer_mla,
    transfer_kv_all_layer,
    transfer_kv_all_layer_mla,
    transfer_kv_direct,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
)
