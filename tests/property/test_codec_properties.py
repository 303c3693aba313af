"""Codecs on any row: round trips, packing, entropy coding, maps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codec.arithmetic import PLANES, NumpyArithmetic, pack, unpack
from kvtier.codec.bits_map import CHOICES, allocate_bits
from kvtier.codec.form import RowForm
from kvtier.codec.range_coder import TOTAL, decode_lanes, encode_lanes, normalised
from kvtier.codec.registry import NAMES, CodecChoice, build_codec
from kvtier.errors import NotEncodableError
from tests.unit.codec_rows import calibration_of, numbers_in

AXES = st.permutations("lkht").map(lambda order: "".join(order) + "d")
FORMS = st.builds(
    RowForm,
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.sampled_from([8, 16, 40, 128]),
    head_dim=st.sampled_from([16, 32, 48, 64]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    axes=AXES,
)


@settings(max_examples=40, deadline=None)
@given(
    form=FORMS,
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 300.0]),
    first=st.sampled_from([None, 0, 64, 100_000]),
)
def test_any_row_comes_back_or_is_refused(form: RowForm, name: str, seed: int, scale: float, first: int | None) -> None:
    """Lossless bit for bit; lossy within a share of the largest number in the unit; encoding twice gives the same."""
    calibration = calibration_of(form, gates={})
    codec = build_codec(CodecChoice(name=name, arithmetic="numpy"), form, calibration)
    rng = np.random.default_rng(seed)
    shape = (form.layers, form.parts, form.heads, form.tokens, form.head_dim)
    values = (rng.standard_t(3, size=shape) * scale).astype(np.float32)
    row = np.empty(form.row_bytes, np.uint8)
    NumpyArithmetic().store(values, form.numbers(row), form.dtype)
    values = numbers_in(form, row.data)
    buffers = [memoryview(bytearray(codec.encoded_bytes)) for _ in range(2)]
    try:
        sizes = [codec.encode(row.data, buffer, first) for buffer in buffers]
    except NotEncodableError:
        assert name == "cachegen"  # noise has more entropy than its rows have room
        return
    assert sizes[0] == sizes[1] <= codec.encoded_bytes
    assert buffers[0] == buffers[1]
    out = memoryview(bytearray(form.row_bytes))
    codec.decode(buffers[0], out)
    if codec.lossless:
        assert out == row.data
        return
    peak = np.abs(values).max() + (np.abs(calibration.means).max() if name[0] == "m" else 0)
    peak *= np.sqrt(form.head_dim)  # a Hadamard rotation may gather a token into one channel
    assert np.abs(numbers_in(form, out) - values).max() <= peak * 1.01 + 1e-4


@settings(max_examples=200, deadline=None)
@given(
    bits=st.sampled_from(CHOICES),
    n=st.integers(1, 40),
    tokens=st.sampled_from([8, 24, 64]),
    channels=st.sampled_from([8, 16, 40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_is_exact_and_the_base_is_the_high_bits(
    bits: int, n: int, tokens: int, channels: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (n, tokens, channels), dtype=np.uint8)
    high, low = PLANES[bits]
    base = np.full(codes.size * high // 8, 0xAA, np.uint8)
    residual = np.full(codes.size * low // 8, 0xAA, np.uint8)
    pack(codes, bits, base, residual)
    again, coarse = np.full_like(codes, 0x55), np.full_like(codes, 0x55)
    unpack(base, residual, bits, again)
    unpack(base, None, bits, coarse)
    assert np.array_equal(again, codes)
    assert np.array_equal(coarse, codes >> low << low)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 60),
    lanes=st.integers(1, 50),
    symbols=st.integers(2, 31),
    tables=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_entropy_coding_is_exact_and_near_the_entropy(
    steps: int, lanes: int, symbols: int, tables: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.geometric(0.1, size=(tables, symbols)) ** 2
    frequencies = normalised(counts.astype(np.int64))
    assert (frequencies.astype(int).sum(axis=1) == TOTAL).all()
    assert frequencies.min() > 0
    which = rng.integers(0, tables, (steps, lanes))
    chances = frequencies / TOTAL
    drawn = np.array([rng.choice(symbols, p=chances[t]) for t in which.ravel()], np.uint8).reshape(steps, lanes)
    data = encode_lanes(drawn, which, frequencies)
    assert np.array_equal(decode_lanes(data, which, frequencies), drawn)
    ideal_bits = -np.log2(chances[which, drawn]).sum()
    assert len(data) * 8 <= ideal_bits * 1.01 + lanes * 50


@settings(max_examples=200, deadline=None)
@given(sensitivity=st.lists(st.floats(0, 10), min_size=1, max_size=40), mean=st.floats(2, 8))
def test_maps_keep_the_budget_and_give_more_bits_to_what_is_more_sensitive(
    sensitivity: list[float], mean: float
) -> None:
    values = np.array(sensitivity)
    bits = allocate_bits(values, mean)
    assert bits.sum() <= mean * len(values) + 1e-6
    assert set(bits.tolist()) <= set(CHOICES)
    order = np.argsort(values, kind="stable")
    assert (
        np.diff(bits[order].astype(int)) >= -2
    ).all()  # one step less at most: where the budget ran out among equals
