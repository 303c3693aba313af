"""CacheGen's codec as its code does it (SIGCOMM'24): one symmetric scale a token and layer, then entropy coding.

31 bins for every layer (its finest level), no deltas to an anchor token: on real KV they cost bits (docs/codecs.md).
Symbol frequencies per (layer, K|V, head, channel) come from the calibration, so a row carries none. A reference: it
decodes at about 0.1 GB/s, and D3 is smaller at lower loss.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.codec.arithmetic import NumpyArithmetic, require_finite
from kvtier.codec.boxes import Box
from kvtier.codec.checksum import checksum64
from kvtier.codec.form import RowForm
from kvtier.codec.header import HEADER_BYTES, POSITION_UNKNOWN, Header, checked_payload
from kvtier.codec.range_coder import decode_lanes, encode_lanes
from kvtier.codec.scaled import require_same_position
from kvtier.errors import ConfigError, CorruptBlockError, NotEncodableError

BINS = 31
_TOP = BINS // 2
_STEPS = 256  # symbols a lane codes; each lane ends with a 32-bit state
_MOST_BITS = 6
_NO_MAP = b"\0" * 16
NUMPY = NumpyArithmetic()


class CacheGenCodec:
    """A `RowCodec` of variable length; a row that needs more than 6 bits an element is refused (NotEncodableError)."""

    lossless: bool = False
    name: str = "cachegen"

    def __init__(self, form: RowForm, frequencies: npt.NDArray[np.uint16]) -> None:
        """`frequencies` are uint16 [layers, 2, heads, head_dim, BINS], each row summing to 4096."""
        if frequencies.shape != (form.layers, 2, form.heads, form.head_dim, BINS):
            raise ConfigError(f"cachegen: frequency tables of shape {frequencies.shape} do not fit the rows")
        self.form = form
        self._frequencies = np.ascontiguousarray(frequencies.reshape(-1, BINS))
        self._scale_bytes = 2 * form.layers * form.parts * form.tokens
        self.encoded_bytes = (
            HEADER_BYTES + self._scale_bytes + form.elements * _MOST_BITS // 8 + 4 * form.elements // _STEPS
        )
        described = msgspec.json.encode((self.name, form.identity)) + self._frequencies.tobytes()
        self.parameters = hashlib.sha256(described).digest()[:16]

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """See RowCodec.encode."""
        symbols, scales = bin_row(self.form, row)
        lanes, tables = _deal(self.form)
        coded = encode_lanes(_pad(symbols.reshape(-1), lanes), tables, self._frequencies)
        size = self._scale_bytes + len(coded)
        if HEADER_BYTES + size > min(len(target), self.encoded_bytes):
            raise NotEncodableError(f"cachegen: {size} bytes do not fit the {self.encoded_bytes} of a row")
        payload = target[HEADER_BYTES : HEADER_BYTES + size]
        payload[: self._scale_bytes] = scales.tobytes()
        payload[self._scale_bytes :] = coded
        position = POSITION_UNKNOWN if first_token is None else first_token
        Header(self.name, 0, self.parameters, _NO_MAP, position, size, checksum64(payload), 0).pack_into(target)
        return HEADER_BYTES + size

    def decode(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """See RowCodec.decode. A row cannot be moved: raises ConfigError if asked to."""
        header, payload = checked_payload(encoded, self.name, self.parameters)
        require_same_position(self.name, header, first_token)
        if len(payload) < self._scale_bytes:
            raise CorruptBlockError("cachegen: the payload is shorter than its scales")
        form = self.form
        scales = np.frombuffer(payload, dtype="<f2", count=self._scale_bytes // 2)
        scales = scales.astype(np.float32).reshape(form.layers, form.parts, 1, form.tokens, 1)
        _, tables = _deal(form)
        symbols = decode_lanes(payload[self._scale_bytes :], tables, self._frequencies).reshape(-1)[: form.elements]
        by_token = symbols.reshape(form.tokens, form.layers, form.parts, form.heads, form.head_dim)
        codes = by_token.transpose(1, 2, 3, 0, 4).astype(np.float32) - np.float32(_TOP)
        raw = form.views(row)
        for layer in range(form.layers):
            for part in range(form.parts):
                box = Box(part, layer, layer + 1, 0, form.heads, np.empty(0, np.intp))
                cut = box.cut_view(raw)
                NUMPY.store((box.cut(codes) * box.cut(scales)).reshape(cut.shape), cut, form.dtype)


def bin_row(form: RowForm, row: memoryview) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """Symbols [tokens, layers, parts, heads, head_dim] in [0, BINS) and scales [layers, parts, tokens] of a row."""
    size = (form.layers, form.heads, form.tokens, form.head_dim)
    values = np.stack([NUMPY.load(view, form.dtype).reshape(size) for view in form.views(row)], axis=1)
    peak = np.abs(values).max(axis=(2, 4))
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (peak / np.float32(_TOP)).astype(np.float16)
    require_finite(scales)
    step = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    codes = np.clip(np.rint(values * inverse[:, :, None, :, None]), -_TOP, _TOP)
    return (codes + _TOP).astype(np.uint8).transpose(3, 0, 1, 2, 4), scales


def _pad(symbols: npt.NDArray[np.uint8], lanes: int) -> npt.NDArray[np.uint8]:
    missing = -len(symbols) % lanes
    return np.pad(symbols, (0, missing), constant_values=_TOP).reshape(-1, lanes)


@lru_cache(maxsize=4)
def _deal(form: RowForm) -> tuple[int, npt.NDArray[np.intp]]:
    """Number of lanes, and which table each symbol [steps, lanes] is coded with (padding uses table 0)."""
    lanes = max(1, form.elements // _STEPS)
    tables = np.tile(np.arange(form.units * form.head_dim, dtype=np.intp), form.tokens)
    missing = -len(tables) % lanes
    return lanes, np.pad(tables, (0, missing)).reshape(-1, lanes)
