"""Model test: the nvme tier, through restarts, does what the reference tier does."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows, payload_of, soiled_buffers
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.protocol import RowId, RowStatus, Slots, Tier

CAP = 600_000


class Restarts(RuleBasedStateMachine):
    """Reserve, write, read, release, compact and restart, on both tiers. Slots may be numbered differently, so rows are
    followed by the order in which they were reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="kvtier-restart-")
        self.chains = 0
        self.reserved: list[tuple[int, int]] = []
        self.written: list[tuple[int, int, RowId]] = []

    @initialize(row_bytes=st.sampled_from([1, 4096, 5000]), direct=st.booleans())
    def open(self, row_bytes: int, direct: bool) -> None:
        self.row_bytes, self.direct = row_bytes, direct
        self.nvme = self.open_nvme()
        self.model = MemoryTier(row_bytes, self.nvme.stats().capacity_rows)

    def open_nvme(self) -> NvmeTier:
        return NvmeTier(self.folder, b"\1" * 32, "layout", self.row_bytes, CAP, direct=self.direct, max_io_bytes=20_000)

    @rule(n=st.integers(0, 12))
    def reserve(self, n: int) -> None:
        ours, theirs = self.nvme.reserve(n), self.model.reserve(n)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            self.reserved += zip(ours.tolist(), theirs.tolist(), strict=True)

    @rule(n=st.integers(1, 8), group=st.integers(0, 2))
    def store(self, n: int, group: int) -> None:
        self.reserve(n)
        self.write_first(min(n, len(self.reserved)), group)

    @rule(data=st.data(), group=st.integers(0, 2))
    def write(self, data: st.DataObject, group: int) -> None:
        self.write_first(data.draw(st.integers(0, len(self.reserved))), group)

    def write_first(self, n: int, group: int) -> None:
        self.chains += 1
        rows = chain_rows(n, self.chains, group)
        pairs, self.reserved = self.reserved[:n], self.reserved[n:]
        payloads = [payload_of(row, self.row_bytes) for row in rows]
        for tier, slots in self.both(pairs):
            assert tier.write(slots, rows, payloads) == [RowStatus.OK] * n
        self.written += [(*pair, row) for pair, row in zip(pairs, rows, strict=True)]

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if not self.written:
            return
        picked = data.draw(st.lists(st.sampled_from(self.written), unique=True, max_size=10))
        mixed_up = data.draw(st.booleans())
        rows = [row for _, _, row in picked]
        if mixed_up:
            rows = rows[1:] + rows[:1]
        answers = []
        for tier, slots in self.both([pair[:2] for pair in picked]):
            into = soiled_buffers(len(rows), self.row_bytes)
            statuses = tier.read(slots, rows, into)
            answers.append([(s, bytes(b) if s is RowStatus.OK else b"") for s, b in zip(statuses, into, strict=True)])
        assert answers[0] == answers[1]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pool = [(a, b) for a, b, _ in self.written] + self.reserved
        if not pool:
            return
        going = data.draw(st.lists(st.sampled_from(pool), unique=True, min_size=1, max_size=20))
        for tier, slots in self.both(going):
            tier.release(slots)
        self.written = [item for item in self.written if item[:2] not in going]
        self.reserved = [pair for pair in self.reserved if pair not in going]

    @rule()
    def compact(self) -> None:
        self.nvme._journal.compact()

    @rule()
    def restart(self) -> None:
        self.nvme.close()
        self.nvme = self.open_nvme()
        self.model = self.model.reopen()
        ours, theirs = self.nvme.recover(), self.model.recover()
        assert sorted(item.row for item in ours) == sorted(item.row for item in theirs)
        assert {(item.slot, item.row) for item in ours} == {(slot, row) for slot, _, row in self.written}
        seen = {item.row.key for item in ours}
        for position, item in enumerate(ours):
            if item.row.parent in seen:
                assert item.row.parent in {before.row.key for before in ours[:position]}
        self.reserved = []

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "nvme"):
            return
        self.nvme.check_integrity()
        self.model.check_integrity()
        ours, theirs = self.nvme.stats(), self.model.stats()
        assert ours.used_rows == theirs.used_rows == len(self.written) + len(self.reserved)
        on_medium = sum(entry.stat().st_blocks for entry in os.scandir(self.folder)) * 512
        assert on_medium <= CAP

    def both(self, pairs: list[tuple[int, int]]) -> list[tuple[Tier, Slots]]:
        ours = np.array([pair[0] for pair in pairs], dtype=np.int32)
        theirs = np.array([pair[1] for pair in pairs], dtype=np.int32)
        return [(self.nvme, ours), (self.model, theirs)]

    def teardown(self) -> None:
        if hasattr(self, "nvme"):
            self.nvme.close()
        shutil.rmtree(self.folder)


TestRestarts = Restarts.TestCase
if not os.environ.get("KVTIER_SOAK"):
    TestRestarts.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
