"""Damaged and foreign bytes: a codec answers with a counted error or, where nothing is damaged, with the right row."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codec.checksum import checksum64
from kvtier.codec.header import HEADER_BYTES, read_header
from kvtier.codec.registry import NAMES, CodecChoice, build_codec
from kvtier.errors import CorruptBlockError, ForeignBlockError
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows
from kvtier.tiers.codec_tier import CodecTier, codec_identity, encoded_row_bytes
from kvtier.tiers.protocol import RowStatus
from tests.unit.codec_rows import SMALL, calibration_of, row_of

CODECS = {
    name: build_codec(CodecChoice(name=name, arithmetic="numpy"), SMALL, calibration_of(SMALL, gates={}))
    for name in NAMES
}


def encoded(name: str, first_token: int | None = 0) -> bytearray:
    codec = CODECS[name]
    target = bytearray(codec.encoded_bytes)
    size = codec.encode(row_of(SMALL), memoryview(target), first_token)
    return target[:size]


ENCODED = {(name, first): bytes(encoded(name, first)) for name in NAMES for first in (0, 64)}


@settings(max_examples=400, deadline=None)
@given(
    key=st.sampled_from(sorted(ENCODED)),
    position=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    in_header=st.booleans(),
)
def test_a_flipped_byte_anywhere_is_noticed(key: tuple[str, int], position: float, flip: int, in_header: bool) -> None:
    data = bytearray(ENCODED[key])
    data[int(position * (HEADER_BYTES if in_header else len(data)))] ^= flip
    with pytest.raises((CorruptBlockError, ForeignBlockError)):
        CODECS[key[0]].decode(memoryview(data), memoryview(bytearray(SMALL.row_bytes)))


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(ENCODED)), keep=st.floats(0, 1, exclude_max=True))
def test_a_cut_row_is_noticed(key: tuple[str, int], keep: float) -> None:
    data = ENCODED[key][: int(keep * len(ENCODED[key]))]
    with pytest.raises(CorruptBlockError):
        CODECS[key[0]].decode(memoryview(data), memoryview(bytearray(SMALL.row_bytes)))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300), name=st.sampled_from(NAMES))
def test_noise_is_never_decoded(data: bytes, name: str) -> None:
    with pytest.raises((CorruptBlockError, ForeignBlockError)):
        CODECS[name].decode(memoryview(data), memoryview(bytearray(SMALL.row_bytes)))


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    offset=st.sampled_from([4, 6, 56, 64, 72, 80]),  # version, flags, position, sizes, checksums
    value=st.integers(0, 2**64 - 1),
)
def test_a_forged_header_never_crashes_a_decoder(name: str, offset: int, value: int) -> None:
    """Someone recomputed the header's checksum over nonsense: any answer but a crash or an unchecked payload."""
    data = bytearray(ENCODED[name, 0])
    width = 2 if offset < 56 else 8
    data[offset : offset + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    data[88:HEADER_BYTES] = struct.pack("<Q", checksum64(bytes(data[:88]), 0x6B7674))
    try:
        CODECS[name].decode(memoryview(data), memoryview(bytearray(SMALL.row_bytes)))
    except (CorruptBlockError, ForeignBlockError):
        return
    header = read_header(memoryview(data))
    assert checksum64(memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]) == header.payload_checksum


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_reads_no_other_codecs_rows(name: str) -> None:
    for other in NAMES:
        if other != name:
            with pytest.raises(ForeignBlockError):
                CODECS[other].decode(memoryview(ENCODED[name, 0]), memoryview(bytearray(SMALL.row_bytes)))


def tier_with(name: str, rows: int = 8) -> tuple[CodecTier, MemoryTier]:
    codec = CODECS[name]
    inner = MemoryTier(encoded_row_bytes(codec), rows)
    return CodecTier(inner, codec), inner


@pytest.mark.parametrize("name", NAMES)
def test_damage_in_a_tier_is_a_miss_with_a_reason(name: str) -> None:
    tier, inner = tier_with(name)
    rows = chain_rows(3)
    slots = tier.reserve(3)
    assert slots is not None
    sources = [row_of(SMALL, seed) for seed in range(3)]
    assert tier.write(slots, rows, sources) == [RowStatus.OK] * 3
    row, data = inner.published[int(slots[1])]
    damaged = bytearray(data)
    damaged[HEADER_BYTES + 11] ^= 1
    inner.published[int(slots[1])] = (row, bytes(damaged))
    targets = [memoryview(bytearray(SMALL.row_bytes)) for _ in range(3)]
    assert tier.read(slots, rows, targets) == [RowStatus.OK, RowStatus.CORRUPT, RowStatus.OK]
    assert tier.stats().faults == {"corrupt": 1}


def test_rows_of_another_map_are_foreign_after_a_restart() -> None:
    tier, inner = tier_with("d4")
    rows = chain_rows(2)
    slots = tier.reserve(2)
    assert slots is not None
    tier.write(slots, rows, [row_of(SMALL, seed) for seed in range(2)])
    other = build_codec(CodecChoice(name="d4", sensitivity="local"), SMALL, calibration_of(SMALL, gates={}))
    assert codec_identity(other) != codec_identity(CODECS["d4"])
    after = CodecTier(inner.reopen(), other)
    assert len(after.recover()) == 2
    targets = [memoryview(bytearray(SMALL.row_bytes)) for _ in range(2)]
    assert after.read(slots, rows, targets) == [RowStatus.FOREIGN] * 2
    assert after.stats().faults == {"foreign": 2}


def test_a_row_that_cannot_be_encoded_is_refused_alone() -> None:
    tier, inner = tier_with("d4")
    rows = chain_rows(3)
    slots = tier.reserve(3)
    assert slots is not None
    poisoned = np.frombuffer(bytearray(row_of(SMALL)), np.uint16).copy()
    poisoned[5] = 0x7FC0  # NaN
    sources = [row_of(SMALL), poisoned.view(np.uint8).data, row_of(SMALL)]
    assert tier.write(slots, rows, sources) == [RowStatus.OK, RowStatus.FULL, RowStatus.OK]
    assert sorted(inner.published) == sorted([int(slots[0]), int(slots[2])])
    assert tier.stats().faults == {"not_encodable": 1}
