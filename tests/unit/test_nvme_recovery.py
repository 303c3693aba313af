"""Recovery: parents before children, whatever the order on the medium, and fast."""

from __future__ import annotations

import random
import time
from pathlib import Path

from kvtier.testing.rows import chain_rows
from kvtier.tiers.nvme.format import Entry
from kvtier.tiers.nvme.recovery import parents_first
from kvtier.tiers.protocol import RowId
from tests.unit.test_nvme_journal import Opened


def test_parents_come_first_whatever_the_order_on_the_medium(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "j", n_slots=64)
    order = list(range(64))
    random.Random(1).shuffle(order)
    opened.publish(order)
    opened.free([20])
    opened.journal.close()
    found = Opened(tmp_path / "j", n_slots=64)
    found.journal.close()
    recovered = [row.row for row in parents_first(found.records)]
    assert len(recovered) == 63
    position = {row.key: i for i, row in enumerate(recovered)}
    for row in recovered:
        if row.parent in position:
            assert position[row.parent] < position[row.key]


def test_rows_that_claim_each_other_as_parents_are_still_reported(tmp_path: Path) -> None:
    a, b = b"a" * 32, b"b" * 32
    opened = Opened(tmp_path / "j")
    opened.journal.publish([Entry(0, RowId(a, b, 0), 1), Entry(1, RowId(b, a, 0), 2)])
    opened.journal.close()
    found = Opened(tmp_path / "j")
    found.journal.close()
    assert {row.slot for row in parents_first(found.records)} == {0, 1}


def test_recovery_takes_less_than_five_seconds_a_million(tmp_path: Path) -> None:
    """Measured in CPU time on a share of a million entries, half of them freed again, in several branches."""
    n = 40_000
    opened = Opened(tmp_path / "j", n_slots=n)
    rows = [row for branch in range(40) for row in chain_rows(n // 40, branch)]
    for i in range(0, n, 1000):
        opened.journal.publish([Entry(slot, rows[slot], slot + 1) for slot in range(i, i + 1000)])
    opened.free(list(range(0, n, 2)))
    opened.journal.close()
    begin_s = time.process_time()
    found = Opened(tmp_path / "j", n_slots=n)
    recovered = parents_first(found.records)
    spent_s = time.process_time() - begin_s
    found.journal.close()
    assert len(recovered) == n // 2
    assert spent_s / n * 1_000_000 <= 5.0
