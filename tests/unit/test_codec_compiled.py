"""The compiled passes against the arithmetic they stand for: the same rows, to the rounding of float32."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.codec import fused
from kvtier.codec.arithmetic import NumpyArithmetic, choose_arithmetic
from kvtier.codec.block_quant import BlockQuantCodec
from kvtier.codec.form import RowForm
from kvtier.codec.registry import CodecChoice, build_codec
from kvtier.errors import ConfigError, NotEncodableError
from tests.unit.codec_rows import SMALL, calibration_of, numbers_in, row_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None or importlib.util.find_spec("torch") is None,
    reason="needs numba and torch (kvtier[codec])",
)

FORMS = [
    SMALL,
    RowForm(layers=2, heads=3, tokens=64, head_dim=64, axes="lhtkd"),
    RowForm(layers=2, heads=1, tokens=128, head_dim=128, axes="lthkd", dtype="float16"),
    RowForm(layers=1, heads=2, tokens=40, head_dim=24, dtype="float32"),
    RowForm(layers=2, heads=2, tokens=64, head_dim=32, axes="lbhktd", blocks=2, packing="channels"),
]
NAMES = ["d6", "d4", "d3", "m6", "m4", "m3", "kivi4", "kivi2"]


def codecs(name: str, form: RowForm) -> tuple[BlockQuantCodec, BlockQuantCodec]:
    """The codec on compiled passes, and on plain numpy."""
    made = []
    for arithmetic in ("numba", "numpy"):
        codec = build_codec(CodecChoice(name=name, arithmetic=arithmetic), form, calibration_of(form, gates={}))
        assert isinstance(codec, BlockQuantCodec)
        made.append(codec)
    return made[0], made[1]


def plain_row(form: RowForm, seed: int) -> memoryview:
    if form.packing or form.blocks > 1:
        return memoryview((np.random.default_rng(seed).normal(size=form.elements).astype(np.float32)).view(np.uint32)
                          .__rshift__(16).astype(np.uint16).view(np.uint8))  # fmt: skip
    return row_of(form, seed)


def decoded(codec: BlockQuantCodec, encoded: memoryview, first_token: int | None = None) -> np.ndarray:
    row = memoryview(bytearray(codec.form.row_bytes))
    codec.decode(encoded, row, first_token)
    form = codec.form
    return np.stack([NumpyArithmetic().load(view, form.dtype) for view in form.views(row)])


@pytest.mark.parametrize("first_token", [0, 640, None])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_compiled_rows_are_those_of_the_reference(form: RowForm, name: str, first_token: int | None) -> None:
    compiled, reference = codecs(name, form)
    assert compiled.parameters == reference.parameters
    row = plain_row(form, 3)
    ours, theirs = (memoryview(bytearray(codec.encoded_bytes)) for codec in (compiled, reference))
    assert compiled.encode(row, ours, first_token) == reference.encode(row, theirs, first_token)
    # Each decodes what the other wrote. Rounding may put a value on the other side of half a step, rarely.
    a, b = decoded(reference, ours), decoded(reference, theirs)
    scale = float(np.abs(b).max())
    assert float(np.mean(np.abs(a - b) > 1e-2 * scale)) < 2e-3
    tolerance = scale * (5e-6 if form.dtype == "float32" else 2.0**-7)  # one unit in the last place of the row's type
    assert np.abs(decoded(compiled, theirs) - b).max() <= tolerance
    if first_token is not None and name[0] in "dm":
        moved = [decoded(codec, theirs, first_token + 320) for codec in (compiled, reference)]
        assert np.abs(moved[0] - moved[1]).max() <= tolerance


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 63])
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_not_finite_is_refused(value: float, place: int, part: int) -> None:
    compiled, _ = codecs("d4", SMALL)
    row = bytearray(row_of(SMALL))
    word = np.float32(value).view(np.uint32) >> 16
    SMALL.numbers(row)[1, part, 1, place, 7] = word
    with pytest.raises(NotEncodableError):
        compiled.encode(memoryview(row), memoryview(bytearray(compiled.encoded_bytes)), 64)


def test_adversarial_rows_come_back_within_a_step() -> None:
    compiled, reference = codecs("d4", SMALL)
    rows = {
        "zeros": np.zeros(SMALL.elements, np.float32),
        "one value": np.full(SMALL.elements, -3.25, np.float32),
        "huge and tiny": np.where(np.arange(SMALL.elements) % 97, 1e-30, 3e4).astype(np.float32),
        "subnormal": np.full(SMALL.elements, 1e-40, np.float32),
    }
    for what, values in rows.items():
        row = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).data
        found = []
        for codec in (compiled, reference):
            target = memoryview(bytearray(codec.encoded_bytes))
            codec.encode(row, target, 64)
            back = memoryview(bytearray(SMALL.row_bytes))
            codec.decode(target, back)
            found.append(numbers_in(SMALL, back))
        peak = max(1e-6, float(np.abs(values).max()))
        assert np.abs(found[0] - found[1]).max() <= peak / 15, what


def test_threads_share_the_passes_and_let_each_other_run() -> None:
    compiled, _ = codecs("d4", FORMS[1])
    row = row_of(FORMS[1])
    want = memoryview(bytearray(compiled.encoded_bytes))
    compiled.encode(row, want, 64)
    wrong: list[int] = []

    def work(i: int) -> None:
        target = memoryview(bytearray(compiled.encoded_bytes))
        for _ in range(20):
            compiled.encode(row, target, 64)
            if target != want:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_numba_the_name_is_refused_and_auto_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.fused_passes.cache_clear()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else real(name))
    try:
        assert choose_arithmetic("auto", in_blocks=True).name == "torch"
        with pytest.raises(ConfigError, match="numba needs the package numba"):
            choose_arithmetic("numba", in_blocks=True)
    finally:
        fused.fused_passes.cache_clear()
    assert Path(fused.__file__).exists()
