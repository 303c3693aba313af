"""Files that were cut, flipped, swapped or made by something else: misses with a counted reason, never wrong bytes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvtier.testing.rows import chain_rows, read_back, store_rows
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme.format import ROW_HEADER_BYTES, Geometry
from kvtier.tiers.nvme.io import BLOCK
from kvtier.tiers.protocol import RowId, RowStatus, Slots

ROW_BYTES = 9_000
GEOMETRY = Geometry.of(ROW_BYTES)
CAP = 1 << 20
ROWS = chain_rows(5)
FIELDS = {
    "magic": 0, "version": 4, "group": 6, "slot": 8, "parent_length": 12, "generation": 16, "payload_length": 24,
    "key_space": 32, "layout": 40, "key": 48, "parent": 80, "payload_checksum": 112, "header_checksum": 120,
}  # fmt: skip


def open_tier(folder: Path, *, key_space: int = 5, layout: str = "layout", row_bytes: int = ROW_BYTES) -> NvmeTier:
    return NvmeTier(str(folder), bytes([key_space]) * 32, layout, row_bytes, CAP)


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, Slots]:
    """A folder with a closed tier that holds ROWS, and their slots."""
    tier = open_tier(tmp_path)
    slots = store_rows(tier, ROWS)
    tier.close()
    return tmp_path, slots


def slab_of(folder: Path) -> Path:
    (path,) = folder.glob("*.slab")
    return path


def journal_of(folder: Path) -> Path:
    (path,) = folder.glob("*.journal")
    return path


def poke(path: Path, offset: int, change: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(change)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def start_of(slot: int) -> int:
    return BLOCK + slot * GEOMETRY.slot_bytes


def test_a_flipped_bit_anywhere_in_a_payload_is_found(filled: tuple[Path, Slots]) -> None:
    folder, slots = filled
    draw = random.Random(0)
    for offset in [
        0,
        1,
        GEOMETRY.body_bytes - 1,
        GEOMETRY.body_bytes,
        ROW_BYTES - 1,
        *draw.sample(range(ROW_BYTES), 20),
    ]:
        bit = draw.randrange(8)
        flip(slab_of(folder), start_of(int(slots[2])) + offset, bit)
        tier = open_tier(folder)
        expected = [RowStatus.OK, RowStatus.OK, RowStatus.CORRUPT, RowStatus.OK, RowStatus.OK]
        assert read_back(tier, slots, ROWS) == expected
        assert tier.stats().faults == {"corrupt": 1}
        tier.close()
        flip(slab_of(folder), start_of(int(slots[2])) + offset, bit)


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_in_any_header_field_is_found(filled: tuple[Path, Slots], field: str) -> None:
    folder, slots = filled
    flip(slab_of(folder), start_of(int(slots[1]) + 1) - ROW_HEADER_BYTES + FIELDS[field], 1)
    tier = open_tier(folder)
    assert read_back(tier, slots, ROWS) == [RowStatus.OK, RowStatus.CORRUPT, *[RowStatus.OK] * 3]
    tier.close()


def test_slots_swapped_on_the_medium_are_foreign(filled: tuple[Path, Slots]) -> None:
    """LMCache#4385: another request's content. Whole slots, sound in themselves, in each other's place."""
    folder, slots = filled
    path = slab_of(folder)
    data = path.read_bytes()
    one, two = start_of(int(slots[0])), start_of(int(slots[3]))
    poke(path, one, data[two : two + GEOMETRY.slot_bytes])
    poke(path, two, data[one : one + GEOMETRY.slot_bytes])
    tier = open_tier(folder)
    assert read_back(tier, slots, ROWS) == [
        RowStatus.FOREIGN, RowStatus.OK, RowStatus.OK, RowStatus.FOREIGN, RowStatus.OK,
    ]  # fmt: skip
    assert tier.stats().faults == {"foreign": 2}
    tier.close()


def test_an_old_generation_of_a_slot_is_not_served(tmp_path: Path) -> None:
    """A slot whose newer write was lost by the medium holds a sound row: the former one."""
    tier = open_tier(tmp_path)
    slots = store_rows(tier, ROWS[:1])
    before = slab_of(tmp_path).read_bytes()
    tier.release(slots)
    again = store_rows(tier, ROWS[1:2])
    assert again.tolist() == slots.tolist()
    tier.release(again)
    last = store_rows(tier, ROWS[:1])
    assert last.tolist() == slots.tolist()
    tier.close()
    poke(slab_of(tmp_path), start_of(int(slots[0])), before[start_of(int(slots[0])) :][: GEOMETRY.slot_bytes])
    tier = open_tier(tmp_path)
    assert read_back(tier, slots, ROWS[:1]) == [RowStatus.FOREIGN]
    tier.close()


def test_a_slab_cut_anywhere_loses_only_what_was_cut(filled: tuple[Path, Slots]) -> None:
    """sglang PR#39269: a truncated file must be a miss."""
    folder, slots = filled
    whole = slab_of(folder).read_bytes()
    end = start_of(len(ROWS))
    for cut in [0, 1, 119, 120, 127, 4095, BLOCK, *range(BLOCK + 1, end + 1, 3001), end - 1]:
        slab_of(folder).write_bytes(whole[:cut])
        shutil.copy(journal_of(folder), folder / "saved")
        tier = open_tier(folder)
        statuses = read_back(tier, slots, ROWS)
        sound = 0 if cut < BLOCK and not _superblock_whole(whole, cut) else max(0, cut - BLOCK) // GEOMETRY.slot_bytes
        assert statuses == [RowStatus.OK] * sound + [statuses[-1]] * (5 - sound), cut
        assert statuses[-1] in (RowStatus.CORRUPT, RowStatus.FOREIGN) or sound == 5
        faults = tier.stats().faults
        assert cut == 0 or faults.get("slab_truncated") or faults.get("slab_corrupt") or faults.get("slab_foreign")
        tier.check_integrity()
        free = tier.reserve(2)
        assert free is not None
        tier.release(free)
        fresh = store_rows(tier, chain_rows(2, "fresh"))
        assert read_back(tier, fresh, chain_rows(2, "fresh")) == [RowStatus.OK] * 2
        tier.close()
        shutil.copy(folder / "saved", journal_of(folder))


def _superblock_whole(whole: bytes, cut: int) -> bool:
    return not any(whole[cut:BLOCK])


def test_a_slab_cut_while_in_use_gives_errors_and_recovers(filled: tuple[Path, Slots]) -> None:
    folder, slots = filled
    tier = open_tier(folder)
    with slab_of(folder).open("r+b") as file:
        file.truncate(start_of(int(slots[3])) + 100)
    assert read_back(tier, slots, ROWS) == [*[RowStatus.OK] * 3, *[RowStatus.IO_ERROR] * 2]
    tier.release(slots[3:])
    fresh = store_rows(tier, ROWS[3:])
    assert read_back(tier, fresh, ROWS[3:]) == [RowStatus.OK] * 2
    tier.close()


def test_a_regrown_slab_full_of_zeros_serves_nothing(filled: tuple[Path, Slots]) -> None:
    folder, slots = filled
    size = slab_of(folder).stat().st_size
    with slab_of(folder).open("r+b") as file:
        file.truncate(BLOCK)
        file.truncate(size)
    tier = open_tier(folder)
    assert read_back(tier, slots, ROWS) == [RowStatus.CORRUPT] * 5
    tier.close()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"SQLite format 3\0" + b"x" * 9000, "slab_foreign"),
        (b"x", "slab_foreign"),
        (b"KVTSLAB\0" + b"\1" * 9000, "slab_corrupt"),
        (bytes(50_000), "slab_empty"),
        (b"", None),
    ],
)
def test_a_file_that_is_no_slab_is_started_afresh_and_counted(
    filled: tuple[Path, Slots], content: bytes, reason: str | None
) -> None:
    folder, slots = filled
    slab_of(folder).write_bytes(content)
    tier = open_tier(folder)
    assert tier.recover() == []
    assert tier.stats().faults == ({reason: 1} if reason else {})
    assert read_back(tier, slots, ROWS) == [RowStatus.FOREIGN] * 5
    store_rows(tier, ROWS)
    tier.close()
    tier = open_tier(folder)
    assert len(tier.recover()) == 5
    tier.close()


def test_random_bytes_over_the_superblock_never_crash_the_start(filled: tuple[Path, Slots]) -> None:
    folder, _slots = filled
    slab, journal = slab_of(folder).read_bytes(), journal_of(folder).read_bytes()
    draw = random.Random(1)
    for _ in range(40):
        slab_of(folder).write_bytes(slab)
        journal_of(folder).write_bytes(journal)
        for path in (slab_of(folder), journal_of(folder)):
            for _ in range(draw.randint(0, 3)):
                poke(path, draw.randrange(200), draw.randbytes(draw.randint(1, 20)))
        tier = open_tier(folder)
        found = tier.recover()
        numbers = np.array([item.slot for item in found], dtype=np.int32)
        assert set(read_back(tier, numbers, [item.row for item in found])) <= {RowStatus.OK}
        tier.check_integrity()
        tier.close()


@pytest.mark.parametrize("what", ["layout", "row_bytes", "key_space"])
def test_another_layout_row_size_or_key_space_finds_nothing_of_it(filled: tuple[Path, Slots], what: str) -> None:
    folder, _slots = filled
    if what == "key_space":
        other = slab_of(folder).with_name(f"kvtier-{bytes([6] * 12).hex()}.slab")
        slab_of(folder).rename(other)
        journal_of(folder).rename(other.with_suffix(".journal"))
        tier = open_tier(folder, key_space=6)
    elif what == "layout":
        tier = open_tier(folder, layout="another layout")
    else:
        tier = open_tier(folder, row_bytes=ROW_BYTES - 1)
    assert tier.recover() == []
    assert tier.stats().faults == {"slab_foreign": 1}
    tier.close()


def test_a_journal_that_names_a_row_the_slab_does_not_hold(filled: tuple[Path, Slots]) -> None:
    """A journal restored from a backup: its last words are about rows long overwritten."""
    folder, slots = filled
    old = journal_of(folder).read_bytes()
    tier = open_tier(folder)
    tier.recover()
    tier.release(slots)
    store_rows(tier, chain_rows(5, "new"))
    tier.close()
    journal_of(folder).write_bytes(old)
    tier = open_tier(folder)
    assert {item.row for item in tier.recover()} == set(ROWS)
    assert read_back(tier, slots, ROWS) == [RowStatus.FOREIGN] * 5
    tier.close()


def test_rows_of_a_lost_journal_are_gone_but_the_tier_works(filled: tuple[Path, Slots]) -> None:
    folder, _slots = filled
    journal_of(folder).unlink()
    tier = open_tier(folder)
    assert tier.recover() == []
    assert read_back(tier, store_rows(tier, ROWS), ROWS) == [RowStatus.OK] * 5
    tier.close()


def test_a_row_of_another_slab_file_is_foreign(tmp_path: Path) -> None:
    """The same slot, key and generation, copied from a slab of another key space."""
    slots: Slots | None = None
    for key_space in (5, 6):
        tier = open_tier(tmp_path / str(key_space), key_space=key_space)
        slots = store_rows(tier, [RowId(b"k" * 32, b"", 0)])
        tier.close()
    shutil.copy(slab_of(tmp_path / "6"), tmp_path / "copy")
    data = (tmp_path / "copy").read_bytes()
    assert slots is not None
    poke(slab_of(tmp_path / "5"), start_of(int(slots[0])), data[start_of(int(slots[0])) :][: GEOMETRY.slot_bytes])
    tier = open_tier(tmp_path / "5")
    assert read_back(tier, slots, [RowId(b"k" * 32, b"", 0)]) == [RowStatus.FOREIGN]
    tier.close()
