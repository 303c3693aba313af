"""The arithmetic of the lossy codecs, in numpy: the reference, and what runs where torch is not installed.

`TorchArithmetic` (torch_arithmetic.py) does the same, several times faster. Both take and give numpy arrays at the
edges and float32 in between; `choose_arithmetic` picks one by probe. Units are [n, tokens, channels] throughout.
All of it is pure and thread-safe; numpy and torch release the GIL in every loop over data.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.codec.form import Raw
from kvtier.codec.scratch import Scratch
from kvtier.errors import ConfigError, NotEncodableError

if TYPE_CHECKING:
    from kvtier.codec.fused import Passes

F16_MAX = 65_504.0
F16_SLACK = 2.0**-10  # rounding to float16 moves a value by less than this share of it, or, near zero,
F16_TINY = 2.0**-24  # by less than this
FP8_MAX = 448.0

NOT_FINITE = "the row holds values that are not finite, or beyond float16's range"

# By how much the range of a group is drawn in for few levels: clipping the extremes costs less than the coarser step.
# Less than what minimises the squared error (0.65, 0.85, 0.95 for 2, 3, 4 bits): large keys matter more than others,
# and from 3 bits on the gain was within the noise of measuring it.
RANGE_SHARE = {3: 0.75}

# Which planes the bits of a code are stored in: (base, residual). The base alone is a coarser code of the same value.
PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (4, 4)}

Bytes = npt.NDArray[np.uint8]
Halfs = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

_SCRATCH = Scratch()
_PACK_BYTES = 256 << 10  # codes packed at a time: with the temporary they stay in the cache


class Arithmetic(Protocol):
    """What a codec computes. `values` are float32 arrays of the implementation's own kind ([n, tokens, channels])."""

    name: str
    passes: Passes | None

    def load(self, raw: Raw, dtype: str) -> Any:
        """Raw words of any strides as contiguous float32."""
        ...

    def wrap(self, values: Floats) -> Any:
        """A float32 array as this implementation's own kind, not copied."""
        ...

    def store(self, values: Any, raw: Raw, dtype: str) -> None:
        """Round float32 to `dtype` (nearest even) into raw words of any strides."""
        ...

    def rotate(self, values: Any, cosine: Floats, sine: Floats, *, inverse: bool) -> Any:
        """Rotary embedding over the halves of the first channels, or its inverse; tables are [tokens, rotated/2]."""
        ...

    def add(self, values: Any, offset: Floats, sign: int) -> Any:
        """values + sign * offset, broadcast. May reuse `values`."""
        ...

    def hadamard(self, values: Any, size: int) -> Any:
        """The orthonormal Walsh-Hadamard transform of every `size` channels (a power of two); its own inverse."""
        ...

    def quantise(self, values: Any, levels: Floats, *, per_channel: bool) -> tuple[Bytes, Halfs, Halfs]:
        """Asymmetric codes in [0, levels[unit]], and per group a float16 scale and minimum (see RANGE_SHARE).

        Groups are the tokens of a channel or the channels of a token. Raises NotEncodableError if a value is not
        finite.
        """
        ...

    def dequantise(self, codes: Bytes, scales: Halfs, minima: Halfs, *, per_channel: bool) -> Any:
        """codes * scale + minimum in float32."""
        ...

    def quantise_signed(self, values: Any, *, fp8: bool) -> tuple[Bytes, Halfs]:
        """Symmetric int8 (or e4m3) codes per token, and a float16 scale a token."""
        ...

    def dequantise_signed(self, codes: Bytes, scales: Halfs, *, fp8: bool) -> Any:
        """The inverse of quantise_signed, in float32."""
        ...


class NumpyArithmetic:
    """The reference implementation; see `Arithmetic`."""

    name = "numpy"
    passes: Passes | None = None

    def load(self, raw: Raw, dtype: str) -> Floats:
        if dtype == "bfloat16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.ascontiguousarray(raw).view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)

    def wrap(self, values: Floats) -> Floats:
        return values

    def store(self, values: Floats, raw: Raw, dtype: str) -> None:
        if dtype == "bfloat16":
            words = np.ascontiguousarray(values).view(np.uint32)
            raw[...] = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        elif dtype == "float16":
            raw[...] = np.clip(values, -F16_MAX, F16_MAX).astype(np.float16).view(np.uint16)
        else:
            raw[...] = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)

    def rotate(self, values: Floats, cosine: Floats, sine: Floats, *, inverse: bool) -> Floats:
        half = cosine.shape[-1]
        first, second, rest = values[..., :half], values[..., half : 2 * half], values[..., 2 * half :]
        signed = -sine if inverse else sine
        return np.concatenate([first * cosine - second * signed, second * cosine + first * signed, rest], axis=-1)

    def add(self, values: Floats, offset: Floats, sign: int) -> Floats:
        return values + np.float32(sign) * offset

    def hadamard(self, values: Floats, size: int) -> Floats:
        return (values.reshape(-1, size) @ hadamard_matrix(size)).reshape(values.shape)

    def quantise(self, values: Floats, levels: Floats, *, per_channel: bool) -> tuple[Bytes, Halfs, Halfs]:
        axis = 1 if per_channel else 2
        scales, minima = steps_of(values.min(axis=axis, keepdims=True), values.max(axis=axis, keepdims=True), levels)
        inverse = np.float32(1) / scales.astype(np.float32)
        offset = -minima.astype(np.float32) * inverse
        codes = np.clip(np.rint(values * inverse + offset), 0, levels.reshape(-1, 1, 1)).astype(np.uint8)
        return codes, scales.squeeze(axis), minima.squeeze(axis)

    def dequantise(self, codes: Bytes, scales: Halfs, minima: Halfs, *, per_channel: bool) -> Floats:
        axis = 1 if per_channel else 2
        step, low = (np.expand_dims(x.astype(np.float32), axis) for x in (scales, minima))
        return codes.astype(np.float32) * step + low

    def quantise_signed(self, values: Floats, *, fp8: bool) -> tuple[Bytes, Halfs]:
        peak = np.maximum(values.max(axis=2, keepdims=True), -values.min(axis=2, keepdims=True))
        share = np.float32((1 + F16_SLACK) / (FP8_MAX if fp8 else 127.0))
        with np.errstate(over="ignore", invalid="ignore"):
            scales = (peak * share + np.float32(F16_TINY)).astype(np.float16)
        require_finite(scales)
        scaled = values * (np.float32(1) / scales.astype(np.float32))
        codes = _to_e4m3(scaled) if fp8 else np.rint(scaled).astype(np.int8).view(np.uint8)
        return codes, scales.squeeze(2)

    def dequantise_signed(self, codes: Bytes, scales: Halfs, *, fp8: bool) -> Floats:
        plain = e4m3_values()[codes] if fp8 else codes.view(np.int8).astype(np.float32)
        return plain * scales.astype(np.float32)[..., None]


def pack(codes: Bytes, bits: int, base: Bytes, residual: Bytes) -> None:
    """Split codes [n, tokens, channels] of `bits` into packed planes (flat, of the exact size).

    Token t shares a byte with tokens t + T/k, t + 2T/k, ...: whole rows combine, eight bytes in one machine word.
    """
    high, low = PLANES[bits]
    for some, base_words, residual_words, spare in _batches(codes, bits, base, residual):
        if low:
            np.right_shift(some, np.uint64(low), out=spare)
        _fold(spare if low else some, high, base_words)
        if low:
            _fold(some, low, residual_words)


def unpack(base: Bytes, residual: Bytes | None, bits: int, codes: Bytes) -> None:
    """The inverse of pack, into `codes`; without a residual the low bits are zero."""
    _, low = PLANES[bits]
    high = PLANES[bits][0]
    for some, base_words, residual_words, spare in _batches(codes, bits, base, residual):
        _unfold(base_words, high, some)
        if low:
            some <<= np.uint64(low)
        if low and residual is not None:
            _unfold(residual_words, low, spare)
            some |= spare


def _batches(
    codes: Bytes, bits: int, base: Bytes, residual: Bytes | None
) -> Iterator[tuple[Words, Words, Words, Words]]:
    """Units in batches: their codes, their parts of the planes, and room for one temporary, all as 64-bit words."""
    high, low = PLANES[bits]
    words = codes.reshape(len(codes), -1).view(np.uint64)
    units = max(1, _PACK_BYTES // max(1, 8 * words.shape[1]))
    spare = _room("spare", (min(units, len(words)), words.shape[1]))
    planes = [
        plane.view(np.uint64).reshape(len(words), -1) if width and plane is not None else words[:, :0]
        for plane, width in ((base, high), (residual, low))
    ]
    for start in range(0, len(words), units):
        some = words[start : start + units]
        yield some, planes[0][start : start + units], planes[1][start : start + units], spare[: len(some)]


def _fold(words: Words, width: int, packed: Words) -> None:
    shares, mask = 8 // width, _each_byte((1 << width) - 1)
    length = packed.shape[1]
    part = _room("part", packed.shape)
    np.bitwise_and(words[:, :length], mask, out=packed)
    for i in range(1, shares):
        np.bitwise_and(words[:, i * length : (i + 1) * length], mask, out=part)
        part <<= np.uint64(i * width)
        packed |= part


def _unfold(packed: Words, width: int, words: Words) -> None:
    shares, mask = 8 // width, _each_byte((1 << width) - 1)
    length = packed.shape[1]
    for i in range(shares):
        part = words[:, i * length : (i + 1) * length]
        np.right_shift(packed, np.uint64(i * width), out=part)
        part &= mask


def _room(name: str, shape: tuple[int, ...]) -> Words:
    return _SCRATCH.bytes_of(name, 8 * math.prod(shape)).view(np.uint64).reshape(shape)


def _each_byte(value: int) -> np.uint64:
    return np.uint64(value * 0x0101_0101_0101_0101)


def range_shares(levels: Floats) -> Floats | None:
    """RANGE_SHARE of each unit, [n, 1, 1]; None if every unit keeps its whole range."""
    shares = np.ones_like(levels)
    for top, share in RANGE_SHARE.items():
        shares[levels == top] = share
    return shares.reshape(-1, 1, 1) if bool((shares < 1).any()) else None


def steps_of(low: Floats, high: Floats, levels: Floats) -> tuple[Halfs, Halfs]:
    """Scales and minima of groups with these extremes, [units, ...]. Raises NotEncodableError if one is not finite."""
    drawn_in = range_shares(levels)
    with np.errstate(over="ignore", invalid="ignore"):
        if drawn_in is not None:
            centre, reach = (high + low) * np.float32(0.5), (high - low) * (drawn_in * np.float32(0.5))
            low, high = centre - reach, centre + reach
        minima = (low - np.abs(low) * np.float32(F16_SLACK) - np.float32(F16_TINY)).astype(np.float16)
        share = (np.float32(1 + F16_SLACK) / levels).reshape(-1, 1, 1)
        scales = ((high - minima.astype(np.float32)) * share + np.float32(F16_TINY)).astype(np.float16)
    require_finite(minima, scales)
    return scales, minima


def require_finite(*steps: Halfs) -> None:
    """Raise NotEncodableError unless all are finite: minima and scales carry any NaN, infinity and float16 overflow."""
    if not all(bool(np.isfinite(x).all()) for x in steps):
        raise NotEncodableError(NOT_FINITE)


@lru_cache
def hadamard_matrix(size: int) -> Floats:
    """The orthonormal Hadamard matrix (Sylvester's order) of a power of two."""
    if size & (size - 1):
        raise ConfigError(f"a Hadamard rotation needs a power of two channels, not {size}")
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.ascontiguousarray(matrix / np.float32(size) ** np.float32(0.5), dtype=np.float32)


@lru_cache
def e4m3_values() -> Floats:
    """The 256 values of float8 e4m3fn, by code; NaN for 0x7F and 0xFF."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((exponent == 15) & (mantissa == 7), np.nan, size)
    return np.where(codes >= 128, -size, size).astype(np.float32)


def _to_e4m3(values: Floats) -> Bytes:
    """Nearest e4m3 code, ties to even, saturating at 448."""
    positive = e4m3_values()[:127]
    size = np.minimum(np.abs(values), np.float32(FP8_MAX))
    upper = np.searchsorted(positive, size).astype(np.int64)
    lower = np.maximum(upper - 1, 0)
    to_lower, to_upper = size - positive[lower], positive[upper] - size
    use_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0))
    code = np.where(use_lower, lower, upper).astype(np.uint8)
    signs = np.where(np.signbit(values), np.uint8(128), np.uint8(0))
    signed: Bytes = code | signs
    return signed


def choose_arithmetic(name: str = "auto", *, in_blocks: bool = False) -> Arithmetic:
    """The arithmetic by name: "numpy", "torch", "numba" (torch with compiled passes), or "auto": the quickest of those
    that are installed. Only codecs that quantise `in_blocks` have something to compile.

    Torch and numba are imported on the first call only, and numba compiles then: seconds, the first time on a machine.
    Call it where an engine starts, after its workers have. Raises ConfigError for another name, or if it is missing.
    """
    if name not in ("auto", "numpy", "torch", "numba"):
        raise ConfigError(f"arithmetic {name!r} is not one of auto, numpy, torch, numba")
    if name == "numpy" or (name == "auto" and importlib.util.find_spec("torch") is None):
        return NumpyArithmetic()
    from kvtier.codec.torch_arithmetic import TorchArithmetic

    if name == "torch" or not in_blocks:
        return TorchArithmetic()
    from kvtier.codec.fused import fused_passes

    passes = fused_passes()
    if passes is None and name == "numba":
        raise ConfigError("arithmetic numba needs the package numba: pip install 'kvtier[codec]'")
    return TorchArithmetic(passes)
