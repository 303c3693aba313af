"""Compile every kernel to machine code without a GPU and read what came out."""
# ruff: noqa: E501  (one launch a line)

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier_kernels import block_quant, checksum, int8, paged, rotate, select

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Machine(NamedTuple):
    """What the assembler says of a kernel: registers, bytes of local memory, and how often it moves how many bits."""

    registers: int
    local_bytes: int
    loads: dict[str, int]
    stores: dict[str, int]


class Case(NamedTuple):
    """A kernel as it is launched: argument types, compile-time sizes, warps."""

    kernel: Any
    signature: dict[str, str]
    sizes: dict[str, Any]
    warps: int = 4


M_WARPS = block_quant.warps_for(64 * 64, turned_and_mixed=True)
STRIDES = {"block_stride": "i64", "head_stride": "i32", "token_stride": "i32", "part_stride": "i32"}
SHAPE = {"LAYERS": 32, "HEADS": 8, "TOKENS": 64, "DIM": 64}
TABLES = {"pointers": "*i64", "elements": "*bf16", "table": "*i64"}
BLOCK_QUANT = {
    **TABLES, "payload": "*u8", "units": "*i64", "levels": "*fp32", "shares": "*fp32", "cosine": "*fp32", "sine": "*fp32",
    "means": "*fp32", "matrix": "*bf16", **STRIDES, "payload_bytes": "i64", "slack": "fp32", "tiny": "fp32",
}  # fmt: skip
DECODE = {name: kind for name, kind in BLOCK_QUANT.items() if name not in ("levels", "shares", "slack", "tiny")}
D_KEYS = {"MIXED": 64, "GROUPS": 1, "PART": 0, "TURN": True, "MEAN": False, "MIX": False, "PER_CHANNEL": True}
VALUES = {"MIXED": 64, "GROUPS": 1, "PART": 1, "TURN": False, "MEAN": False, "MIX": True, "PER_CHANNEL": False}
M_KEYS = {**VALUES, "PART": 0, "TURN": True, "MEAN": True}
SELECT = {**TABLES, "queries": "*bf16"}
STRIDES3 = {name: STRIDES[name] for name in ("block_stride", "head_stride", "token_stride")}

CASES = {
    "gather": Case(
        paged._copy_unit, {"pointers": "*i64", "rows": "*bf16", "table": "*i64", **STRIDES},
        {**SHAPE, "DIM_TILE": 64, "PARTS": 2, "TOKEN_TILE": 64, "GATHER": True},
    ),
    "scatter": Case(
        paged._copy_unit, {"pointers": "*i64", "rows": "*bf16", "table": "*i64", **STRIDES},
        {**SHAPE, "DIM_TILE": 64, "PARTS": 2, "TOKEN_TILE": 64, "GATHER": False},
    ),
    "int8-encode": Case(
        int8._int8_unit,
        {"pointers": "*i64", "codes": "*i8", "scales": "*fp16", "table": "*i64", "elements": "*bf16", **STRIDES,
         "share": "fp32", "tiny": "fp32"},
        {**SHAPE, "PARTS": 2, "ENCODE": True},
    ),
    "int8-decode": Case(
        int8._int8_unit,
        {"pointers": "*i64", "codes": "*i8", "scales": "*fp16", "table": "*i64", "elements": "*bf16", **STRIDES,
         "share": "fp32", "tiny": "fp32"},
        {**SHAPE, "PARTS": 2, "ENCODE": False},
    ),
    "turn": Case(
        rotate._turn_unit, {**TABLES, "cosine": "*fp32", "sine": "*fp32", **STRIDES3}, {"TOKENS": 64, "HALF": 32}
    ),
    "d-keys-encode": Case(block_quant._encode_unit, BLOCK_QUANT, {**SHAPE, **D_KEYS}),
    "d-keys-decode": Case(block_quant._decode_unit, DECODE, {**SHAPE, **D_KEYS}),
    "values-encode": Case(block_quant._encode_unit, BLOCK_QUANT, {**SHAPE, **VALUES}),
    "values-decode": Case(block_quant._decode_unit, DECODE, {**SHAPE, **VALUES}),
    "m-keys-encode": Case(block_quant._encode_unit, BLOCK_QUANT, {**SHAPE, **M_KEYS}, M_WARPS),
    "m-keys-decode": Case(block_quant._decode_unit, DECODE, {**SHAPE, **M_KEYS}, M_WARPS),
    "checksum": Case(checksum._sum_tile, {"words": "*i32", "partial": "*i32", "n_words": "i32"}, {"TILE": 4096}, 8),
    "window-normaliser": Case(
        select._normaliser, {**SELECT, "partial": "*fp32", "layer": "i32", "n_tokens": "i32", **STRIDES3, "scale": "fp32"},
        {"TOKENS": 64, "DIM": 64, "ROWS": 32, "KEYS": 64},
    ),
    "window-weights": Case(
        select._weights,
        {**SELECT, "normaliser": "*fp32", "scores": "*fp32", "layer": "i32", "n_tokens": "i32", "n_rows": "i32", **STRIDES3,
         "scale": "fp32"},
        {"TOKENS": 64, "DIM": 64, "ROWS": 32, "KEYS": 64},
    ),
    "speculate": Case(
        select._speculate, {"queries": "*bf16", "keys": "*bf16", "scores": "*fp32", "n_tokens": "i32"},
        {"ROWS": 16, "WIDTH": 16, "KEYS": 64},
    ),
    "fetch": Case(
        select._fetch,
        {**TABLES, "chosen": "*i64", "out": "*bf16", "layer": "i32", "n_chosen": "i32", **STRIDES},
        {"TOKENS": 64, "DIM": 64, "PARTS": 2, "TILE": 32},
    ),
}  # fmt: skip


def machine_code(case: Case, capability: int) -> Machine:
    """Compile for sm_`capability` and disassemble. Pointers and strides are multiples of 16, as at every launch."""
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    sixteen = [["tt.divisibility", 16]]
    attributes = {
        (names.index(name),): sixteen
        for name, kind in case.signature.items()
        if kind.startswith("*") or name.endswith(("stride", "payload_bytes", "n_words"))
    }
    constants = {(names.index(name),): value for name, value in case.sizes.items()}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([_TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    report = usage.stdout + usage.stderr
    local = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", report))
    local += 16 * len(re.findall(r"\b(?:LDL|STL)\b", code))
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", report))
    return Machine(registers, local, _widths(code, "LDG"), _widths(code, "STG"))


def _widths(code: str, instruction: str) -> dict[str, int]:
    """How often global memory is moved, by width: "U8", "U16", "32", "64", "128"."""
    counts: dict[str, int] = {}
    for modifiers in re.findall(rf"\b{instruction}\.E([\w.]*)", code):
        width = next((part for part in modifiers.split(".") if part in ("U8", "S8", "U16", "S16", "64", "128")), "32")
        counts[width] = counts.get(width, 0) + 1
    return counts
