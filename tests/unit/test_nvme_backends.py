"""Back ends of the nvme tier: io_uring for real, cuFile by an object of the same signatures, the choice, the budget."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.testing.rows import chain_rows, payload_of, read_back, store_rows
from kvtier.tiers.nvme import NvmeTier, batch
from kvtier.tiers.nvme.batch import Request, ThreadsIo, open_batch_io
from kvtier.tiers.nvme.gds import CuFileIo, gds_missing
from kvtier.tiers.nvme.io import DirectFile, Syscalls
from kvtier.tiers.nvme.uring import Ring, UringIo, uring_missing
from kvtier.tiers.nvme.wear import WriteBudget
from kvtier.tiers.protocol import RowStatus

MIB = 1 << 20
needs_uring = pytest.mark.skipif(bool(uring_missing()), reason=uring_missing() or "io_uring works")


def plain_file(path: Path, size: int = 4 * MIB) -> DirectFile:
    path.write_bytes(bytes(size))
    return DirectFile(str(path), Syscalls(), direct=False)


def random_requests(n: int, seed: int) -> list[Request]:
    """Disjoint requests of several buffers each, at odd offsets."""
    random = np.random.default_rng(seed)
    requests = []
    for i in range(n):
        sizes = random.integers(1, 9000, size=random.integers(1, 6))
        buffers = [memoryview(bytearray(random.bytes(int(size)))) for size in sizes]
        requests.append(Request(i * 65_536 + int(random.integers(0, 9000)), buffers))
    return requests


@needs_uring
@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
def test_a_ring_moves_what_preadv_moves(tmp_path: Path, n: int) -> None:
    file = plain_file(tmp_path / "file")
    ring = UringIo(file)
    requests = random_requests(n, n)
    assert ring.transfer(requests, write=True) == [None] * n
    for request in requests:
        expected = b"".join(request.buffers)
        assert os.pread(file.fd, len(expected), request.offset) == expected
    empty = [Request(r.offset, [memoryview(bytearray(len(b))) for b in r.buffers]) for r in requests]
    assert ring.transfer(empty, write=False) == [None] * n
    assert [b"".join(r.buffers) for r in empty] == [b"".join(r.buffers) for r in requests]
    ring.close()
    os.close(file.fd)


@needs_uring
def test_one_request_that_fails_fails_alone(tmp_path: Path) -> None:
    file = plain_file(tmp_path / "file", 100_000)
    requests = [Request(offset, [memoryview(bytearray(8192))]) for offset in (0, 95_000, 50_000, 1 << 30)]
    outcomes = UringIo(file).transfer(requests, write=False)
    assert [outcome is None for outcome in outcomes] == [True, False, True, False]
    assert outcomes[1] is not None
    assert outcomes[1].errno == errno.EIO  # the file ends inside: finished by preadv, which found nothing more
    io = UringIo(file)
    os.close(file.fd)
    (outcome,) = io.transfer(requests[:1], write=True)
    assert outcome is not None
    assert outcome.errno == errno.EBADF


@needs_uring
def test_a_ring_that_breaks_is_an_error_and_its_memory_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plain_file(tmp_path / "file")
    io = UringIo(file)

    def broken(*_: object) -> int:
        raise OSError(errno.ENXIO, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(Ring, "run", broken)
        outcomes = io.transfer(random_requests(3, 1), write=True)
    assert [getattr(outcome, "errno", 0) for outcome in outcomes] == [errno.ENXIO] * 3
    assert len(io._broken) == 1
    assert io.transfer(random_requests(3, 1), write=True) == [None] * 3
    os.close(file.fd)


@needs_uring
def test_threads_share_a_back_end(tmp_path: Path) -> None:
    tier = NvmeTier(str(tmp_path), b"\1" * 32, "layout", 70_000, 32 * MIB, backend="io_uring", max_io_bytes=1 << 18)
    assert tier.backend == "io_uring"
    wrong: list[object] = []

    def work(seed: int) -> None:
        rows = chain_rows(12, seed)
        for _ in range(4):
            statuses = tier.write(slots[seed], rows, [payload_of(row, 70_000) for row in rows])
            wrong.extend(status for status in statuses if status is not RowStatus.OK)
            wrong.extend(status for status in read_back(tier, slots[seed], rows) if status is not RowStatus.OK)
            break

    slots = [tier.reserve(12) for _ in range(6)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tier.check_integrity()
    tier.close()


class FakeCuFile:
    """Signatures of cuda.bindings.cufile, over an ordinary file; moves at most `most` bytes a call."""

    def __init__(self, fd: int, most: int = 3000) -> None:
        self.fd, self.most = fd, most
        self.open = 0
        self.handles: set[int] = set()
        self.fail = False

    def driver_open(self) -> None:
        self.open += 1

    def driver_close(self) -> None:
        self.open -= 1

    def handle_register(self, descr: int) -> int:
        if descr != 77:
            raise RuntimeError("not a descriptor")
        self.handles.add(5)
        return 5

    def handle_deregister(self, file: int) -> None:
        self.handles.remove(file)

    def read(self, file: int, buffer: int, size: int, file_offset: int, buffer_offset: int) -> int:
        if self.fail:
            raise RuntimeError("CUFILE error 5030")
        data = os.pread(self.fd, min(size, self.most), file_offset)
        ctypes.memmove(buffer + buffer_offset, data, len(data))
        return len(data)

    def write(self, file: int, buffer: int, size: int, file_offset: int, buffer_offset: int) -> int:
        assert file in self.handles
        return os.pwrite(self.fd, ctypes.string_at(buffer + buffer_offset, min(size, self.most)), file_offset)


def test_cufile_calls_are_completed_counted_and_closed(tmp_path: Path) -> None:
    file = plain_file(tmp_path / "file")
    library = FakeCuFile(file.fd)
    io = CuFileIo(file, library, descr=77)
    requests = random_requests(10, 3)
    assert io.transfer(requests, write=True) == [None] * 10
    empty = [Request(r.offset, [memoryview(bytearray(len(b))) for b in r.buffers]) for r in requests]
    assert io.transfer(empty, write=False) == [None] * 10
    assert [b"".join(r.buffers) for r in empty] == [b"".join(r.buffers) for r in requests]
    (beyond,) = io.transfer([Request(1 << 30, [memoryview(bytearray(10))])], write=False)
    assert beyond is not None
    library.fail = True
    (failed,) = io.transfer(empty[:1], write=False)
    assert failed is not None
    assert "CUFILE error 5030" in str(failed)
    io.close()
    assert (library.open, library.handles) == (0, set())
    with pytest.raises(OSError, match="refuses the file"):
        CuFileIo(file, library, descr=78)
    assert library.open == 0
    os.close(file.fd)


def test_cufile_is_never_opened_without_a_driver(tmp_path: Path) -> None:
    missing = gds_missing(str(tmp_path))
    assert missing
    if gds_missing():
        with pytest.raises(ConfigError, match="the nvme back end 'cufile' cannot be used: there is no NVIDIA"):
            NvmeTier(str(tmp_path), b"\1" * 32, "layout", 5000, 8 * MIB, backend="cufile")
        NvmeTier(str(tmp_path), b"\1" * 32, "layout", 5000, 8 * MIB).close()  # nothing is left locked


class TimedIo(ThreadsIo):
    """A back end that is as fast, and as sound, as a test wants."""

    name = "io_uring"

    def __init__(self, file: DirectFile, delay_s: float, error: OSError | None = None) -> None:
        super().__init__(file)
        self._delay, self._error = threading.Event(), error
        self._delay_s = delay_s

    def transfer(self, requests: Sequence[Request], *, write: bool) -> list[OSError | None]:
        self._delay.wait(self._delay_s)
        return [self._error] * len(requests)


@pytest.mark.parametrize(
    ("delay_s", "error", "chosen", "faults"),
    [
        (0.0, None, "io_uring", []),
        (0.2, None, "threads", []),
        (0.0, OSError(errno.EOPNOTSUPP, "no"), "threads", ["backend_io_error"]),
    ],
)
def test_auto_takes_what_works_and_is_no_slower_than_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    delay_s: float,
    error: OSError | None,
    chosen: str,
    faults: list[str],
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    file = DirectFile(str(path), Syscalls())
    if not file.direct:
        pytest.skip("this file system has no direct I/O")
    monkeypatch.setattr(batch, "uring_missing", lambda: "")
    monkeypatch.setattr(batch, "gds_missing", lambda: "no driver")
    monkeypatch.setattr(batch, "UringIo", lambda file: TimedIo(file, delay_s, error))
    counted: list[str] = []
    assert open_batch_io(file, "auto", 0, 4 * MIB, counted.append).name == chosen
    assert counted == faults
    monkeypatch.setattr(batch, "uring_missing", lambda: "the sandbox forbids it")
    assert open_batch_io(file, "auto", 0, 4 * MIB, counted.append).name == "threads"
    with pytest.raises(ConfigError, match="cannot be used: the sandbox forbids it"):
        open_batch_io(file, "io_uring", 0, 4 * MIB, counted.append)
    with pytest.raises(ConfigError, match="choose one of auto, threads"):
        open_batch_io(file, "spdk", 0, 4 * MIB, counted.append)
    os.close(file.fd)


def test_a_day_s_bytes_are_granted_by_the_hour_and_survive_a_restart(tmp_path: Path) -> None:
    now = [1e9]
    path = str(tmp_path / "kvtier.wear")
    budget = WriteBudget(24_000, path, lambda: now[0])
    assert budget.grant(15, 100) == 10
    assert budget.refused_bytes == 500
    now[0] += 360
    assert budget.grant(5, 100) == 1
    budget.save()
    again = WriteBudget(24_000, path, lambda: now[0])
    assert again.grant(5, 100) == 0
    now[0] += 1800
    assert again.grant(99, 100) == 5
    again.save()
    now[0] += 1e6
    assert WriteBudget(24_000, path, lambda: now[0]).grant(99, 100) == 10  # never more than an hour's worth
    Path(path).write_bytes(b"damaged")
    assert WriteBudget(24_000, path, lambda: now[0]).grant(99, 100) == 10
    assert WriteBudget(0, path, lambda: now[0]).grant(10**9, 10**9) == 10**9


def test_what_exceeds_the_budget_is_refused_from_the_tail_and_counted(tmp_path: Path) -> None:
    slot = 12_288  # of a row of 8,192 bytes with its header
    tier = NvmeTier(str(tmp_path), b"\1" * 32, "layout", 8192, 8 * MIB, daily_write_bytes=24 * 10 * slot)
    rows = chain_rows(14)
    slots = tier.reserve(14)
    assert slots is not None
    statuses = tier.write(slots, rows, [payload_of(row, 8192) for row in rows])
    assert statuses == [RowStatus.OK] * 10 + [RowStatus.FULL] * 4
    assert tier.stats().faults == {"write_budget": 4}
    assert read_back(tier, slots[:10], rows[:10]) == [RowStatus.OK] * 10
    tier.release(slots)
    tier.close()
    again = NvmeTier(str(tmp_path), b"\1" * 32, "layout", 8192, 8 * MIB, daily_write_bytes=24 * 10 * slot)
    with pytest.raises(AssertionError, match="rows were not written"):
        store_rows(again, rows)
    again.close()
