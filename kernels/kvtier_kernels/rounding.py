"""Small device functions shared by the kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x):
    """float32 to bfloat16, ties to even, on the bits: the same on every device and in the interpreter."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest(x):
    """float32 to the nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0
