"""Leases: the right to read rows until let go. Every promise to an engine is one; none outlives its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvtier.errors import LeaseError
from kvtier.index.residency import Residency

Slots = npt.NDArray[np.int32]


class LeaseBook:
    """Hands out leases on one tier and counts those outstanding. One control thread.

    `on_unpinned(slots)` is called with rows nobody holds any more after a release.
    """

    def __init__(self, residency: Residency, on_unpinned: Callable[[Slots], None]) -> None:
        self._residency = residency
        self._on_unpinned = on_unpinned
        self.outstanding = 0

    def take(self, slots: Slots, owner: str) -> Lease:
        """A lease on `slots` (distinct) for `owner`, who is named in errors."""
        self._residency.pin(slots)
        self.outstanding += 1
        return Lease(self, slots, owner)

    def take_parts(self, parts: Sequence[Slots], owner: str) -> list[Lease]:
        """A lease on each part (all distinct), pinned together."""
        self._residency.pin(np.concatenate(parts))
        self.outstanding += len(parts)
        return [Lease(self, part, owner) for part in parts]

    def _let_go(self, slots: Slots) -> None:
        self._residency.unpin(slots)
        self.outstanding -= 1
        self._on_unpinned(slots[~self._residency.is_pinned(slots)])


class Lease:
    """Rows that stay where they are until `release`. Releasing twice raises LeaseError. A context manager."""

    __slots__ = ("_book", "_open", "owner", "slots")

    def __init__(self, book: LeaseBook, slots: Slots, owner: str) -> None:
        self._book = book
        self._open = True
        self.slots = slots
        self.owner = owner

    def release(self) -> None:
        """Give the rows back. Raises LeaseError the second time."""
        if not self._open:
            raise LeaseError(f"the lease of {self.owner} on {len(self.slots)} rows was released twice")
        self._open = False
        self._book._let_go(self.slots)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.release()
