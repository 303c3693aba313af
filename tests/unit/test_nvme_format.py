"""The slab and journal formats: golden bytes, geometry, and headers that lie."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codec.checksum import checksum64
from kvtier.tiers.nvme.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    ROW_HEADER_BYTES,
    Entry,
    Geometry,
    RowSeal,
    Superblock,
    Verdict,
    judge_journal_header,
    layout_fingerprint,
    pack_free,
    pack_journal_header,
    pack_publish,
)
from kvtier.tiers.nvme.io import BLOCK
from kvtier.tiers.protocol import RowId

KEY_SPACE = bytes(range(32))
LAYOUT = layout_fingerprint("layout-a")
SLAB_ID = bytes(range(100, 116))
ROW = RowId(bytes(range(50, 82)), bytes(range(82, 114)), 513)
SEAL = RowSeal(KEY_SPACE, LAYOUT, 1_000_000)
SUPERBLOCK = Superblock(KEY_SPACE, LAYOUT, SLAB_ID, 1_000_000, 1_003_520, 77)


def test_checksum_is_xxh3_and_seeded() -> None:
    assert checksum64(b"") == 0x2D06800538D394C2
    assert checksum64(b"kvtier") == checksum64(memoryview(b"kvtier"))
    assert checksum64(b"kvtier", 1) != checksum64(b"kvtier", 2)


def test_superblock_golden_bytes() -> None:
    packed = SUPERBLOCK.pack()
    assert len(packed) == BLOCK
    assert packed[:16].hex() == "4b5654534c4142000100000000100000"
    assert packed[16:48] == KEY_SPACE
    assert packed[48:80] == LAYOUT
    assert packed[80:96] == SLAB_ID
    assert packed[96:120].hex() == "40420f000000000000500f00000000004d00000000000000"
    assert hashlib.sha256(packed).hexdigest() == "a0cdaa5916e62dfb3d1e402835d5cf722ad068af9a39a891b8c28a9337d38027"
    assert Superblock.parse(packed) == (Verdict.OK, SUPERBLOCK)


def test_row_header_golden_bytes() -> None:
    packed = SEAL.pack(7, ROW, 99, 0x0123456789ABCDEF)
    assert len(packed) == ROW_HEADER_BYTES
    assert packed[:32].hex() == "4b565472010001020700000020000000630000000000000040420f0000000000"
    assert packed[32:40] == KEY_SPACE[:8]
    assert packed[40:48] == LAYOUT[:8]
    assert packed[48:80] == ROW.key
    assert packed[80:112] == ROW.parent
    assert packed[112:120].hex() == "efcdab8967452301"
    assert packed[120:].hex() == "6b19b6fced254235"
    assert SEAL.check(packed, 7, ROW, 99) == (Verdict.OK, 0x0123456789ABCDEF)


def test_journal_golden_bytes() -> None:
    header = pack_journal_header(SLAB_ID)
    assert len(header) == BLOCK
    assert header[:16].hex() == "4b56544a524e4c000100000060000000"
    assert header[16:32] == SLAB_ID
    assert header[32:40].hex() == "23901ba91f1dd439"
    publish = pack_publish(Entry(7, ROW, 99), 1234, 42)
    assert len(publish) == RECORD_BYTES
    assert publish[:24].hex() == "0100010207000000d2040000000000006300000000000000"
    assert publish[24:56] == ROW.key
    assert publish[56:88] == ROW.parent
    assert publish[88:].hex() == "1746263282e0b904"
    first = pack_publish(Entry(7, ROW._replace(parent=b""), 99), 1234, 42)
    assert first[:2].hex() == "0200"
    assert first[56:88] == bytes(32)
    free = pack_free([3, 1 << 31, 5], 1235, 42)
    assert free[:24].hex() == "0300030003000000d3040000000000000000000000000000"
    assert free[24:36].hex() == "030000000000008005000000"
    assert free[36:88] == bytes(52)
    assert free[88:].hex() == "24d1dda505379901"


def test_record_dtype_reads_what_pack_wrote() -> None:
    record = np.frombuffer(pack_publish(Entry(7, ROW, 99), 1234, 42), dtype=RECORD_DTYPE)[0]
    assert RECORD_DTYPE.itemsize == RECORD_BYTES
    assert (record["kind"], record["count"], record["slot"]) == (1, 513, 7)
    assert (record["sequence"], record["generation"]) == (1234, 99)
    assert bytes(record["key"]) == ROW.key
    assert bytes(record["parent"]) == ROW.parent


@given(st.integers(1, 1 << 26))
def test_geometry_wastes_less_than_two_blocks_and_fits_the_header(row_bytes: int) -> None:
    geometry = Geometry.of(row_bytes)
    assert geometry.body_bytes % BLOCK == geometry.tail_bytes % BLOCK == geometry.slot_bytes % BLOCK == 0
    assert geometry.body_bytes <= row_bytes
    assert geometry.body_bytes + geometry.tail_bytes == geometry.slot_bytes
    assert row_bytes + ROW_HEADER_BYTES <= geometry.slot_bytes < row_bytes + ROW_HEADER_BYTES + BLOCK


def test_any_flipped_bit_of_a_row_header_is_found() -> None:
    for bit in range(8 * ROW_HEADER_BYTES):
        packed = bytearray(SEAL.pack(7, ROW, 99, 5))
        packed[bit // 8] ^= 1 << bit % 8
        assert SEAL.check(bytes(packed), 7, ROW, 99)[0] is Verdict.CORRUPT, bit


def test_a_sound_header_of_anything_else_is_foreign() -> None:
    packed = SEAL.pack(7, ROW, 99, 5)
    other_key = ROW._replace(key=ROW.parent)
    for seal, slot, row, generation in (
        (SEAL, 8, ROW, 99),
        (SEAL, 7, other_key, 99),
        (SEAL, 7, ROW._replace(parent=b""), 99),
        (SEAL, 7, ROW._replace(group=0), 99),
        (SEAL, 7, ROW, 98),
        (SEAL._replace(row_bytes=5), 7, ROW, 99),
        (SEAL._replace(layout=layout_fingerprint("layout-b")), 7, ROW, 99),
        (SEAL._replace(key_space=bytes(32)), 7, ROW, 99),
    ):
        assert seal.check(packed, slot, row, generation) == (Verdict.FOREIGN, 0)


@given(st.binary(max_size=2 * ROW_HEADER_BYTES))
def test_noise_is_never_a_row_header(noise: bytes) -> None:
    assert SEAL.check(noise, 7, ROW, 99)[0] is Verdict.CORRUPT


@given(st.binary(max_size=BLOCK))
def test_noise_is_never_a_superblock_nor_a_journal(noise: bytes) -> None:
    verdict, found = Superblock.parse(noise)
    assert found is None
    assert verdict in (Verdict.EMPTY, Verdict.FOREIGN, Verdict.CORRUPT)
    assert judge_journal_header(noise, SLAB_ID) in (Verdict.EMPTY, Verdict.FOREIGN, Verdict.CORRUPT)


@given(st.integers(0, 127), st.integers(0, 7))
def test_any_flipped_bit_of_a_superblock_is_found(byte: int, bit: int) -> None:
    packed = bytearray(SUPERBLOCK.pack())
    packed[byte] ^= 1 << bit
    assert Superblock.parse(bytes(packed))[1] is None


@pytest.mark.parametrize("length", [0, 1, 8, 12, 100, 119, 120, 127])
def test_a_cut_off_superblock_is_not_one(length: int) -> None:
    assert Superblock.parse(SUPERBLOCK.pack()[:length])[1] is None


def test_another_version_is_told_apart_from_damage() -> None:
    """A block that is sound but of a later version: counted as such, not as corruption."""
    for packed, size in ((SUPERBLOCK.pack(), 120), (pack_journal_header(SLAB_ID), 32)):
        later = bytearray(packed)
        later[8] = 2
        later[size : size + 8] = checksum64(bytes(later[:size])).to_bytes(8, "little")
        if size == 120:
            assert Superblock.parse(bytes(later)) == (Verdict.VERSION, None)
        else:
            assert judge_journal_header(bytes(later), SLAB_ID) is Verdict.VERSION
    assert judge_journal_header(pack_journal_header(SLAB_ID), bytes(16)) is Verdict.FOREIGN


def test_random_headers_with_a_right_checksum_never_pass_for_another_row() -> None:
    """Fuzz past the checksum: random fields, resealed."""
    draw = random.Random(5)
    good = SEAL.pack(7, ROW, 99, 5)
    for _ in range(2_000):
        fields = bytearray(good[:120])
        for _ in range(draw.randint(1, 4)):
            fields[draw.randrange(112)] = draw.randrange(256)
        if bytes(fields) == good[:120]:
            continue
        sealed = bytes(fields) + checksum64(bytes(fields)).to_bytes(8, "little")
        assert SEAL.check(sealed, 7, ROW, 99)[0] is Verdict.FOREIGN
