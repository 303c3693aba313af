"""Host pages of SGLang as buffers, in place.

A page lies in as many contiguous pieces as the host layout makes of it: one for latent attention (MLA) in the
page-first layouts, a K and a V piece for multi-head attention, and one or two a layer in layer_first. One or two pieces
of the same size are rows of their own and are never copied; more are gathered into one row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.errors import EngineMismatchError

_MAX_DIRECT_PIECES = 2
_STAGING_BYTES = 64 << 20


class HostPages:
    """Buffers for the pages of one host pool. Thread-safe.

    `row_bytes` is the size of a row, `groups` the rows of a page; `staged` says that rows are copies. Raises
    EngineMismatchError for a pool it cannot read.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.layout = str(getattr(pool, "layout", ""))
        self.page_tokens = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        self._regions = _regions(pool)
        pieces = self._pieces(np.arange(self.page_tokens))
        self.piece_bytes = tuple(piece.nbytes for piece in pieces)
        self.staged = len(pieces) > _MAX_DIRECT_PIECES or len(set(self.piece_bytes)) > 1
        self.groups = 1 if self.staged else len(pieces)
        self.row_bytes = sum(self.piece_bytes) if self.staged else self.piece_bytes[0]

    @property
    def memory(self) -> list[memoryview]:
        """The pool's own memory, in which pages lie."""
        return [memory for _, memory in self._regions]

    def batches(self, pages: int) -> list[slice]:
        """Pages [0, pages) in parts small enough that their copies, if any are made, stay within 64 MiB."""
        step = max(1, _STAGING_BYTES // self.row_bytes) if self.staged else max(1, pages)
        return [slice(i, min(i + step, pages)) for i in range(0, pages, step)]

    def to_read_from(self, indices: Any) -> list[list[memoryview]]:
        """For every page of `indices` (a tensor of token slots, whole pages), buffers that hold its rows."""
        pages = self._pages(indices)
        if not self.staged:
            return pages
        rows = self._blank(len(pages))
        for (row,), pieces in zip(rows, pages, strict=True):
            target = np.frombuffer(row, np.uint8)
            for piece, at in zip(pieces, self._offsets(), strict=True):
                target[at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
        return rows

    def to_write_to(self, indices: Any) -> list[list[memoryview]]:
        """For every page, buffers to fill. Call `filled` with them afterwards."""
        return self._blank(len(indices) // self.page_tokens) if self.staged else self._pages(indices)

    def filled(self, indices: Any, rows: Sequence[Sequence[memoryview]], done: Sequence[bool]) -> None:
        """Put into the pool what was read into `rows`, for the pages that are `done`."""
        if not self.staged:
            return
        for (row,), pieces, ok in zip(rows, self._pages(indices), done, strict=True):
            source = np.frombuffer(row, np.uint8)
            for piece, at in zip(pieces, self._offsets(), strict=True):
                if ok:
                    np.frombuffer(piece, np.uint8)[:] = source[at : at + piece.nbytes]

    def _blank(self, pages: int) -> list[list[memoryview]]:
        memory = np.empty((pages, self.row_bytes), np.uint8)
        return [[memoryview(row)] for row in memory]

    def _offsets(self) -> list[int]:
        return [0, *np.cumsum(self.piece_bytes[:-1]).tolist()]

    def _pages(self, indices: Any) -> list[list[memoryview]]:
        pieces, n = self._pieces(indices), len(self.piece_bytes)
        return [pieces[i : i + n] for i in range(0, len(pieces), n)]

    def _pieces(self, indices: Any) -> list[memoryview]:
        """The contiguous pieces of whole pages, page by page, inside the pool's own memory."""
        try:
            pointers, sizes = self._pool.get_page_buffer_meta(indices)
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise EngineMismatchError(
                f"the host pool {type(self._pool).__name__} with layout {self.layout!r} gives no access to its pages "
                f"({error}); use --hicache-mem-layout page_first, page_first_direct or layer_first"
            ) from error
        return [self._piece(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]

    def _piece(self, pointer: int, size: int) -> memoryview:
        for base, memory in self._regions:
            if base <= pointer and pointer + size <= base + memory.nbytes:
                return memory[pointer - base : pointer - base + size]
        raise EngineMismatchError(f"{type(self._pool).__name__} names a page at {pointer:#x}, outside its own buffers")


def _regions(pool: Any) -> list[tuple[int, memoryview]]:
    """The pool's buffers: where they start, and their bytes, writable."""
    found: dict[int, memoryview] = {}
    for name in ("kv_buffer", "k_buffer", "v_buffer"):
        held = getattr(pool, name, None)
        for tensor in held if isinstance(held, list | tuple) else [held]:
            if tensor is None or not hasattr(tensor, "data_ptr") or tensor.data_ptr() in found:
                continue
            if not tensor.is_contiguous():
                continue
            n_bytes = tensor.numel() * tensor.element_size()
            memory = (ctypes.c_uint8 * n_bytes).from_address(tensor.data_ptr())
            found[tensor.data_ptr()] = memoryview(memory).cast("B")
    if not found:
        raise EngineMismatchError(f"the host pool {type(pool).__name__} has no buffer kvtier knows how to read")
    # The largest first: K and V are views into it where the pool keeps both in one tensor.
    return sorted(found.items(), key=lambda item: -item[1].nbytes)
