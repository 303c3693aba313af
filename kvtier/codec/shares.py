"""A row in equal shares, each with a codec of its own: the ranks of a tensor-parallel engine, side by side.

Every rank holds its own heads, so every share has a slice of the model's calibration and decodes by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kvtier.codec.calibration import Calibration
from kvtier.codec.form import RowForm
from kvtier.codec.protocol import RowCodec
from kvtier.errors import ConfigError


class SharesCodec:
    """A `RowCodec` over a row of equal shares. `encoded_bytes` of each are set apart, whatever they need."""

    def __init__(self, shares: Sequence[RowCodec]) -> None:
        """Raises ConfigError unless all shares are of one size."""
        if len({codec.form.row_bytes for codec in shares}) != 1:
            raise ConfigError("the shares of a row have different sizes")
        self.name = shares[0].name
        whole = sum(codec.form.row_bytes for codec in shares)
        self.form = RowForm(kind="opaque", opaque_bytes=whole, tokens=shares[0].form.tokens)
        self.encoded_bytes = sum(codec.encoded_bytes for codec in shares)
        self.parameters = hashlib.sha256(b"kvtier.shares\0" + b"".join(c.parameters for c in shares)).digest()[:16]
        self._shares = tuple(shares)

    @property
    def lossless(self) -> bool:
        """See RowCodec.lossless."""
        return all(codec.lossless for codec in self._shares)

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """See RowCodec.encode."""
        size, at = self._shares[0].form.row_bytes, 0
        for i, codec in enumerate(self._shares):
            used = codec.encode(row[i * size : (i + 1) * size], target[at : at + codec.encoded_bytes], first_token)
            target[at + used : at + codec.encoded_bytes] = bytes(codec.encoded_bytes - used)
            at += codec.encoded_bytes
        return at

    def decode(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """See RowCodec.decode."""
        size, at = self._shares[0].form.row_bytes, 0
        for i, codec in enumerate(self._shares):
            codec.decode(encoded[at : at + codec.encoded_bytes], row[i * size : (i + 1) * size], first_token)
            at += codec.encoded_bytes


def heads_of(calibration: Calibration, first: int, count: int) -> Calibration:
    """The calibration of some of a model's heads. Raises ConfigError if it has no such heads."""
    if not 0 <= first < first + count <= calibration.heads:
        raise ConfigError(f"heads {first} to {first + count} of a calibration of {calibration.heads}")
    mine = slice(first, first + count)
    tables = calibration.frequency_tables[:, :, mine].tobytes() if calibration.tables else b""
    means = calibration.means[:, mine].astype("<f2").tobytes()
    sensitivity = {
        source: calibration.sensitivities(source)[:, :, mine].astype("<f4").tobytes()
        for source in calibration.sensitivity
    }
    return msgspec.structs.replace(calibration, heads=count, key_means=means, sensitivity=sensitivity, tables=tables)
