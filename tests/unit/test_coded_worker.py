"""The worker of an encoded memory tier, without a GPU: the logic on CPU tensors, where torch does the kernels' work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels' package needs triton")
pytest.importorskip("vllm", reason="needs vLLM")

from vllm.v1.kv_offload.base import (  # noqa: E402
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvtier.codec.form import RowForm  # noqa: E402
from kvtier.codec.header import HEADER_BYTES  # noqa: E402
from kvtier.codec.registry import CodecChoice, build_codec  # noqa: E402
from kvtier.errors import ConfigError, EngineMismatchError  # noqa: E402
from kvtier_vllm.coded_worker import CodedWorker, courier_of  # noqa: E402

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 3, 2, 16, 32, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Rows:
    """What the worker needs of vLLM's shared region."""

    mmap_path, _creator = "/nonexistent", False

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def create_next_worker_view(self, size: int) -> Any:
        self.memory = torch.zeros(self._rows, size + 48, dtype=torch.int8)  # other ranks' shares lie beside it
        return self.memory[:, 16 : 16 + size]

    def cleanup(self) -> None:
        self.memory = None


def caches(axes: str, device: str) -> CanonicalKVCaches:
    generator = torch.Generator().manual_seed(1)
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM) if axes == "lhtkd" else (BLOCKS, TOKENS, HEADS, 2 * DIM)
    tensors = []
    for _ in range(LAYERS):
        numbers = torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)
        page = numbers.view(BLOCKS, -1).view(torch.int8)
        tensors.append(CanonicalKVCacheTensor(page, page.shape[1]))
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(i, tensors[0].page_size_bytes) for i in range(LAYERS)]])


def form_of(axes: str, blocks: int = 1) -> RowForm:
    letters = axes if blocks == 1 else axes.replace("l", "lb", 1)
    return RowForm(layers=LAYERS, heads=HEADS, tokens=TOKENS * blocks, head_dim=DIM, axes=letters, blocks=blocks)


def settle(worker: CodedWorker, job: int) -> None:
    worker.wait({job})
    assert [result.job_id for result in worker.get_finished()] == [job]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axes", ["lhtkd", "lthkd"])
def test_blocks_are_stored_as_the_codec_writes_them_and_come_back(axes: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kv, region = caches(axes, device), Rows(5)
    form = form_of(axes)
    worker = CodedWorker(courier_of(kv, form), region, 1)  # type: ignore[arg-type]
    pages = [cache.tensor for cache in kv.tensors]
    before = [page.clone() for page in pages]
    assert worker.submit_store(7, GPULoadStoreSpec([3, 11, 0], [3], [4]), BlockIDsLoadStoreSpec([2, 4, 0]))
    settle(worker, 7)
    codec = build_codec(CodecChoice(name="int8"), form)
    for block, row in ((3, 2), (11, 4), (0, 0)):
        raw = torch.cat([page[block].cpu() for page in pages]).numpy().view(np.uint8)
        target = memoryview(bytearray(codec.encoded_bytes))
        codec.encode(raw.data, target)
        got = region.memory[row, 16:-32].numpy().view(np.uint8)
        assert bytes(got) == bytes(target[HEADER_BYTES:])
    assert not region.memory[:, :16].any()
    assert not region.memory[:, -32:].any()
    for page in pages:
        page.zero_()
    assert worker.submit_load(8, BlockIDsLoadStoreSpec([4, 2]), GPULoadStoreSpec([5, 6], [2], [0]))
    settle(worker, 8)
    for page, old in zip(pages, before, strict=True):
        for to, source in ((5, 11), (6, 3)):
            mine, theirs = (x.view(torch.bfloat16).float() for x in (page[to], old[source]))
            assert (mine - theirs).abs().max() <= theirs.abs().max() / 120
        assert not page[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]].any()
    worker.shutdown()


def test_a_load_may_begin_in_the_middle_of_a_chunk() -> None:
    kv, region = caches("lhtkd", "cpu"), Rows(3)
    worker = CodedWorker(courier_of(kv, form_of("lhtkd", 4)), region, 4)  # type: ignore[arg-type]
    pages = [cache.tensor for cache in kv.tensors]
    before = [page.clone() for page in pages]
    worker.submit_store(1, GPULoadStoreSpec(list(range(8)), [8], [0]), BlockIDsLoadStoreSpec([2, 1]))
    for page in pages:
        page.zero_()
    worker.submit_load(2, BlockIDsLoadStoreSpec([2, 1]), GPULoadStoreSpec([9, 10, 11], [3], [2]))  # blocks 2, 3, 4
    assert {result.job_id for result in worker.get_finished()} == {1, 2}
    for page, old in zip(pages, before, strict=True):
        mine, theirs = (x.view(torch.bfloat16).float() for x in (page[9:], old[2:5]))
        assert (mine - theirs).abs().max() <= theirs.abs().max() / 120


def test_what_it_cannot_address_is_refused() -> None:
    kv = caches("lhtkd", "cpu")
    with pytest.raises(ConfigError, match="one cache a layer"):
        courier_of(kv, RowForm(layers=LAYERS + 1, heads=HEADS, tokens=TOKENS, head_dim=DIM, axes="lhtkd"))
    with pytest.raises(ConfigError, match="one cache a layer"):
        courier_of(
            kv, RowForm(layers=LAYERS, heads=HEADS, tokens=TOKENS, head_dim=DIM, axes="lhktd", packing="channels")
        )
    worker = CodedWorker(courier_of(kv, form_of("lhtkd")), Rows(3), 1)  # type: ignore[arg-type]
    with pytest.raises(EngineMismatchError, match="outside"):
        worker.submit_store(1, GPULoadStoreSpec([BLOCKS], [1], [0]), BlockIDsLoadStoreSpec([0]))
