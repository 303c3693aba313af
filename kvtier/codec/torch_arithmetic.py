"""The arithmetic of the lossy codecs in torch on the CPU: vectorised, a pass over a chunk that fits the cache.

Callers keep a chunk within the second-level cache. Results lie in buffers of the calling thread: values are good until
the same thread's next operation on others. A codec thread uses one core. Imported only by `choose_arithmetic`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kvtier.codec.arithmetic import (
    F16_MAX,
    F16_SLACK,
    F16_TINY,
    FP8_MAX,
    Bytes,
    Floats,
    Halfs,
    hadamard_matrix,
    range_shares,
    require_finite,
)
from kvtier.codec.form import Raw
from kvtier.codec.fused import Passes
from kvtier.codec.scratch import Scratch

_SIGNED = 128  # torch converts float32 to int8 five times faster than to uint8
_SIGN_BITS = -0x7F7F_7F7F_7F7F_7F80  # 0x80 in every byte, as an int64
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TorchArithmetic:
    """See `kvtier.codec.arithmetic.Arithmetic`; results agree with numpy's to float32 rounding."""

    def __init__(self, passes: Passes | None = None) -> None:
        self.name = "torch" if passes is None else "numba"
        self.passes = passes
        self._scratch = Scratch()
        self._threads = threading.local()

    def load(self, raw: Raw, dtype: str) -> Any:
        self._use_one_core()
        source = _tensor(raw).view(_DTYPES[dtype])
        return self._floats("values", source.shape).copy_(source)

    def wrap(self, values: Floats) -> Any:
        return torch.from_numpy(values)

    def store(self, values: Any, raw: Raw, dtype: str) -> None:
        if dtype == "float16":
            values = values.clamp(-F16_MAX, F16_MAX)
        _tensor(raw).view(_DTYPES[dtype]).copy_(values)

    def rotate(self, values: Any, cosine: Floats, sine: Floats, *, inverse: bool) -> Any:
        half = cosine.shape[-1]
        cos, sin = torch.from_numpy(cosine), torch.from_numpy(sine)
        sign = -1 if inverse else 1
        first, second = values[..., :half], values[..., half : 2 * half]
        rotated = self._other(values)
        torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin, value=sign)
        rotated[..., 2 * half :] = values[..., 2 * half :]
        return rotated

    def add(self, values: Any, offset: Floats, sign: int) -> Any:
        return values.add_(torch.from_numpy(offset), alpha=sign)

    def hadamard(self, values: Any, size: int) -> Any:
        mixed = self._other(values)
        torch.mm(values.view(-1, size), _hadamard(size), out=mixed.view(-1, size))
        return mixed

    def quantise(self, values: Any, levels: Floats, *, per_channel: bool) -> tuple[Bytes, Halfs, Halfs]:
        axis = 1 if per_channel else 2
        low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)
        drawn_in = range_shares(levels)
        if drawn_in is not None:
            centre, reach = (high + low).mul_(0.5), (high - low).mul_(torch.from_numpy(drawn_in * np.float32(0.5)))
            low, high = centre - reach, centre + reach
        minima = low.sub(low.abs(), alpha=F16_SLACK).sub_(F16_TINY).half()
        offset = minima.float()
        share = torch.from_numpy((np.float32(1 + F16_SLACK) / levels).reshape(-1, 1, 1))
        scales = (high - offset).mul_(share).add_(F16_TINY).half()
        require_finite(minima.numpy(), scales.numpy())
        inverse = scales.float().reciprocal_()
        offset = offset.mul_(inverse).neg_().sub_(_SIGNED)
        values.mul_(inverse).add_(offset).round_()
        if drawn_in is not None:
            top = torch.from_numpy(levels - np.float32(_SIGNED)).view(-1, 1, 1)
            torch.minimum(values.clamp_(min=-_SIGNED), top, out=values)
        codes = self._codes(values)
        words = codes.view(-1).view(torch.int64)  # eight codes at a time: from signed to unsigned bytes
        words ^= _SIGN_BITS
        return codes.view(torch.uint8).numpy(), scales.squeeze(axis).numpy(), minima.squeeze(axis).numpy()

    def dequantise(self, codes: Bytes, scales: Halfs, minima: Halfs, *, per_channel: bool) -> Any:
        axis = 1 if per_channel else 2
        step, low = (_tensor(x).float().unsqueeze(axis) for x in (scales, minima))
        return self._floats("values", codes.shape).copy_(_tensor(codes)).mul_(step).add_(low)

    def quantise_signed(self, values: Any, *, fp8: bool) -> tuple[Bytes, Halfs]:
        peak = torch.maximum(values.amax(2, keepdim=True), values.amin(2, keepdim=True).neg_())
        scales = peak.mul_((1 + F16_SLACK) / (FP8_MAX if fp8 else 127.0)).add_(F16_TINY).half()
        require_finite(scales.numpy())
        scaled = values.mul_(scales.float().reciprocal_())
        codes = scaled.to(torch.float8_e4m3fn) if fp8 else self._codes(scaled.round_())
        return codes.view(torch.uint8).numpy(), scales.squeeze(2).numpy()

    def dequantise_signed(self, codes: Bytes, scales: Halfs, *, fp8: bool) -> Any:
        plain = _tensor(codes).view(torch.float8_e4m3fn if fp8 else torch.int8)
        steps = _tensor(scales).float().unsqueeze(2)
        return self._floats("values", codes.shape).copy_(plain).mul_(steps)

    def _floats(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        n = math.prod(shape)
        return torch.from_numpy(self._scratch.bytes_of(name, 4 * n).view(np.float32)).view(tuple(shape))

    def _other(self, values: torch.Tensor) -> torch.Tensor:
        """A buffer of the shape of `values` that is not the one `values` lies in."""
        mixed = self._floats("mixed", values.shape)
        return mixed if mixed.data_ptr() != values.data_ptr() else self._floats("values", values.shape)

    def _codes(self, values: torch.Tensor) -> torch.Tensor:
        buffer = torch.from_numpy(self._scratch.bytes_of("codes", values.numel()).view(np.int8))
        return buffer.view(values.shape).copy_(values)

    def _use_one_core(self) -> None:
        """Keep torch from spreading this thread's operations over the engine's cores.

        The limit is per thread, but setting it also changes the default of threads yet to come; a short-lived thread
        puts that back. The main thread is left alone: it may belong to the engine.
        """
        if getattr(self._threads, "limited", False):
            return
        self._threads.limited = True
        if threading.current_thread() is not threading.main_thread():
            default = torch.get_num_threads()
            torch.set_num_threads(1)
            restore = threading.Thread(target=torch.set_num_threads, args=(default,))
            restore.start()
            restore.join()


def _tensor(array: Any) -> torch.Tensor:
    """The array's memory as a tensor, also where numpy marks it read-only (it is only read then) or unsigned."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    if array.dtype == np.uint16:
        array = array.view(np.int16)
    elif array.dtype == np.uint32:
        array = array.view(np.int32)
    return torch.from_numpy(array)


class _Writable:
    """An array interface that claims to be writable, so that torch takes read-only memory without a warning."""

    def __init__(self, array: Any) -> None:
        self._keep = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


@lru_cache
def _hadamard(size: int) -> torch.Tensor:
    return torch.from_numpy(hadamard_matrix(size))
