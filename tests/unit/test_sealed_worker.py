"""The worker that seals, around a worker whose copies end when the test says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier.cache.seals import Seals
from kvtier_vllm.sealed_worker import SealedWorker, shared_seals

ROWS, ROW_BYTES = 32, 4096
DEVICE = GPULoadStoreSpec([0], group_sizes=[1], block_indices=[0])


class ScriptedWorker(OffloadingWorker):
    """Ends a job when it is told to."""

    def __init__(self) -> None:
        self.ended: list[TransferResult] = []
        self.waited: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        self.waited |= job_ids

    def end(self, job_id: int) -> None:
        self.ended.append(TransferResult(job_id, True))


def make() -> tuple[ScriptedWorker, SealedWorker, Seals, np.ndarray]:
    memory = np.random.default_rng(1).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    inner, seals = ScriptedWorker(), Seals.own(ROWS, ROW_BYTES)
    return inner, SealedWorker(inner, seals, 0, memory), seals, memory


def finished(worker: SealedWorker) -> list[int]:
    for _ in range(1000):
        if results := worker.get_finished():
            return [result.job_id for result in results]
        worker.wait(set(worker._jobs))
    return []


def rows(*numbers: int) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(list(numbers))


def test_a_store_is_reported_when_it_is_copied_and_sealed() -> None:
    inner, worker, seals, memory = make()
    worker.submit_store(1, DEVICE, rows(3, 4))
    assert worker.get_finished() == [], "it is being copied"
    memory[3] = 7  # the copy
    inner.end(1)
    assert finished(worker) == [1]
    slots = np.array([3, 4], np.int32)
    assert seals.intact(slots, [memory[3].data, memory[4].data]) == [True, True]
    memory[4, 100] ^= 1
    assert seals.intact(slots, [memory[3].data, memory[4].data]) == [True, False]
    worker.shutdown()


def test_a_load_of_a_damaged_row_is_reported_finished_and_failed() -> None:
    inner, worker, seals, memory = make()
    slots = np.arange(ROWS, dtype=np.int32)
    seals.set(slots, [row.data for row in memory])
    memory[20, 9] ^= 4
    worker.submit_load(1, rows(*range(16)), DEVICE)
    worker.submit_load(2, rows(*range(16, 32)), DEVICE)
    inner.end(2)
    assert finished(worker) == [2]
    assert worker.take_failed() == {2}
    assert worker.take_failed() == set()
    assert np.flatnonzero(seals.damaged(slots)).tolist() == [20]
    inner.end(1)
    assert finished(worker) == [1]
    assert worker.take_failed() == set()
    worker.shutdown()


def test_nothing_is_sealed_after_a_store_was_waited_for() -> None:
    """vLLM waits for a job before it gives the rows to another: what is sealed later would be the other's."""
    inner, worker, seals, memory = make()
    worker.submit_store(1, DEVICE, rows(5))
    worker.wait({1})
    assert inner.waited == {1}
    slots = np.array([5], np.int32)
    seals.broken(slots)
    memory[5] = 1
    inner.end(1)
    assert finished(worker) == [1]
    assert seals.intact(slots, [memory[5].data]) == [True], "sealed now, with what is there"
    worker.shutdown()


def test_processes_share_seals(tmp_path: Path) -> None:
    one, other = (shared_seals(str(tmp_path / "seals"), 8, 2) for _ in range(2))
    Seals(one, 64).set_part(3, 1, memoryview(b"x" * 64))
    assert other[3, 1] != 0
    assert not Seals(other, 64).intact_part(3, 1, memoryview(b"y" * 64))
    assert Seals(one, 64).damaged(np.array([3], np.int32)).all()
