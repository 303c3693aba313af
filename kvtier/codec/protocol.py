"""What a codec is: a pure function from a row to fewer bytes, and back."""

from __future__ import annotations

from typing import Protocol

from kvtier.codec.form import RowForm


class RowCodec(Protocol):
    """Encodes rows of one form. Stateless and thread-safe; blocks for as long as the arithmetic takes, GIL released.

    `name` is what the header carries, `parameters` a digest of all that a decoder must agree on. `encoded_bytes` bounds
    every encoded row, header included: fixed-size codecs always fill it, others may need less.
    """

    name: str
    parameters: bytes
    form: RowForm
    encoded_bytes: int

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(x)) == x, bit for bit."""
        ...

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """Write the encoded row to the start of `target` (≥ encoded_bytes) and return its length.

        `first_token` is the absolute position of the row's first token, None if not known. Raises NotEncodableError.
        """
        ...

    def decode(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """Restore the row. `encoded` may be longer than what encode wrote.

        `first_token` moves the row to another position where the codec can (keys are rotated there), None keeps it.
        Raises CorruptBlockError or ForeignBlockError; the row is undefined then.
        """
        ...
