"""Watch every lease a piece of code takes, and refuse to let one outlive it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtier.cache.lease import LeaseBook
from kvtier.errors import IntegrityError


@contextmanager
def no_lease_left_behind() -> Iterator[list[LeaseBook]]:
    """Raise IntegrityError if a lease book made inside the block still has leases outstanding at its end.

    Gives the list of books made so far. Says nothing if the block itself raises. Not for several threads at once.
    """
    books: list[LeaseBook] = []
    original = LeaseBook.__init__

    def remember(self: LeaseBook, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        books.append(self)

    LeaseBook.__init__ = remember  # type: ignore[method-assign]
    try:
        yield books
    finally:
        LeaseBook.__init__ = original  # type: ignore[method-assign]
    outstanding = [book.outstanding for book in books]
    if any(outstanding):
        raise IntegrityError(f"leases still outstanding, per lease book: {outstanding}")
