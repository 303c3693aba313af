"""What each codec promises about one row: sizes, errors, positions, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier.codec.arithmetic import NumpyArithmetic, choose_arithmetic
from kvtier.codec.bits_map import CHOICES, allocate_bits, uniform_bits
from kvtier.codec.block_quant import BlockQuantCodec
from kvtier.codec.calibration import Calibration, Gate, load_calibration
from kvtier.codec.form import RowForm
from kvtier.codec.header import HEADER_BYTES, read_header
from kvtier.codec.protocol import RowCodec
from kvtier.codec.registry import NAMES, CodecChoice, build_codec
from kvtier.errors import ConfigError, ForeignBlockError, NotEncodableError
from tests.unit.codec_rows import SMALL, calibration_of, numbers_in, relative_error, row_of, values_of

# Relative error a codec may make on made-up rows (values far rougher than real KV), and bits an element.
LOSSY = {
    "int8": (0.02, 8.6),
    "fp8": (0.04, 8.6),
    "d6": (0.05, 7.0),
    "d4": (0.16, 5.0),
    "d3": (0.30, 4.0),
    "m6": (0.05, 7.4),
    "m4": (0.16, 5.4),
    "m3": (0.30, 4.4),
    "kivi4": (0.10, 5.3),
    "kivi2": (0.50, 3.3),
    "cachegen": (0.12, 6.5),
}


def make(name: str, form: RowForm = SMALL, **changes: object) -> RowCodec:
    """The codec by name, without the quality gate of the made-up calibration."""
    return build_codec(CodecChoice(name=name, **changes), form, calibration_of(form, gates={}))  # type: ignore[arg-type]


def round_trip(codec: RowCodec, row: memoryview, first_token: int | None = 64) -> memoryview:
    """The row encoded and decoded again; what lies behind it in the buffers is noise."""
    target = memoryview(bytearray(b"\xee" * (codec.encoded_bytes + 100)))
    size = codec.encode(row, target, first_token)
    assert size <= codec.encoded_bytes
    out = memoryview(bytearray(b"\xdd" * codec.form.row_bytes))
    codec.decode(target, out)
    return out


def test_every_registered_codec_is_covered_here() -> None:
    assert {*LOSSY, "raw", "zstd"} == set(NAMES)


@pytest.mark.parametrize("name", ["raw", "zstd"])
@pytest.mark.parametrize(
    "form",
    [
        SMALL,
        RowForm(kind="opaque", opaque_bytes=12_345),
        RowForm(kind="mla", layers=2, heads=1, tokens=16, head_dim=576),
    ],
    ids=["kv", "opaque", "mla"],
)
def test_lossless_codecs_return_every_bit(name: str, form: RowForm) -> None:
    codec = build_codec(CodecChoice(name=name), form)
    assert codec.lossless
    for row in (row_of(form), memoryview(bytes(form.row_bytes)), memoryview(np.full(form.row_bytes, 0xFF, np.uint8))):
        assert round_trip(codec, row) == row


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("arithmetic", ["numpy", "torch"])
def test_lossy_codecs_stay_within_their_error_and_size(name: str, arithmetic: str) -> None:
    codec = make(name, arithmetic=arithmetic, sensitivity="uniform")
    error, bits = LOSSY[name]
    row = row_of(SMALL)
    assert not codec.lossless
    assert relative_error(numbers_in(SMALL, round_trip(codec, row)), values_of(SMALL)) < error
    assert codec.encoded_bytes * 8 / SMALL.elements < bits


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("axes", ["lkhtd", "lthkd", "thlkd"])
def test_the_order_of_axes_changes_where_numbers_lie_and_nothing_else(name: str, axes: str) -> None:
    other = RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes=axes)
    first = numbers_in(SMALL, round_trip(make(name), row_of(SMALL)))
    second = numbers_in(other, round_trip(make(name, other), row_of(other)))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["int8", "d4", "m4", "kivi4", "cachegen"])
@pytest.mark.parametrize("arithmetic", ["numpy", "torch"])
def test_other_element_types(name: str, dtype: str, arithmetic: str) -> None:
    form = RowForm(layers=3, heads=2, tokens=64, head_dim=32, dtype=dtype)
    codec = make(name, form, arithmetic=arithmetic, sensitivity="uniform")
    assert relative_error(numbers_in(form, round_trip(codec, row_of(form))), values_of(form)) < LOSSY[name][0]


@pytest.mark.parametrize("name", [n for n in LOSSY if n not in ("cachegen", "fp8")])
def test_numpy_and_torch_agree(name: str) -> None:
    row = row_of(SMALL, seed=3)
    by_numpy = numbers_in(SMALL, round_trip(make(name, arithmetic="numpy"), row, 0))
    by_torch = numbers_in(SMALL, round_trip(make(name, arithmetic="torch"), row, 0))
    differs = np.abs(by_numpy - by_torch) > 1e-2 * np.abs(by_numpy).max()
    assert differs.mean() < 2e-3  # a value on the boundary of two codes may fall on either side


def test_numpy_reads_what_torch_wrote() -> None:
    row = row_of(SMALL, seed=4)
    target = memoryview(bytearray(make("d4").encoded_bytes))
    make("d4", arithmetic="torch").encode(row, target, 0)
    rows = [memoryview(bytearray(SMALL.row_bytes)) for _ in range(2)]
    for arithmetic, out in zip(("numpy", "torch"), rows, strict=True):
        make("d4", arithmetic=arithmetic).decode(target, out)
    one, two = (numbers_in(SMALL, out) for out in rows)
    assert np.allclose(one, two, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["d6", "d4"])
def test_sinks_are_kept_apart_and_do_not_widen_any_range(name: str) -> None:
    values = values_of(SMALL)
    values[:, :, :, :4] *= 40  # sinks are that much larger in real models
    row = np.empty(SMALL.row_bytes, np.uint8)
    NumpyArithmetic().store(values, SMALL.numbers(row), SMALL.dtype)
    codec = make(name)
    as_first = numbers_in(SMALL, round_trip(codec, row.data, 0))
    as_later = numbers_in(SMALL, round_trip(codec, row.data, 64))
    assert relative_error(as_first[:, :, :, :4], values[:, :, :, :4]) < 0.02
    rest = values[:, :, :, 4:]
    assert relative_error(as_first[:, :, :, 4:], rest) < 0.5 * relative_error(as_later[:, :, :, 4:], rest)


@pytest.mark.parametrize("name", ["d4", "d3", "m4"])
def test_first_and_later_blocks_take_the_same_bytes(name: str) -> None:
    form = RowForm(layers=4, heads=4, tokens=64, head_dim=64)
    codec = make(name, form)
    target = memoryview(bytearray(codec.encoded_bytes))
    later, first = codec.encode(row_of(form), target, 64), codec.encode(row_of(form), target, 0)
    assert first <= later == codec.encoded_bytes
    assert first > 0.99 * later


def test_a_block_moves_to_another_position() -> None:
    """decode(first_token=p) gives keys rotated for p: within float32 of rotating the numbers themselves."""
    codec = make("d6")
    frequencies = np.array(calibration_of(SMALL).inverse_frequencies)
    target = memoryview(bytearray(codec.encoded_bytes))
    codec.encode(row_of(SMALL), target, 128)
    here, there = (memoryview(bytearray(SMALL.row_bytes)) for _ in range(2))
    codec.decode(target, here)
    codec.decode(target, there, 192)
    moved, still = numbers_in(SMALL, there), numbers_in(SMALL, here)
    angle = 64 * frequencies
    cosine, sine = np.cos(angle), np.sin(angle)
    first, second = still[:, 0, :, :, :16], still[:, 0, :, :, 16:]
    want = np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    assert relative_error(moved[:, 0], want) < 0.01  # both were rounded to bfloat16
    assert np.array_equal(moved[:, 1], still[:, 1])


@pytest.mark.parametrize("name", ["int8", "cachegen", "raw"])
def test_codecs_that_cannot_move_a_block_say_so(name: str) -> None:
    codec = make(name)
    target = memoryview(bytearray(codec.encoded_bytes))
    codec.encode(row_of(SMALL), target, 128)
    with pytest.raises(ConfigError, match="cannot move"):
        codec.decode(target, memoryview(bytearray(SMALL.row_bytes)), 192)


def test_m_subtracts_the_mean_only_where_it_knows_the_position() -> None:
    form, mean = SMALL, 30.0
    calibration = calibration_of(
        form, key_means=np.full(form.layers * form.heads * form.head_dim, mean, "<f2").tobytes()
    )
    codec = build_codec(CodecChoice(name="m3", max_kl=None), form, msgspec_replace_gates(calibration))
    arithmetic = NumpyArithmetic()
    from kvtier.codec.rope import rope_tables

    plain = np.random.default_rng(0).normal(size=(form.layers * form.heads, form.tokens, form.head_dim)) + mean
    keys = arithmetic.rotate(
        plain.astype(np.float32), *rope_tables(calibration.inverse_frequencies, 256, 64), inverse=False
    )
    values = values_of(form)
    values[:, 0] = keys.reshape(values[:, 0].shape)
    row = np.empty(form.row_bytes, np.uint8)
    arithmetic.store(values, form.numbers(row), form.dtype)
    known = relative_error(numbers_in(form, round_trip(codec, row.data, 256))[:, 0], values[:, 0])
    unknown = relative_error(numbers_in(form, round_trip(codec, row.data, None))[:, 0], values[:, 0])
    assert known < 0.02
    assert unknown > 2 * known


def msgspec_replace_gates(calibration: Calibration) -> Calibration:
    import msgspec

    return msgspec.structs.replace(calibration, gates={})


@pytest.mark.parametrize("name", ["d6", "d4", "m4"])
def test_the_progressive_form_decodes_from_a_prefix_of_the_bytes(name: str) -> None:
    codec = make(name)
    assert isinstance(codec, BlockQuantCodec)
    assert codec.base_bytes < codec.encoded_bytes
    target = memoryview(bytearray(codec.encoded_bytes))
    row = row_of(SMALL)
    codec.encode(row, target, 64)
    coarse, whole = (memoryview(bytearray(SMALL.row_bytes)) for _ in range(2))
    codec.decode_base(target[: codec.base_bytes], coarse)
    codec.decode(target, whole)
    want = values_of(SMALL)
    rough, fine = (relative_error(numbers_in(SMALL, out), want) for out in (coarse, whole))
    assert fine < rough < 0.6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("name", [n for n in LOSSY])
def test_what_is_not_finite_is_refused_by_lossy_codecs(name: str, bad: float) -> None:
    values = values_of(SMALL)
    values[1, 1, 1, 13, 7] = bad
    row = np.empty(SMALL.row_bytes, np.uint8)
    NumpyArithmetic().store(values, SMALL.numbers(row), SMALL.dtype)
    codec = make(name)
    with pytest.raises(NotEncodableError):
        codec.encode(row.data, memoryview(bytearray(codec.encoded_bytes)), 0)


@pytest.mark.parametrize("name", ["d4", "m4", "cachegen"])
def test_another_model_or_map_is_foreign(name: str) -> None:
    ours = make(name)
    target = memoryview(bytearray(ours.encoded_bytes))
    ours.encode(row_of(SMALL), target, 0)
    out = memoryview(bytearray(SMALL.row_bytes))
    changed = {"tables": calibration_of(SMALL, 1).tables[:-2] + b"\1\0"} if name == "cachegen" else {}
    another = calibration_of(SMALL, 1, gates={}, **changed)
    others = [build_codec(CodecChoice(name=name), SMALL, another)]
    if name != "cachegen":
        others += [make(name, sensitivity=source) for source in ("local", "uniform")]
    for other in (*others, make("int8"), make("raw")):
        with pytest.raises(ForeignBlockError):
            other.decode(target, out)


def test_presets_that_cost_too_much_are_refused_with_the_number() -> None:
    calibration = calibration_of(SMALL, gates={"d3": Gate(0.05, 3.5), "d4": Gate(0.001, 4.5)})
    with pytest.raises(ConfigError, match=r"0\.05 nats.*budget is 0\.02.*d4 or int8"):
        build_codec(CodecChoice(name="d3"), SMALL, calibration)
    build_codec(CodecChoice(name="d3", max_kl=0.1), SMALL, calibration)
    with pytest.raises(ConfigError, match=r"budget is 0\.0005"):
        build_codec(CodecChoice(name="d4", max_kl=5e-4), SMALL, calibration)


@pytest.mark.parametrize(
    ("choice", "form", "message"),
    [
        (CodecChoice(name="gzip"), SMALL, "not one of"),
        (CodecChoice(name="d4"), RowForm(kind="opaque", opaque_bytes=64), "keys and values"),
        (CodecChoice(name="int8"), RowForm(kind="opaque", opaque_bytes=64), "keys and values"),
        (CodecChoice(name="d4"), RowForm(layers=3, heads=2, tokens=12, head_dim=32), "multiple of 8"),
        (CodecChoice(name="d4"), RowForm(layers=4, heads=2, tokens=64, head_dim=32), "the calibration has"),
        (CodecChoice(name="d4", sensitivity="attention"), SMALL, "no sensitivity"),
        (CodecChoice(name="d4", arithmetic="cuda"), SMALL, "not one of"),
    ],
)
def test_refusals(choice: CodecChoice, form: RowForm, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_codec(choice, form, calibration_of(SMALL, gates={}))
    if choice.name == "d4":
        with pytest.raises(ConfigError, match=r"calibration|keys and values|not one of"):
            build_codec(choice, form, None)


def test_latents_have_scales_by_group_of_channels() -> None:
    form = RowForm(kind="mla", layers=2, heads=1, tokens=16, head_dim=576)
    codec = build_codec(CodecChoice(name="int8"), form)
    row = row_of(form)
    assert relative_error(numbers_in(form, round_trip(codec, row)), values_of(form)) < 0.02


def test_bits_follow_sensitivity_and_budget() -> None:
    sensitivity = np.array([[[8.0, 1.0], [0.01, 1.0]]])
    bits = allocate_bits(sensitivity, 4.0)
    assert bits.mean() <= 4.0
    assert set(bits.ravel().tolist()) <= set(CHOICES)
    assert bits[0, 0, 0] > bits[0, 0, 1] >= bits[0, 1, 0]
    assert (allocate_bits(sensitivity, 8.0) == 8).all()
    assert (allocate_bits(np.ones((2, 2, 2)), 4.0) == uniform_bits((2, 2, 2), 4)).all()
    with pytest.raises(ConfigError, match="below the fewest"):
        allocate_bits(sensitivity, 1.5)


def test_calibrations_are_read_back_and_checked(tmp_path: Path) -> None:
    calibration = calibration_of(SMALL)
    path = tmp_path / "calibration.json"
    calibration.save(path)
    assert load_calibration(path, calibration.model) == calibration
    with pytest.raises(ConfigError, match="is of model"):
        load_calibration(path, "another")
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 9'))
    with pytest.raises(ConfigError, match="schema"):
        load_calibration(path)
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="missing required field"):
        load_calibration(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_calibration(tmp_path / "absent.json")


def test_headers_say_what_follows() -> None:
    codec = make("d4")
    target = memoryview(bytearray(codec.encoded_bytes))
    size = codec.encode(row_of(SMALL), target, 640)
    header = read_header(target)
    assert (header.codec, header.first_token, header.payload_bytes) == ("d4", 640, size - HEADER_BYTES)
    assert header.parameters == codec.parameters


def test_importing_the_codecs_imports_neither_torch_nor_numba() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kvtier.codec.registry, kvtier.tiers.codec_tier; "
        "sys.exit(bool({'torch', 'numba', 'llvmlite'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arithmetic_is_chosen_by_what_is_installed() -> None:
    assert choose_arithmetic("numpy").name == "numpy"
    assert choose_arithmetic("auto").name == "torch"
