"""raw and zstd: every bit comes back.

zstd alone finds little in floating-point numbers. Shuffled (all low bytes, then all high bytes) the exponents lie side
by side and compress; real KV reaches about 1.45 times (the low byte of a bfloat16 is noise). How much is never known
before: a row that does not fit is refused by the tier that holds it, unless it leaves room for the worst case.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from kvtier.codec.checksum import checksum64
from kvtier.codec.form import ELEMENT_BYTES, RowForm
from kvtier.codec.header import HEADER_BYTES, POSITION_UNKNOWN, Header, checked_payload
from kvtier.codec.scaled import require_same_position
from kvtier.errors import ConfigError, CorruptBlockError, NotEncodableError

_NO_MAP = b"\0" * 16
_STORED = 1  # flag: the payload is the row itself


class RawCodec:
    """A `RowCodec` that copies the row behind a header."""

    lossless: bool = True
    name: str = "raw"

    def __init__(self, form: RowForm) -> None:
        self.form = form
        self.encoded_bytes = HEADER_BYTES + form.row_bytes
        self.parameters = hashlib.sha256(msgspec.json.encode((self.name, form.identity))).digest()[:16]

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """See RowCodec.encode."""
        return self._finish(row, row, target, _STORED, first_token)

    def decode(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """See RowCodec.decode. A row cannot be moved: raises ConfigError if asked to."""
        header, payload = checked_payload(encoded, self.name, self.parameters)
        require_same_position(self.name, header, first_token)
        self._restore(header, payload, row)
        if checksum64(row) != header.decoded_checksum:
            raise CorruptBlockError(f"{self.name}: the decoded row does not match the checksum of what was encoded")

    def _restore(self, header: Header, payload: memoryview, row: memoryview) -> None:
        if len(payload) != len(row):
            raise CorruptBlockError(f"{self.name}: a payload of {len(payload)} bytes for a row of {len(row)}")
        row[:] = payload

    def _finish(
        self, row: memoryview, payload: memoryview, target: memoryview, flags: int, first_token: int | None
    ) -> int:
        size = len(payload)
        if HEADER_BYTES + size > len(target):
            raise NotEncodableError(f"{self.name}: {HEADER_BYTES + size} bytes do not fit the {len(target)} given")
        target[HEADER_BYTES : HEADER_BYTES + size] = payload
        position = POSITION_UNKNOWN if first_token is None else first_token
        decoded = checksum64(row)
        stored = decoded if flags & _STORED else checksum64(payload)
        Header(self.name, flags, self.parameters, _NO_MAP, position, size, stored, decoded).pack_into(target)
        return HEADER_BYTES + size


class ZstdShuffleCodec(RawCodec):
    """A `RowCodec`: byte-shuffled, then zstd. A row that does not shrink is stored as it is."""

    name: str = "zstd"

    def __init__(self, form: RowForm, level: int = 1) -> None:
        """Raises ConfigError if the zstandard package is not installed."""
        super().__init__(form)
        self._zstd = _zstandard()
        self._level = level
        self._width = 1 if form.kind == "opaque" else ELEMENT_BYTES[form.dtype]

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """See RowCodec.encode. Raises NotEncodableError if the result does not fit `target`."""
        bytes_of_words = np.frombuffer(row, dtype=np.uint8).reshape(-1, self._width)
        shuffled = np.ascontiguousarray(bytes_of_words.T)
        packed = self._zstd.ZstdCompressor(level=self._level, write_content_size=True).compress(shuffled)
        if len(packed) >= len(row):
            return self._finish(row, row, target, _STORED, first_token)
        return self._finish(row, memoryview(packed), target, 0, first_token)

    def _restore(self, header: Header, payload: memoryview, row: memoryview) -> None:
        if header.flags & _STORED:
            return super()._restore(header, payload, row)
        try:
            plain = self._zstd.ZstdDecompressor().decompress(payload, max_output_size=len(row))
        except self._zstd.ZstdError as error:
            raise CorruptBlockError(f"{self.name}: {error}") from error
        if len(plain) != len(row):
            raise CorruptBlockError(f"{self.name}: {len(plain)} bytes decoded for a row of {len(row)}")
        planes = np.frombuffer(plain, dtype=np.uint8).reshape(self._width, -1)
        np.copyto(np.frombuffer(row, dtype=np.uint8).reshape(-1, self._width), planes.T)
        return None


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("the zstd codec needs the package zstandard: pip install 'kvtier[codec]'") from error
    return zstandard
