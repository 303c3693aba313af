"""The passes of block quantisation that torch cannot join, compiled by numba: a unit of a row stays in the first cache.

    from kvtier.codec.fused import fused_passes
    passes = fused_passes()          # None where numba is not installed; compiles here, once, and keeps it on disk

Nothing else imports this module before a codec is built: compiling takes seconds and the interpreter's lock, so it
belongs to the start of an engine and never to its work. The compiled loops release the lock.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.codec.arithmetic import PLANES, Bytes, Floats
from kvtier.codec.planes import PayloadPlan

Halfs = npt.NDArray[np.uint16]
Places = npt.NDArray[np.int64]


class Passes(NamedTuple):
    """The compiled loops; see their sources below."""

    rotate_range: Callable[..., None]
    token_range: Callable[..., None]
    steps: Callable[..., None]
    quantise: Callable[..., None]
    dequantise: Callable[..., None]


def places_of(plan: PayloadPlan, unit_elements: int) -> Places:
    """Where in a payload the planes of each unit are: [units, 4] of base width, residual width, base offset, residual
    offset."""
    found = np.zeros((len(plan.rank), 4), np.int64)
    by_rank = np.argsort(plan.rank, kind="stable")
    for c in plan.classes:
        high, low = PLANES[c.bits]
        units, i = by_rank[c.start : c.start + c.count], np.arange(c.count)
        found[units, 0], found[units, 1] = high, low
        found[units, 2] = c.base_offset + i * (unit_elements * high // 8)
        found[units, 3] = c.residual_offset + i * (unit_elements * low // 8)
    return found


@lru_cache(maxsize=1)
def fused_passes() -> Passes | None:
    """The loops, compiled for this machine; None where numba or a place for its cache is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    def compiled(loop: Callable[..., Any]) -> Any:
        try:
            return numba.njit(loop, nogil=True, cache=True)
        except RuntimeError:  # neither the package's folder nor the user's can be written: compile at every start
            return numba.njit(loop, nogil=True)

    global _mix, _half  # the loops that call it are compiled with what stands behind its name
    if not hasattr(_mix, "py_func"):
        _mix, _half = compiled(_mix), compiled(_half)
    passes = Passes(
        compiled(_rotate_range), compiled(_token_range), compiled(_steps), compiled(_quantise), compiled(_dequantise)
    )
    _warm(passes)
    return passes


def _warm(passes: Passes) -> None:
    """Compile every loop for the types it is called with."""
    values, table = np.ones((1, 8, 8), np.float32), np.ones((8, 4), np.float32)
    extremes = [np.empty((1, 1, 8), np.float32) for _ in range(2)]
    passes.rotate_range(values, table, table, 0, *extremes)
    passes.token_range(values, 8, 1.0, 0, *extremes)
    halfs, one = [np.zeros((1, 1, 8), np.uint16) for _ in range(2)], np.ones(1, np.float32)
    passes.steps(*extremes, one, one, *halfs, np.zeros(1, np.bool_))
    codes, payload = np.zeros((8, 8), np.uint8), np.zeros(64, np.uint8)
    places, tops = np.array([[4, 4, 0, 32]], np.int64), np.array([15], np.float32)
    for per_channel in (False, True):
        passes.quantise(values, *extremes, tops, per_channel, 1, places, payload, codes)
        passes.dequantise(payload, *extremes, per_channel, 1, places, values, codes, table, table, False, 8, 1.0)
    payload.setflags(write=False)
    passes.dequantise(payload, *extremes, False, 1, places, values, codes, table, table, False, 8, 1.0)


# --- the loops: plain Python over arrays, compiled above --------------------------------------------------------


def _rotate_range(values: Floats, cosine: Floats, sine: Floats, sinks: int, low: Floats, high: Floats) -> None:
    """Turn keys [units, tokens, d] back by their position, in place, and find the extremes of each channel in each
    group of tokens. The first `sinks` tokens take the place of the one after them and count for nothing."""
    units, tokens, channels = values.shape
    half, size = cosine.shape[1], tokens // low.shape[1]
    for u in range(units):
        for g in range(low.shape[1]):
            lowest, highest = low[u, g], high[u, g]
            for c in range(channels):
                lowest[c], highest[c] = np.float32(np.inf), np.float32(-np.inf)
            for t in range(max(sinks, g * size), (g + 1) * size):
                row, cos, sin = values[u, t], cosine[t], sine[t]
                for i in range(half):
                    first, second = row[i], row[half + i]
                    row[i] = first * cos[i] + second * sin[i]
                    row[half + i] = second * cos[i] - first * sin[i]
                for c in range(channels):  # a NaN must stay: it is what tells that the row cannot be encoded
                    x = row[c]
                    lowest[c] = x if (x < lowest[c]) | (x != x) else lowest[c]
                    highest[c] = x if (x > highest[c]) | (x != x) else highest[c]
        for t in range(sinks):
            values[u, t] = values[u, sinks]


def _token_range(values: Floats, mixed: int, norm: float, sinks: int, low: Floats, high: Floats) -> None:
    """The Walsh-Hadamard transform of every `mixed` channels (1: none), in place, times `norm`, and the extremes of
    each group of channels of each token: [units, 1, tokens * groups]. Sinks as in `_rotate_range`."""
    units, tokens, channels = values.shape
    groups = low.shape[2] // tokens
    width = channels // groups
    least, most = np.empty(width, np.float32), np.empty(width, np.float32)
    scale = np.float32(norm)
    for u in range(units):
        for t in range(sinks, tokens):
            _mix(values[u, t], mixed, scale)
            for g in range(groups):
                part = values[u, t][g * width : (g + 1) * width]
                for c in range(width):
                    least[c] = part[c]
                    most[c] = part[c]
                left = width
                while left > 1:  # by halves: lanes side by side, where one running minimum would wait for itself
                    half = (left + 1) // 2
                    for c in range(left - half):
                        x, y = least[c], least[half + c]
                        least[c] = y if (y < x) | (y != y) else x
                        x, y = most[c], most[half + c]
                        most[c] = y if (y > x) | (y != y) else x
                    left = half
                low[u, 0, t * groups + g], high[u, 0, t * groups + g] = least[0], most[0]
        for t in range(sinks):
            values[u, t] = values[u, sinks]
            for g in range(groups):
                low[u, 0, t * groups + g] = low[u, 0, sinks * groups + g]
                high[u, 0, t * groups + g] = high[u, 0, sinks * groups + g]


def _mix(row: Floats, mixed: int, scale: np.float32) -> None:
    """The Walsh-Hadamard transform of every `mixed` channels of a token (a power of two; 1: none), times `scale`."""
    if mixed == 1:
        return
    step = mixed // 2
    if mixed == 64:  # eight by eight: the coarse half in one pass, eight channels side by side
        for start in range(0, len(row), 64):
            x = row[start : start + 64]
            for c in range(8):
                a0, a1, a2, a3 = x[c] + x[c + 32], x[c + 8] + x[c + 40], x[c + 16] + x[c + 48], x[c + 24] + x[c + 56]
                a4, a5, a6, a7 = x[c] - x[c + 32], x[c + 8] - x[c + 40], x[c + 16] - x[c + 48], x[c + 24] - x[c + 56]
                b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
                b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
                x[c], x[c + 8], x[c + 16], x[c + 24] = b0 + b1, b0 - b1, b2 + b3, b2 - b3
                x[c + 32], x[c + 40], x[c + 48], x[c + 56] = b4 + b5, b4 - b5, b6 + b7, b6 - b7
        step = 4
    while step >= 8:
        for start in range(0, len(row), 2 * step):
            first, second = row[start : start + step], row[start + step : start + 2 * step]
            for c in range(step):
                a, b = first[c], second[c]
                first[c], second[c] = a + b, a - b
        step //= 2
    if mixed >= 8:
        for start in range(0, len(row), 8):
            x = row[start : start + 8]
            a0, a1, a2, a3 = x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]
            a4, a5, a6, a7 = x[0] - x[4], x[1] - x[5], x[2] - x[6], x[3] - x[7]
            b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
            b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
            x[0], x[1], x[2], x[3] = (b0 + b1) * scale, (b0 - b1) * scale, (b2 + b3) * scale, (b2 - b3) * scale
            x[4], x[5], x[6], x[7] = (b4 + b5) * scale, (b4 - b5) * scale, (b6 + b7) * scale, (b6 - b7) * scale
        return
    while step >= 1:
        for start in range(0, len(row), 2 * step):
            for c in range(start, start + step):
                a, b = row[c], row[c + step]
                row[c], row[c + step] = a + b, a - b
        step //= 2
    for c in range(len(row)):
        row[c] *= scale


def _steps(
    low: Floats, high: Floats, drawn: Floats, share: Floats, scales: Halfs, minima: Halfs, broken: npt.NDArray[np.bool_]
) -> None:
    """`arithmetic.steps_of`, and what quantising multiplies by and adds: `low` and `high` become inverse and offset.

    `scales` and `minima` are float16 as words of 16 bits. `broken` is set where one is not finite.
    """
    units, groups, wide = low.shape
    slack, tiny, half = np.float32(2.0**-10), np.float32(2.0**-24), np.float32(0.5)
    word = np.empty(1, np.float32)
    bits = word.view(np.uint32)
    for u in range(units):
        for g in range(groups):
            for c in range(wide):
                least, most = low[u, g, c], high[u, g, c]
                if drawn[u] < 1:
                    centre, reach = (most + least) * half, (most - least) * (drawn[u] * half)
                    least, most = centre - reach, centre + reach
                word[0] = least - abs(least) * slack - tiny
                minimum = _half(word, bits, broken)
                least = word[0]
                word[0] = (most - least) * share[u] + tiny
                scale = _half(word, bits, broken)
                minima[u, g, c], scales[u, g, c] = minimum, scale
                inverse = np.float32(1) / word[0]
                low[u, g, c], high[u, g, c] = inverse, -least * inverse


def _half(word: Floats, bits: npt.NDArray[np.uint32], broken: npt.NDArray[np.bool_]) -> np.uint16:
    """The float16 nearest to a float32 (`word`, whose bits are `bits`), ties to even; `word` becomes its value."""
    sign = bits[0] & np.uint32(0x8000_0000)
    bits[0] ^= sign
    if bits[0] >= np.uint32(0x477F_F000):  # 65520 and more, infinities, NaN
        broken[0] = True
        word[0] = np.float32(1)
        return np.uint16(0x7C00)
    if bits[0] < np.uint32(113 << 23):  # subnormal: adding this moves its bits to the end of the word
        word[0] += np.float32(0.5)
        found = bits[0] - np.uint32(0x3F00_0000)
    else:
        odd = (bits[0] >> np.uint32(13)) & np.uint32(1)
        found = (bits[0] - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    bits[0] = found << np.uint32(13)
    word[0] *= np.float32(2.0**112)
    bits[0] |= sign
    return np.uint16(found | (sign >> np.uint32(16)))


def _quantise(
    values: Floats,
    inverse: Floats,
    offset: Floats,
    tops: Floats,
    per_channel: bool,
    groups: int,
    places: Places,
    payload: Bytes,
    codes: Bytes,
) -> None:
    """Codes of every unit, split into their planes. `groups` are of tokens (per channel) or of channels (per token)."""
    units, tokens, channels = values.shape
    nearest = np.float32(12_582_912.0)  # adding and taking away 1.5 * 2**23 rounds to the nearest even integer
    zero, size, width = np.float32(0), tokens // groups, channels // groups
    flat = codes.reshape(-1)
    for u in range(units):
        top = tops[u]
        for t in range(tokens):
            row, into = values[u, t], codes[t]
            if per_channel:
                scale, shift = inverse[u, t // size], offset[u, t // size]
                for c in range(channels):
                    q = (row[c] * scale[c] + shift[c] + nearest) - nearest
                    into[c] = np.uint8(np.int32(min(max(q, zero), top)))
            else:
                for g in range(groups):
                    by, plus = inverse[u, 0, t * groups + g], offset[u, 0, t * groups + g]
                    part, to = row[g * width : (g + 1) * width], into[g * width : (g + 1) * width]
                    for c in range(width):
                        q = (part[c] * by + plus + nearest) - nearest
                        to[c] = np.uint8(np.int32(min(max(q, zero), top)))
        low = places[u, 1]
        for plane in range(2):
            bits = places[u, plane]
            if bits == 0:
                continue
            drop = np.uint8(low if plane == 0 else 0)
            mask = np.uint8((1 << bits) - 1)
            length = tokens * channels * bits // 8
            packed = payload[places[u, 2 + plane] : places[u, 2 + plane] + length]
            for k in range(8 // bits):
                part, left = flat[k * length : (k + 1) * length], np.uint8(k * bits)
                if k == 0:
                    for j in range(length):
                        packed[j] = (part[j] >> drop) & mask
                else:
                    for j in range(length):
                        packed[j] |= ((part[j] >> drop) & mask) << left


def _dequantise(
    payload: Bytes,
    scales: Floats,
    minima: Floats,
    per_channel: bool,
    groups: int,
    places: Places,
    values: Floats,
    codes: Bytes,
    cosine: Floats,
    sine: Floats,
    rotate: bool,
    mixed: int,
    norm: float,
) -> None:
    """The inverse of `_quantise` into `values`; with `rotate`, keys turned to their position again; values per token
    are mixed again as in `_token_range`."""
    scale = np.float32(norm)
    units, tokens, channels = values.shape
    half, size, width = cosine.shape[1], tokens // groups, channels // groups
    flat = codes.reshape(-1)
    for u in range(units):
        low = places[u, 1]
        for plane in range(2):
            bits = places[u, plane]
            if bits == 0:
                continue
            up = np.uint8(low if plane == 0 else 0)
            mask = np.uint8((1 << bits) - 1)
            length = tokens * channels * bits // 8
            packed = payload[places[u, 2 + plane] : places[u, 2 + plane] + length]
            for k in range(8 // bits):
                part, right = flat[k * length : (k + 1) * length], np.uint8(k * bits)
                if plane == 0:
                    for j in range(length):
                        part[j] = ((packed[j] >> right) & mask) << up
                else:
                    for j in range(length):
                        part[j] |= (packed[j] >> right) & mask
        for t in range(tokens):
            row, code = values[u, t], codes[t]
            if per_channel:
                step, least = scales[u, t // size], minima[u, t // size]
                for c in range(channels):
                    row[c] = np.float32(code[c]) * step[c] + least[c]
            else:
                for g in range(groups):
                    by, plus = scales[u, 0, t * groups + g], minima[u, 0, t * groups + g]
                    part, source = row[g * width : (g + 1) * width], code[g * width : (g + 1) * width]
                    for c in range(width):
                        part[c] = np.float32(source[c]) * by + plus
                _mix(row, mixed, scale)
            if rotate:
                cos, sin = cosine[t], sine[t]
                for i in range(half):
                    first, second = row[i], row[half + i]
                    row[i] = first * cos[i] - second * sin[i]
                    row[half + i] = second * cos[i] + first * sin[i]
