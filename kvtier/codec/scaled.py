"""int8 and fp8 with one scale per (token, head): lossy, needs no calibration. A latent gets a scale per 64 channels.

int8 is the safe lossy form (KL about 1e-4 on SmolLM2 at half the bytes); fp8 e4m3 is ten times worse at the same size
and exists for comparison.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from kvtier.codec.arithmetic import Arithmetic, Bytes, Halfs
from kvtier.codec.boxes import boxes_of
from kvtier.codec.checksum import checksum64
from kvtier.codec.form import RowForm
from kvtier.codec.header import HEADER_BYTES, POSITION_UNKNOWN, Header, checked_payload
from kvtier.codec.planes import groups_of
from kvtier.errors import ConfigError, CorruptBlockError

_NO_MAP = b"\0" * 16
_LATENT_GROUP = 64


class ScaledCodec:
    """A `RowCodec`: one-byte codes [layers, parts, heads, t, d], then a float16 scale a token (and group) and head."""

    lossless: bool = False

    def __init__(self, name: str, form: RowForm, arithmetic: Arithmetic) -> None:
        """`name` is "int8" or "fp8". Raises ConfigError for rows that are not KV."""
        if form.kind == "opaque":
            raise ConfigError(f"codec {name} needs rows of keys and values, not opaque bytes")
        self.name, self.form = name, form
        self._arithmetic = arithmetic
        self._fp8 = name == "fp8"
        self._groups = groups_of(form.head_dim, _LATENT_GROUP) if form.kind == "mla" else 1
        self._code_bytes = form.elements
        self._payload_bytes = form.elements + 2 * form.units * form.tokens * self._groups
        self.encoded_bytes = HEADER_BYTES + self._payload_bytes
        self.parameters = hashlib.sha256(msgspec.json.encode((name, form.identity))).digest()[:16]

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """See RowCodec.encode."""
        raw = self.form.views(row)
        payload = target[HEADER_BYTES : HEADER_BYTES + self._payload_bytes]
        codes, scales = self._views(payload)
        for box in boxes_of(self.form):
            values = self._arithmetic.load(box.cut_view(raw), self.form.dtype)
            values = values.reshape(box.units, self.form.tokens * self._groups, -1)
            found, peak = self._arithmetic.quantise_signed(values, fp8=self._fp8)
            code_view, scale_view = box.cut(codes), box.cut(scales)
            code_view[...] = found.reshape(code_view.shape)
            scale_view[...] = peak.reshape(scale_view.shape)
        position = POSITION_UNKNOWN if first_token is None else first_token
        checksum = checksum64(payload)
        header = Header(self.name, 0, self.parameters, _NO_MAP, position, self._payload_bytes, checksum, 0)
        header.pack_into(target)
        return self.encoded_bytes

    def decode(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """See RowCodec.decode. A row cannot be moved: raises ConfigError if asked to."""
        header, payload = checked_payload(encoded, self.name, self.parameters)
        if header.payload_bytes != self._payload_bytes:
            raise CorruptBlockError(
                f"{self.name}: a payload of {header.payload_bytes} bytes, not {self._payload_bytes}"
            )
        require_same_position(self.name, header, first_token)
        raw = self.form.views(row)
        codes, scales = self._views(payload)
        for box in boxes_of(self.form):
            mine = box.cut(codes).reshape(box.units, self.form.tokens * self._groups, -1)
            steps = box.cut(scales).reshape(box.units, -1)
            values = self._arithmetic.dequantise_signed(mine, steps, fp8=self._fp8)
            cut = box.cut_view(raw)
            self._arithmetic.store(values.reshape(cut.shape), cut, self.form.dtype)

    def _views(self, payload: memoryview) -> tuple[Bytes, Halfs]:
        flat = np.frombuffer(payload, dtype=np.uint8)
        units = (self.form.layers, self.form.parts, self.form.heads, self.form.tokens)
        codes = flat[: self._code_bytes].reshape(*units, self.form.head_dim)
        return codes, flat[self._code_bytes :].view(np.float16).reshape(*units, self._groups)


def require_same_position(name: str, header: Header, first_token: int | None) -> None:
    """Raise ConfigError if a row is wanted at another position than it was written for."""
    if first_token not in (None, header.first_token) and header.first_token != POSITION_UNKNOWN:
        raise ConfigError(f"codec {name} cannot move a block from token {header.first_token} to {first_token}")
