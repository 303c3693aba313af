"""How a block's bytes are arranged, taken from the engine's own specs and never re-derived."""

from __future__ import annotations

import hashlib

import msgspec

from kvtier.errors import EngineMismatchError


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One KV-cache group: layers that share a block table.

    `kind` names the engine's spec ("full", "sliding", "mla", "chunked", "mamba"); `window_tokens` is 0 unless sliding
    or chunked. `page_bytes` is one block of one layer on one rank, as the engine allocates it.
    """

    kind: str
    block_tokens: int
    page_bytes: int
    layers: tuple[str, ...]
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.page_bytes <= 0 or not self.layers:
            raise EngineMismatchError(
                f"KV-cache group of kind {self.kind!r} reports {self.block_tokens} tokens a block, "
                f"{self.page_bytes} bytes a page and {len(self.layers)} layers; each must be positive"
            )


class Layout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The arrangement of one row: the bytes of one block of one group over all ranks.

    `row_bytes` is the payload of a row, `ranks` how many equal shares it is made of.
    """

    engine: str
    dtype: str
    groups: tuple[GroupLayout, ...]
    row_bytes: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if not self.groups:
            raise EngineMismatchError("the engine reports no KV-cache group; there is nothing to cache")
        if self.row_bytes <= 0 or self.ranks <= 0 or self.row_bytes % self.ranks:
            raise EngineMismatchError(f"a row of {self.row_bytes} bytes cannot be shared by {self.ranks} ranks")

    @property
    def digest(self) -> str:
        """Hex digest of every field; part of the key space and of every slab header."""
        return hashlib.sha256(b"kvtier.layout\0" + msgspec.json.encode(self, order="sorted")).hexdigest()
