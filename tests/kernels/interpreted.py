"""Every kernel against its torch reference, under TRITON_INTERPRET=1. Run through tests/unit/test_kernels.py."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kvtier.codec.calibration import Calibration
from kvtier.codec.form import RowForm
from kvtier.codec.registry import CodecChoice, build_codec
from kvtier.errors import EngineMismatchError
from kvtier_kernels import block_quant, checksum, int8, paged, rotate, select
from kvtier_kernels.pages import PagedKV, checked_blocks, paged_kv
from tests.kernels.interpreter import repair
from tests.unit.codec_rows import calibration_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run these through tests/unit/test_kernels.py"
repair()


def cache(
    kind: str = "hnd",
    *,
    layers: int = 2,
    blocks: int = 9,
    heads: int = 2,
    tokens: int = 16,
    dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> PagedKV:
    """A paged cache of seeded noise in one of the engines' layouts."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(layers):
        if kind == "hnd":
            layer = torch.randn(blocks, heads, tokens, 2 * dim, generator=generator)
        elif kind == "nhd":
            layer = torch.randn(blocks, tokens, heads, 2 * dim, generator=generator).transpose(1, 2)
        elif kind == "kv-apart":
            layer = torch.randn(blocks, 2, tokens, heads, dim, generator=generator)
        else:
            layer = torch.randn(blocks, tokens, dim, generator=generator)
        layer = layer * torch.rand(layer.shape[-1], generator=generator) * 4 + 0.3
        strided = torch.empty_strided(layer.shape, layer.stride(), dtype=dtype)
        made.append(strided.copy_(layer))
    names = {"hnd": "bhnc", "nhd": "bhnc", "kv-apart": "bknhd", "latent": "bnc"}
    return paged_kv(made, kind=names[kind])


def snapshot(kv: PagedKV) -> list[torch.Tensor]:
    return [layer.clone() for layer in kv.layers]


LAYOUTS = ["hnd", "nhd", "kv-apart", "latent"]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table", [[], [3], [8, 0, 5, 5]])
def test_gather_is_bit_exact(kind: str, dtype: torch.dtype, table: list[int]) -> None:
    kv = cache(kind, dtype=dtype, tokens=24 if kind != "latent" else 16, dim=48)
    rows = torch.full((len(table) * paged.row_elements(kv),), 7.0, dtype=dtype)
    paged.gather(kv, table, rows)
    assert torch.equal(rows, paged.gather_reference(kv, table).reshape(-1))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_scatter_is_bit_exact_and_touches_nothing_else(kind: str) -> None:
    kv, twin = cache(kind), cache(kind)
    table = [8, 0, 5]
    rows = torch.randn(len(table) * paged.row_elements(kv)).bfloat16()
    paged.scatter(kv, table, rows)
    paged.scatter_reference(twin, table, rows)
    for mine, other in zip(kv.layers, twin.layers, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_equals_its_reference_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    kv, twin = cache(kind, dtype=dtype), cache(kind, dtype=dtype)
    table = [4, 1, 7]
    want_codes, want_scales = int8.gather_int8_reference(kv, table)
    codes, scales = torch.empty_like(want_codes.contiguous()), torch.empty_like(want_scales.contiguous())
    int8.gather_int8(kv, table, codes, scales)
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes, want_codes)
    into = [2, 3, 0]
    int8.scatter_int8(kv, into, codes, scales)
    int8.scatter_int8_reference(twin, into, codes, scales)
    for mine, other in zip(kv.layers, twin.layers, strict=True):
        assert torch.equal(mine, other)


def test_int8_writes_the_payload_of_the_codec() -> None:
    kv = cache("hnd", tokens=16, dim=32)
    form = RowForm(layers=2, heads=2, tokens=16, head_dim=32, axes="lhtkd")
    codec = build_codec(CodecChoice(name="int8", arithmetic="torch"), form)
    codes = torch.empty(form.elements, dtype=torch.int8)
    scales = torch.empty(form.units * form.tokens, dtype=torch.float16)
    int8.gather_int8(kv, [6], codes, scales)
    row = paged.gather_reference(kv, [6]).reshape(-1).view(torch.int16).numpy().view(np.uint8)
    target = memoryview(bytearray(codec.encoded_bytes))
    codec.encode(memoryview(np.ascontiguousarray(row)), target, 64)
    assert bytes(target[96:]) == codes.numpy().tobytes() + scales.numpy().tobytes()


@pytest.mark.parametrize("kind", ["hnd", "nhd", "kv-apart"])
@pytest.mark.parametrize("deltas", [[0, 1, 5000], [-64, 64, 0]])
def test_turned_keys_are_within_one_rounding(kind: str, deltas: list[int]) -> None:
    kv, twin = cache(kind), cache(kind)
    frequencies = [float(1e4 ** (-2 * i / 32)) for i in range(16)]
    table = [0, 4, 8]
    before = snapshot(kv)
    rotate.turn_keys(kv, table, deltas, frequencies)
    rotate.turn_keys_reference(twin, table, deltas, frequencies)
    for layer, (mine, other) in enumerate(zip(kv.layers, twin.layers, strict=True)):
        assert torch.allclose(mine.float(), other.float(), rtol=2**-7, atol=1e-6)
        assert torch.equal(kv.unit(layer, 1), twin.unit(layer, 1))
        untouched = [b for b in range(kv.blocks) if b not in table]
        assert torch.equal(mine[untouched], before[layer][untouched])
    assert torch.equal(kv.unit(0, 0)[table[deltas.index(0)]], twin.unit(0, 0)[table[deltas.index(0)]])
    back = [-delta for delta in deltas]
    rotate.turn_keys(kv, table, back, frequencies)
    for layer in range(len(kv.layers)):
        moved, original = kv.unit(layer, 0).float(), before[layer]
        keys = original[..., :32] if kind != "kv-apart" else original[:, 0].transpose(1, 2)
        norm = keys.float().norm(dim=-1, keepdim=True)
        assert ((moved - keys.float()).abs() <= 2**-7 * norm).all()  # two roundings, relative to the key's length


def plan_for(name: str, kv: PagedKV, calibration: Calibration, form: RowForm) -> block_quant.DevicePlan:
    codec = build_codec(CodecChoice(name=name, arithmetic="numpy"), form, calibration)
    return block_quant.device_plan(codec, kv)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["d6", "d4", "d3", "m4"])
@pytest.mark.parametrize(("kind", "tokens", "dim"), [("hnd", 64, 32), ("nhd", 16, 64), ("kv-apart", 128, 32)])
def test_block_quantisation_writes_what_the_codec_reads(name: str, kind: str, tokens: int, dim: int) -> None:
    """Codes on the boundary of two steps may differ (fused multiply-adds, split tensor-core products): under 0.5 %."""
    kv, twin = (cache(kind, layers=2, heads=2, blocks=4, tokens=tokens, dim=dim) for _ in range(2))
    form = RowForm(layers=2, heads=2, tokens=tokens, head_dim=dim, axes="lhtkd")
    plan = plan_for(name, kv, calibration_of(form, gates={}), form)
    table, first = [3, 1], [tokens, 10 * tokens]
    payload = torch.zeros(len(table) * plan.payload_bytes, dtype=torch.uint8)
    block_quant.gather_encode(plan, kv, table, payload, first)
    wanted = block_quant.gather_encode_reference(plan, kv, table, first)
    for i, want in enumerate(wanted):
        got = payload[i * plan.payload_bytes : (i + 1) * plan.payload_bytes].numpy()
        assert (got != want).mean() < 0.01
    exact = torch.from_numpy(np.concatenate(wanted))
    into = [0, 2]
    block_quant.decode_scatter(plan, kv, into, exact, first)
    _decode_on_the_host(plan, twin, into, wanted, first)
    for mine, other in zip(kv.layers, twin.layers, strict=True):
        scale = other.float().abs().amax()
        assert torch.allclose(mine.float(), other.float(), rtol=2**-6, atol=float(scale) * 2**-8)


def _decode_on_the_host(plan, kv, blocks, payloads, first) -> None:  # type: ignore[no-untyped-def]
    from kvtier.codec.checksum import checksum64
    from kvtier.codec.header import Header

    form = plan.codec.form
    rows = []
    for payload, position in zip(payloads, first, strict=True):
        encoded = bytearray(plan.codec.encoded_bytes)
        encoded[96 : 96 + len(payload)] = payload.tobytes()
        header = Header(plan.codec.name, 0, plan.codec.parameters, b"\0" * 16, position, len(payload), 0, 0)
        header._replace(payload_checksum=checksum64(bytes(payload))).pack_into(memoryview(encoded))
        row = np.empty(form.row_bytes, np.uint8)
        plan.codec.decode(memoryview(encoded), row.data)
        rows.append(torch.from_numpy(row.view(np.int16)).view(torch.bfloat16))
    paged.scatter_reference(kv, blocks, torch.stack(rows))


def test_blocks_move_while_they_are_decoded() -> None:
    kv, twin = (cache("hnd", layers=1, heads=1, blocks=4, tokens=64, dim=32) for _ in range(2))
    form = RowForm(layers=1, heads=1, tokens=64, head_dim=32, axes="lhtkd")
    calibration = calibration_of(form, gates={})
    plan = plan_for("d6", kv, calibration, form)
    payload = torch.zeros(plan.payload_bytes, dtype=torch.uint8)
    block_quant.gather_encode(plan, kv, [1], payload, [64])
    block_quant.decode_scatter(plan, kv, [2], payload, [256])
    block_quant.decode_scatter(plan, twin, [2], payload, [64])
    rotate.turn_keys_reference(twin, [2], [192], calibration.inverse_frequencies)
    assert torch.allclose(kv.layers[0].float(), twin.layers[0].float(), rtol=2**-6, atol=0.05)


@pytest.mark.parametrize(("n", "n_bytes"), [(1, 16), (3, 4096 * 4), (2, 4096 * 4 + 48), (1, 100_000)])
def test_checksums_equal_and_notice_any_change(n: int, n_bytes: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, n_bytes), dtype=np.uint8))
    sums = checksum.row_checksums(rows)
    assert torch.equal(sums, checksum.row_checksums_reference(rows))
    swapped = rows.clone()
    swapped[:, :8], swapped[:, 8:16] = rows[:, 8:16], rows[:, :8]
    flipped = rows.clone()
    flipped[:, n_bytes // 2] ^= 4
    for other in (swapped, flipped):
        assert (checksum.row_checksums(other) != sums).all()


@pytest.mark.parametrize("kind", ["hnd", "nhd", "kv-apart"])
@pytest.mark.parametrize(("n_tokens", "rows"), [(1, 1), (70, 12), (128, 20)])
def test_window_scores(kind: str, n_tokens: int, rows: int) -> None:
    kv = cache(kind, blocks=10, tokens=16)
    table = [7, 2, 9, 0, 4, 1, 8, 3]
    queries = torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = select.window_scores(kv, 1, table, n_tokens, queries)
    want = select.window_scores_reference(kv, 1, table, n_tokens, queries)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    assert torch.allclose(got.sum(dim=1), torch.ones(2), atol=1e-4)


@pytest.mark.parametrize(("n", "rows", "width"), [(1, 1, 16), (65, 3, 16), (200, 20, 32)])
def test_speculative_scores(n: int, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(3, rows, width, generator=generator).bfloat16()
    keys = torch.randn(3, n, width, generator=generator).bfloat16()
    got, want = select.speculative_scores(queries, keys), select.speculative_scores_reference(queries, keys)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("k", [0, 1, 33])
def test_gathering_tokens_is_bit_exact(kind: str, k: int) -> None:
    kv = cache(kind, blocks=10)
    table = [7, 2, 9, 0]
    chosen = torch.randint(0, 64, (kv.heads, k), generator=torch.Generator().manual_seed(3))
    out = torch.empty(kv.heads * kv.parts * k * kv.head_dim, dtype=kv.dtype)
    select.gather_tokens(kv, 0, table, chosen, out)
    assert torch.equal(out, select.gather_tokens_reference(kv, 0, table, chosen).reshape(-1))


@pytest.mark.parametrize("table", [[-1], [9], [0, 1 << 40]])
def test_block_tables_outside_the_cache_are_refused(table: list[int]) -> None:
    kv = cache()
    rows = torch.empty(len(table) * paged.row_elements(kv), dtype=kv.dtype)
    with pytest.raises(EngineMismatchError, match="outside"):
        paged.gather(kv, table, rows)
    with pytest.raises(EngineMismatchError, match="outside"):
        rotate.turn_keys(kv, table, [0] * len(table), [1.0] * 16)
    with pytest.raises(EngineMismatchError, match="outside"):
        int8.scatter_int8(kv, table, rows.to(torch.int8), rows.half())


def test_writes_need_distinct_blocks_and_buffers_of_the_right_size() -> None:
    kv = cache()
    size = paged.row_elements(kv)
    with pytest.raises(EngineMismatchError, match="twice"):
        paged.scatter(kv, [1, 1], torch.zeros(2 * size, dtype=kv.dtype))
    with pytest.raises(EngineMismatchError, match="needed"):
        paged.gather(kv, [1, 1], torch.zeros(size, dtype=kv.dtype))
    with pytest.raises(EngineMismatchError, match="needed"):
        paged.gather(kv, [1], torch.zeros(2 * size, dtype=kv.dtype)[::2])
    with pytest.raises(EngineMismatchError, match="outside the prefix"):
        select.gather_tokens(kv, 0, [1], torch.full((2, 1), 16), torch.empty(2 * 2 * 32, dtype=kv.dtype))
    assert checked_blocks(kv, [0, 8]).tolist() == [0, 8]


def test_layouts_kernels_cannot_address_are_refused() -> None:
    with pytest.raises(EngineMismatchError, match="16 bytes"):
        paged_kv([torch.zeros(4, 2, 16, 20)[..., :12].bfloat16()])
    with pytest.raises(EngineMismatchError, match="differ"):
        paged_kv([torch.zeros(4, 2, 16, 32), torch.zeros(5, 2, 16, 32)])
    with pytest.raises(EngineMismatchError, match="not laid out"):
        paged_kv([torch.zeros(4, 16, 32)], kind="bhnc")
