"""The header every encoded row starts with: it says what follows, and proves it.

Fixed size, little-endian, versioned; nothing in it is executed or trusted before its own checksum holds. `parameters`
digests everything a decoder must agree on (codec, row form, rope, bits map, means), so bytes of another model or
map are recognised as foreign and never decoded. Lossless codecs also carry the checksum of the decoded bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvtier.codec.checksum import checksum64
from kvtier.errors import CorruptBlockError, ForeignBlockError

MAGIC = b"KVTC"
VERSION = 1
HEADER_BYTES = 96
DIGEST_BYTES = 16
POSITION_UNKNOWN = -1

_BODY = struct.Struct("<4sHHI12s16s16sqQQQ")  # 88 bytes; then 8 bytes of checksum over them
_SEED = 0x6B7674  # "kvt"


class Header(NamedTuple):
    """What an encoded row says about itself.

    `codec` is the registry name, `parameters` and `bits_map` 16-byte digests, `first_token` the absolute position of
    the block's first token (POSITION_UNKNOWN if not known), `decoded_checksum` 0 unless the codec is lossless.
    """

    codec: str
    flags: int
    parameters: bytes
    bits_map: bytes
    first_token: int
    payload_bytes: int
    payload_checksum: int
    decoded_checksum: int

    def pack_into(self, target: memoryview) -> None:
        """Write the header into the first HEADER_BYTES of `target`."""
        name = self.codec.encode()
        if len(name) > 12:
            raise ValueError(f"codec name {self.codec!r} is longer than 12 bytes")
        body = _BODY.pack(
            MAGIC, VERSION, self.flags, HEADER_BYTES, name, self.parameters, self.bits_map,
            self.first_token, self.payload_bytes, self.payload_checksum, self.decoded_checksum,
        )  # fmt: skip
        target[: _BODY.size] = body
        target[_BODY.size : HEADER_BYTES] = struct.pack("<Q", checksum64(body, _SEED))


def read_header(encoded: memoryview, *, partial: bool = False) -> Header:
    """Parse and check the header at the start of `encoded`; `partial` allows the payload to be cut off.

    Raises CorruptBlockError if it is not one, ForeignBlockError if it is of a version this code does not read.
    """
    if len(encoded) < HEADER_BYTES:
        raise CorruptBlockError(f"an encoded row of {len(encoded)} bytes is shorter than its header")
    body = bytes(encoded[: _BODY.size])
    (recorded,) = struct.unpack("<Q", encoded[_BODY.size : HEADER_BYTES])
    if checksum64(body, _SEED) != recorded:
        raise CorruptBlockError("the header of an encoded row does not match its checksum")
    magic, version, flags, size, name, parameters, bits_map, first, n_bytes, payload, decoded = _BODY.unpack(body)
    if magic != MAGIC:
        raise CorruptBlockError("an encoded row does not start with kvtier's magic")
    if version != VERSION or size != HEADER_BYTES:
        raise ForeignBlockError(f"an encoded row has format version {version}; this code reads {VERSION}")
    if not partial and n_bytes > len(encoded) - HEADER_BYTES:
        raise CorruptBlockError(f"an encoded row claims {n_bytes} bytes of payload, {len(encoded)} are there in all")
    codec = name.rstrip(b"\0").decode("ascii", "replace")
    return Header(codec, flags, parameters, bits_map, first, n_bytes, payload, decoded)


def checked_payload(encoded: memoryview, codec: str, parameters: bytes) -> tuple[Header, memoryview]:
    """The header and payload of `encoded`, whole and meant for this decoder.

    Raises ForeignBlockError if codec or parameters differ, CorruptBlockError if the payload's checksum does.
    """
    header = read_header(encoded)
    if header.codec != codec or header.parameters != parameters:
        raise ForeignBlockError(f"the row was encoded by {header.codec!r} with other parameters than this {codec!r}")
    payload = encoded[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if checksum64(payload) != header.payload_checksum:
        raise CorruptBlockError("the payload of an encoded row does not match its checksum")
    return header, payload
