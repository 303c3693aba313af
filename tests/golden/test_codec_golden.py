"""The format on the medium: sizes, parameters and bytes that must never change without a new version."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvtier.codec.arithmetic import PLANES, pack
from kvtier.codec.header import HEADER_BYTES, VERSION, read_header
from kvtier.codec.registry import CodecChoice, build_codec
from tests.unit.codec_rows import SMALL, calibration_of

# Everything below is made of small integers, so that no library's rounding or random stream is part of it.
RAMP = ((np.arange(SMALL.elements, dtype=np.int64) * 37) % 251 - 125).astype(np.float32) / 16
SENSITIVITY = (np.arange(SMALL.units, dtype="<f4") % 5 + 1).tobytes()
MEANS = (np.arange(SMALL.layers * SMALL.heads * SMALL.head_dim) % 7).astype("<f2").tobytes()

# name -> (encoded bytes, digest of all a decoder must agree on)
PARAMETERS = {
    "raw": (49_248, "adc209b1346bba46689474799782cf38"),
    "zstd": (49_248, "7943185387ce636cc7091373d6a1675c"),
    "int8": (26_208, "4b257c2d422a029d0ea71df7e7c2c772"),
    "fp8": (26_208, "54b8b5039280630770b64d9726266172"),
    "d6": (20_832, "af8f47bd9dbfe69fcf768b4d50bce910"),
    "d4": (14_688, "6942ebe36be4f2de673caa787cdf8879"),
    "d3": (11_616, "00d73827e642d677f2f534a87e0b3307"),
    "m4": (15_456, "54c45009f56168674b23c19b2e24284d"),
    "kivi4": (14_688, "c2877e7629ff50cf23a15b33cca81206"),
}
# name -> digest of the whole encoded row, for codecs whose arithmetic is exact
ROWS = {
    "raw": "07e5d8ece62ea98431bb585685ec836a10def87e4298a412e1efe64d1efd592a",
    "int8": "311851fa42a68a94e027e44f97e6cdb1f8eed1fe6dd93fd0f5a251bb3d8b0a15",
}


def golden_row() -> memoryview:
    """The ramp as bfloat16."""
    row = np.empty(SMALL.row_bytes, np.uint8)
    SMALL.numbers(row)[...] = (RAMP.view(np.uint32) >> np.uint32(16)).reshape(SMALL.numbers(row).shape)
    return row.data


def encode(name: str) -> tuple[int, memoryview]:
    """Bytes the codec asks for, and the encoded ramp as the first block of a prompt."""
    calibration = calibration_of(
        SMALL, gates={}, sensitivity={"loo": SENSITIVITY}, key_means=MEANS, inverse_frequencies=(1.0, 0.5, 0.25, 0.125)
    )
    codec = build_codec(CodecChoice(name=name, arithmetic="numpy"), SMALL, calibration)
    target = memoryview(bytearray(codec.encoded_bytes))
    size = codec.encode(golden_row(), target, 0)
    return codec.encoded_bytes, target[:size]


def test_the_format_version_is_one() -> None:
    assert (VERSION, HEADER_BYTES) == (1, 96)


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_and_parameters_do_not_change(name: str) -> None:
    n_bytes, encoded = encode(name)
    assert (n_bytes, read_header(encoded).parameters.hex()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_exact_codecs_do_not_change(name: str) -> None:
    assert hashlib.sha256(encode(name)[1]).hexdigest() == ROWS[name]


def test_planes_pack_token_t_with_token_t_plus_half() -> None:
    codes = np.arange(16, dtype=np.uint8).reshape(1, 8, 2)
    assert PLANES[4] == (4, 0)
    base = np.empty(8, np.uint8)
    pack(codes, 4, base, base[:0])
    assert base.tolist() == [low | high << 4 for low, high in zip(range(8), range(8, 16), strict=True)]
