"""StorageCache against whatever an engine may do: never a wrong byte, a broken promise, a leak or a lost token."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.testing.faulty_tier import FaultKind, FaultyTier, Seeded
from kvtier.testing.memory_tier import MemoryTier
from tests.storage_bench import ROW, TOKENS, Bench, keys_of

CAPACITY = 24
chains = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda tokens: keys_of(*tokens))


class StorageCacheMachine(RuleBasedStateMachine):
    """One tier, far too small and failing now and then."""

    @initialize(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.1]), groups=st.sampled_from([1, 2]))
    def open(self, seed: int, share: float, groups: int) -> None:
        kinds = (FaultKind.EIO, FaultKind.ENOSPC, FaultKind.FLIP, FaultKind.SHORT)
        self.faults = Seeded(seed, share, kinds)
        self.inner, self.groups, self.faulty = MemoryTier(ROW, CAPACITY), groups, share > 0
        self.bench = Bench(FaultyTier(self.inner, self.faults), groups=groups)
        self.stored: set[bytes] = set()

    @rule(chain=chains, start=st.integers(0, 4), told=st.booleans())
    def store(self, chain: bytes, start: int, told: bool) -> None:
        start = min(start, len(chain) // 32 - 1)
        kept = self.bench.store(chain, start, None if told else b"")
        for i, ok in enumerate(kept):
            if ok:
                self.stored.add(chain[(start + i) * 32 : (start + i + 1) * 32])

    @rule(chain=chains, start=st.integers(0, 4), told=st.booleans(), take=st.booleans())
    def ask(self, chain: bytes, start: int, told: bool, take: bool) -> None:
        start = min(start, len(chain) // 32 - 1)
        offered = self.bench.find(chain, start, None if told else b"")
        assert all(chain[(start + i) * 32 : (start + i + 1) * 32] in self.stored for i in range(offered))
        if take and offered:
            arrived = self.bench.load(chain[start * 32 : (start + offered) * 32])
            assert all(arrived) or self.faulty, "what is promised is kept, unless the medium fails"

    @rule(chain=chains)
    def load_unasked(self, chain: bytes) -> None:
        self.bench.load(chain)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @rule()
    def clear(self) -> None:
        self.bench.cache.clear()
        self.stored.clear()
        assert self.inner.stats().used_rows == 0

    @rule()
    def restart(self) -> None:
        self.bench.check()
        self.bench.cache.close()
        self.inner = self.inner.reopen()
        self.bench = Bench(FaultyTier(self.inner, self.faults), groups=self.groups)
        self.bench.cache.check_integrity()

    @invariant()
    def sound(self) -> None:
        self.bench.cache.check_integrity()
        self.inner.check_integrity()
        assert self.inner.stats().used_rows <= CAPACITY
        published = sum(level.residency.resident_rows for level in self.bench.cache.levels)
        assert published == self.inner.stats().used_rows == len(self.inner.published), "index and medium agree"

    def teardown(self) -> None:
        self.bench.check()
        self.bench.cache.close()
        asked = self.bench.count("kvtier_tokens")
        assert asked % TOKENS == 0


TestStorageCache = StorageCacheMachine.TestCase
TestStorageCache.settings = settings(max_examples=40, stateful_step_count=30)
