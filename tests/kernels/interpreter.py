"""Repairs of Triton 3.9's interpreter, so that it rounds as the hardware does. Import before any kernel runs."""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter


def repair() -> None:
    """float32 -> bfloat16 truncates in the interpreter; every device rounds to nearest even.

    `_convert_float` is called without a rounding mode there, and drops the low bits. Kernels of ours that store
    bfloat16 round on the bits themselves; this repairs `tl.dot` operands and plain casts in reference comparisons.
    """
    original = interpreter._convert_float

    def convert(values, source, target, rounding_mode):  # type: ignore[no-untyped-def]
        if str(source) == "fp32" and str(target) == "bf16":
            words = values.view(np.uint32)
            rounded = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
            return (rounded >> np.uint32(16)).astype(np.uint16)
        return original(values, source, target, rounding_mode)

    interpreter._convert_float = convert
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        return dot(self, _widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _widened(operand):  # type: ignore[no-untyped-def]
    """A bfloat16 operand as float32: the interpreter multiplies the raw 16-bit words as integers."""
    if str(operand.dtype.scalar) != "bf16":
        return operand
    values = (operand.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return interpreter.TensorHandle(values, interpreter.tl.float32)
