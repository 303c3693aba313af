"""The watch over every test: a lease that outlives its code is an error, a released one is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.cache.lease import Lease, LeaseBook
from kvtier.errors import IntegrityError
from kvtier.index.residency import Residency
from kvtier.index.tree import PrefixTree
from kvtier.testing.leases import no_lease_left_behind


def take_lease() -> Lease:
    residency = Residency("dram", PrefixTree(), capacity_rows=4)
    return LeaseBook(residency, lambda slots: None).take(np.array([0, 2], np.int32), "request-1")


def test_a_released_lease_passes() -> None:
    with no_lease_left_behind() as books, take_lease():
        assert [book.outstanding for book in books] == [1]


@pytest.mark.keeps_leases
def test_an_outstanding_lease_is_an_error() -> None:
    with pytest.raises(IntegrityError, match=r"\[1\]"), no_lease_left_behind():
        take_lease()


@pytest.mark.keeps_leases
def test_the_blocks_own_error_wins() -> None:
    with pytest.raises(ZeroDivisionError), no_lease_left_behind():
        divmod(1, int(take_lease().slots[0]))


def test_books_made_afterwards_are_not_watched() -> None:
    original = LeaseBook.__init__
    with no_lease_left_behind() as books:
        assert LeaseBook.__init__ is not original
    assert LeaseBook.__init__ is original
    assert books == []
