"""The journal: last words, torn tails at every byte, failed appends, compaction under traffic, bounded size."""

from __future__ import annotations

import collections
import errno
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.testing.rows import chain_rows
from kvtier.tiers.nvme.format import RECORD_BYTES, Entry
from kvtier.tiers.nvme.io import BLOCK, Syscalls
from kvtier.tiers.nvme.journal import Journal, journal_bytes, journal_capacity
from kvtier.tiers.nvme.recovery import parents_first
from kvtier.tiers.protocol import RowId

SLAB_ID = bytes(range(16))
ROWS = chain_rows(64)


class Opened:
    """A journal replayed from a file and started, with its faults and what it recovered."""

    def __init__(
        self,
        path: Path,
        n_slots: int = 32,
        syscalls: Syscalls | None = None,
        slab_id: bytes = SLAB_ID,
        start: bool = True,
    ):
        self.faults: collections.Counter[str] = collections.Counter()

        def fault(reason: str) -> None:
            self.faults[reason] += 1

        self.journal = Journal(str(path), slab_id, n_slots, syscalls or Syscalls(), fault)
        self.records = self.journal.load()
        if start:
            self.journal.start(self.records)

    @property
    def held(self) -> dict[int, RowId]:
        """Slot → row as recovered."""
        return {found.slot: found.row for found in parents_first(self.records)}

    def publish(self, slots: Sequence[int], generation: int = 1) -> None:
        self.journal.publish([Entry(slot, ROWS[slot], generation) for slot in slots])

    def free(self, slots: Sequence[int]) -> None:
        self.journal.free(np.array(slots, dtype=np.int32))


def held_by(path: Path, n_slots: int = 32) -> dict[int, RowId]:
    """What a restart finds."""
    return Opened(path, n_slots, start=False).held


def test_the_last_word_about_a_slot_counts(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "j")
    opened.publish([0, 1, 2, 3])
    opened.free([1, 3])
    opened.publish([3], generation=2)
    opened.free([0])
    opened.journal.publish([Entry(0, ROWS[40], 3)])
    opened.journal.close()
    assert held_by(tmp_path / "j") == {0: ROWS[40], 2: ROWS[2], 3: ROWS[3]}
    assert opened.journal.generation.tolist()[:4] == [3, 0, 1, 2]


def test_more_slots_than_one_free_record_holds(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "j", n_slots=64)
    opened.publish(range(64))
    opened.free([*range(0, 50), 63])
    opened.journal.close()
    assert held_by(tmp_path / "j", 64) == {slot: ROWS[slot] for slot in range(50, 63)}


def test_generations_and_sequence_go_on_after_a_restart(tmp_path: Path) -> None:
    for generation in range(1, 6):
        opened = Opened(tmp_path / "j")
        assert opened.journal.generation[5] == generation - 1
        if generation > 1:
            opened.free([5])
        opened.publish([5], generation)
        opened.journal.close()
    assert held_by(tmp_path / "j") == {5: ROWS[5]}


@pytest.mark.parametrize("zeroed", [False, True], ids=["cut", "zeroed"])
def test_torn_at_every_byte_what_was_whole_is_kept(tmp_path: Path, zeroed: bool) -> None:
    """The tail is lost from any byte on, either as a shorter file or as zeros: the records before it hold."""
    path = tmp_path / "j"
    opened = Opened(path)
    states: list[dict[int, RowId]] = [{}]
    for step in range(8):
        if step % 3 == 2:
            opened.free([step - 1])
            states.append({s: r for s, r in states[-1].items() if s != step - 1})
        else:
            opened.publish([step])
            states.append({**states[-1], step: ROWS[step]})
    opened.journal.close()
    whole = path.read_bytes()[: BLOCK + 10 * RECORD_BYTES]
    for cut in [*range(64), *range(64, BLOCK, 97), *range(BLOCK, BLOCK + 8 * RECORD_BYTES)]:
        path.write_bytes(whole[:cut] + (bytes(len(whole) - cut) if zeroed else b""))
        complete = max(0, cut - BLOCK) // RECORD_BYTES
        rest = whole[BLOCK + complete * RECORD_BYTES : cut]
        if zeroed and len(rest) < RECORD_BYTES and not any(whole[cut : BLOCK + (complete + 1) * RECORD_BYTES]):
            complete += 1
        found = Opened(path, start=False)
        header_whole = cut >= BLOCK or (zeroed and not any(whole[cut:BLOCK]))
        assert found.held == (states[complete] if header_whole else {}), cut


def test_any_flipped_bit_costs_at_most_its_record(tmp_path: Path) -> None:
    path = tmp_path / "j"
    opened = Opened(path)
    opened.publish(range(6))
    opened.journal.close()
    whole = path.read_bytes()
    for bit in range(8 * BLOCK, 8 * (BLOCK + 6 * RECORD_BYTES), 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = Opened(path, start=False)
        lost = (bit // 8 - BLOCK) // RECORD_BYTES
        assert found.held == {slot: ROWS[slot] for slot in range(6) if slot != lost}
        assert found.faults == {"journal_record_corrupt": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x" * 100, "journal_foreign"),
        (b"KVTJRNL\0" + b"x" * 5000, "journal_corrupt"),
        (bytes(9000), None),
        (b"", None),
    ],
)
def test_a_file_that_is_no_journal_is_empty_and_counted(tmp_path: Path, content: bytes, reason: str | None) -> None:
    (tmp_path / "j").write_bytes(content)
    opened = Opened(tmp_path / "j")
    opened.journal.close()
    assert opened.held == {}
    assert opened.faults == ({reason: 1} if reason else {})


def test_the_journal_of_another_slab_is_foreign(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "j")
    opened.publish([1])
    opened.journal.close()
    other = Opened(tmp_path / "j", slab_id=bytes(16))
    other.journal.close()
    assert other.held == {}
    assert other.faults == {"journal_foreign": 1}


def test_records_of_slots_beyond_a_smaller_slab_are_dropped(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "j", n_slots=32)
    opened.publish([1, 30])
    opened.publish([2])
    opened.free([2, 31, 1])
    opened.publish([1], generation=9)
    opened.journal.close()
    assert held_by(tmp_path / "j", n_slots=8) == {1: ROWS[1]}


class Failing(Syscalls):
    """Fails writes to order: after `whole` bytes of the next write, with `code`."""

    whole: int | None = None
    code = errno.EIO

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.whole is None:
            return super().pwritev(fd, buffers, offset)
        keep, self.whole = self.whole, None
        if keep:
            os.pwrite(fd, b"".join(buffers)[:keep], offset)
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("whole", [0, 50, RECORD_BYTES, 2 * RECORD_BYTES + 1, 3 * RECORD_BYTES])
def test_the_remains_of_a_failed_append_never_come_back(tmp_path: Path, whole: int) -> None:
    """Records of a failed append that reached the file are older than what is written over them, and skipped."""
    syscalls = Failing()
    opened = Opened(tmp_path / "j", syscalls=syscalls)
    opened.publish([0])
    syscalls.whole = whole
    with pytest.raises(OSError, match="Input/output"):
        opened.publish([1, 2, 3])
    assert opened.journal.generation.tolist()[:4] == [1, 0, 0, 0]
    opened.publish([4])
    opened.journal.close()
    assert held_by(tmp_path / "j") == {0: ROWS[0], 4: ROWS[4]}


def test_a_failed_free_leaves_the_rows_published(tmp_path: Path) -> None:
    syscalls = Failing()
    opened = Opened(tmp_path / "j", syscalls=syscalls)
    opened.publish([0, 1])
    syscalls.whole, syscalls.code = 0, errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        opened.free([0])
    assert opened.journal.generation.tolist()[:2] == [1, 1]
    opened.free([0])
    opened.journal.close()
    assert held_by(tmp_path / "j") == {1: ROWS[1]}


def test_compaction_keeps_the_truth_and_the_size(tmp_path: Path) -> None:
    path = tmp_path / "j"
    opened = Opened(path, n_slots=16)
    draw, truth, generation = random.Random(3), dict[int, int](), 0
    for _ in range(6_000):
        slot = draw.randrange(16)
        if slot in truth:
            opened.free([slot])
            del truth[slot]
        else:
            generation += 1
            opened.publish([slot], generation)
            truth[slot] = generation
        assert path.stat().st_blocks * 512 <= journal_bytes(16) + BLOCK
    opened.journal.close()
    assert opened.journal.compactions >= 3
    assert opened.faults == {}
    assert path.stat().st_size == journal_bytes(16)
    found = Opened(path, n_slots=16)
    found.journal.close()
    assert found.held == {slot: ROWS[slot] for slot in truth}
    assert {int(r["slot"]): int(r["generation"]) for r in found.records} == truth


class SlowRename(Syscalls):
    """Holds compaction between its two halves, so that appends land in between."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.armed = False

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        if self.armed:
            self.armed = False
            self.reached.set()
            assert self.go_on.wait(20)


def test_appends_during_compaction_are_not_lost(tmp_path: Path) -> None:
    syscalls = SlowRename()
    opened = Opened(tmp_path / "j", syscalls=syscalls)
    opened.publish([0, 1, 2, 3])
    opened.free([0])
    syscalls.armed = True
    thread = threading.Thread(target=opened.journal.compact)
    thread.start()
    assert syscalls.reached.wait(20)
    opened.free([1])
    opened.publish([7])
    opened.publish([1], generation=5)
    opened.free([2])
    syscalls.go_on.set()
    thread.join()
    assert opened.journal.compactions == 1
    opened.publish([9])
    opened.journal.close()
    assert held_by(tmp_path / "j") == {slot: ROWS[slot] for slot in (1, 3, 7, 9)}


def test_a_full_journal_waits_for_compaction_rather_than_fail(tmp_path: Path) -> None:
    syscalls = SlowRename()
    opened = Opened(tmp_path / "j", n_slots=4, syscalls=syscalls)
    syscalls.armed = True
    done = threading.Event()

    def fill() -> None:
        for generation in range(1, journal_capacity(4) + 8):
            opened.publish([1], generation)
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert syscalls.reached.wait(20)
    assert not done.wait(0.3)
    syscalls.go_on.set()
    assert done.wait(20)
    thread.join()
    opened.journal.close()
    assert opened.faults == {}
    assert held_by(tmp_path / "j", 4) == {1: ROWS[1]}


class NoSecondFile(Syscalls):
    """No room for the temporary file of compaction."""

    broken = False

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        if self.broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fallocate(fd, offset, length)


def test_failing_compaction_is_counted_until_the_journal_is_full_and_then_heals(tmp_path: Path) -> None:
    syscalls = NoSecondFile()
    opened = Opened(tmp_path / "j", n_slots=4, syscalls=syscalls)
    syscalls.broken = True
    for generation in range(1, journal_capacity(4) + 1):
        opened.publish([1], generation)
    with pytest.raises(OSError, match="full"):
        opened.publish([1], journal_capacity(4) + 1)
    assert opened.faults["journal_compaction_failed"] >= 2
    assert not (tmp_path / "j.tmp").exists()
    assert opened.journal.generation[1] == journal_capacity(4)
    syscalls.broken = False
    opened.publish([2])
    opened.journal.close()
    assert held_by(tmp_path / "j", 4) == {1: ROWS[1], 2: ROWS[2]}


def test_a_sound_journal_that_is_half_empty_is_appended_to_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    inodes = []
    for generation in range(1, 4):
        opened = Opened(path)
        opened.publish([generation], generation)
        inodes.append(path.stat().st_ino)
        opened.journal.close()
    assert len(set(inodes)) == 1
    assert held_by(path) == {slot: ROWS[slot] for slot in (1, 2, 3)}
    damaged = bytearray(path.read_bytes())
    damaged[BLOCK + RECORD_BYTES + 30] ^= 1
    path.write_bytes(damaged)
    opened = Opened(path)
    opened.publish([9], 9)
    opened.journal.close()
    assert path.stat().st_ino != inodes[0]
    assert held_by(path) == {slot: ROWS[slot] for slot in (1, 3, 9)}
    again = Opened(path)
    again.journal.close()
    assert again.faults == {}


def test_a_closed_journal_refuses(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "j")
    opened.journal.close()
    opened.journal.close()
    with pytest.raises(OSError, match="closed"):
        opened.publish([1])
