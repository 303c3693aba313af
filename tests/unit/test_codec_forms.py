"""Rows as engines lay them out (several blocks, packed keys, ranks): every codec finds the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.codec.arithmetic import NumpyArithmetic
from kvtier.codec.form import RowForm
from kvtier.codec.header import HEADER_BYTES
from kvtier.codec.protocol import RowCodec
from kvtier.codec.registry import NAMES, CodecChoice, build_codec
from kvtier.codec.shares import SharesCodec, heads_of
from kvtier.errors import ConfigError, ForeignBlockError
from tests.unit.codec_rows import SMALL, calibration_of, values_of

FORMS = {
    "two blocks": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="lbhtkd", blocks=2),
    "two blocks outermost": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="blhtkd", blocks=2),
    "heads outermost": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="bhltkd", blocks=4),
    "channels": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="lhktd", packing="channels"),
    "channels, blocks": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="lbhktd", blocks=2, packing="channels"),
    "tiles": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="lhktd", packing="amx"),
    "tiles, blocks": RowForm(layers=3, heads=2, tokens=64, head_dim=32, axes="lbhktd", blocks=2, packing="amx"),
}
CODECS = [name for name in NAMES if name not in ("raw", "zstd")]


def filled(form: RowForm, values: np.ndarray) -> memoryview:
    """A row of `form` that holds `values` [layers, parts, heads, tokens, head_dim]."""
    row = np.full(form.row_bytes, 0xA5, np.uint8)
    for part, view in enumerate(form.views(row)):
        NumpyArithmetic().store(values[:, part].reshape(view.shape), view, form.dtype)
    return row.data


def found(form: RowForm, row: memoryview) -> np.ndarray:
    """What `filled` put there."""
    shape = (form.layers, form.heads, form.tokens, form.head_dim)
    return np.stack([NumpyArithmetic().load(view, form.dtype).reshape(shape) for view in form.views(row)], axis=1)


def encoded(codec: RowCodec, row: memoryview) -> memoryview:
    target = memoryview(bytearray(codec.encoded_bytes))
    return target[: codec.encode(row, target, 0)]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", FORMS)
def test_a_row_is_encoded_alike_however_it_lies_in_memory(name: str, kind: str) -> None:
    form, calibration = FORMS[kind], calibration_of(SMALL, gates={})
    values = values_of(SMALL)
    plain = build_codec(CodecChoice(name=name, arithmetic="numpy"), SMALL, calibration)
    other = build_codec(CodecChoice(name=name, arithmetic="numpy"), form, calibration)
    want, got = encoded(plain, filled(SMALL, values)), encoded(other, filled(form, values))
    assert got[HEADER_BYTES:] == want[HEADER_BYTES:]
    assert got[:HEADER_BYTES] != want[:HEADER_BYTES]
    rows = memoryview(bytearray(SMALL.row_bytes)), memoryview(bytearray(form.row_bytes))
    plain.decode(want, rows[0])
    other.decode(got, rows[1])
    assert np.array_equal(found(SMALL, rows[0]), found(form, rows[1]))
    with pytest.raises(ForeignBlockError):
        other.decode(want, rows[1])


def test_tiles_are_those_of_the_engine() -> None:
    ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM for CPUs")
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm._C", reason="needs vLLM for CPUs")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM has no attention for CPUs")
    for kernel, packing in (("vec", "channels"), ("vec16", "channels"), ("amx", "amx")):
        form = RowForm(layers=1, heads=2, tokens=32, head_dim=64, axes="lhktd", packing=packing)
        values = values_of(form)
        cache = torch.zeros(3, 2, 64, 64, dtype=torch.bfloat16)
        keys, rest = cache.chunk(2, dim=2)
        given = torch.from_numpy(values[0]).bfloat16().permute(0, 2, 1, 3).contiguous()  # [part, token, head, d]
        ops.cpu_attn_reshape_and_cache(given[0], given[1], keys, rest, torch.arange(32) + 32, kernel)
        row = cache[1].contiguous().view(torch.int16).numpy().view(np.uint8).ravel().data
        assert bytes(row) == bytes(filled(form, values)), kernel


def test_ranks_lie_side_by_side() -> None:
    half = RowForm(layers=3, heads=1, tokens=64, head_dim=32, axes="lhtkd")
    calibration = calibration_of(SMALL, gates={})
    values = values_of(SMALL)
    shares = [filled(half, values[:, :, head : head + 1]) for head in range(2)]
    for name in ("int8", "d4", "m4", "cachegen", "zstd"):
        codecs = [build_codec(CodecChoice(name=name), half, heads_of(calibration, head, 1)) for head in range(2)]
        codec = SharesCodec(codecs)
        assert codec.form.row_bytes == SMALL.row_bytes
        row = memoryview(bytearray(SMALL.row_bytes))
        codec.decode(encoded(codec, memoryview(bytes(shares[0]) + bytes(shares[1]))), row)
        for head, share in enumerate(codecs):
            alone = memoryview(bytearray(half.row_bytes))
            share.decode(encoded(share, shares[head]), alone)
            assert alone == row[head * half.row_bytes : (head + 1) * half.row_bytes]
    with pytest.raises(ConfigError, match="calibration of 2"):
        heads_of(calibration, 1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": "lhtkd", "blocks": 2}, "2 blocks"),
        ({"axes": "lbhtkd", "blocks": 3}, "3 blocks"),
        ({"axes": "lbhtkd"}, "order the letters"),
        ({"axes": "lhtkd", "packing": "channels"}, "must end in 'ktd'"),
        ({"axes": "lhktd", "packing": "amx", "tokens": 24}, "multiple of 16"),
    ],
)
def test_forms_that_contradict_themselves(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowForm(**({"layers": 2, "heads": 2, "tokens": 64, "head_dim": 32} | fields))
