"""Opening the tiers below memory: a dead medium costs its tier, a wrong option stops the start, in seconds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError, TierError
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.open import Share, Site, configured_tiers, open_lower_tiers, register_memory
from kvtier.tiers.protocol import Tier


def site(config: CacheConfig | None = None, share: Share | None = None) -> Site:
    return Site(config or CacheConfig(), b"\1" * 32, "layout", 4096, share or Share())


def test_what_is_configured_is_opened_and_nothing_else(tmp_path: Path) -> None:
    assert open_lower_tiers(site()).tiers == []
    config = CacheConfig(nvme_path=str(tmp_path), nvme_bytes=4 << 20)
    assert configured_tiers(config) == ["nvme"]
    opened = open_lower_tiers(site(config))
    assert [tier.name for tier in opened.tiers] == ["nvme"]
    assert opened.missing == {}
    opened.tiers[0].close()


def test_the_processes_of_a_node_share_its_cap_and_have_folders_of_their_own(tmp_path: Path) -> None:
    config = CacheConfig(nvme_path=str(tmp_path), nvme_bytes=8 << 20)
    tiers = [open_lower_tiers(site(config, Share(2, f"rank-{i}"))).tiers[0] for i in range(2)]
    assert sum(tier.stats().cap_bytes for tier in tiers) == 8 << 20
    assert all(list((tmp_path / f"rank-{i}").glob("*.slab")) for i in range(2))
    for tier in tiers:
        tier.close()
    with pytest.raises(ConfigError, match="nvme_bytes is 8388608 for 9000000 ranks; raise it"):
        open_lower_tiers(site(config, Share(9_000_000, "rank-0")))


@pytest.mark.parametrize("error", [TierError("no device"), OSError(5, "Input/output error")])
def test_a_medium_that_fails_costs_its_tier_only(error: Exception) -> None:
    def fail(_: Site) -> Tier:
        raise error

    healthy = MemoryTier(16, 4)
    opened = open_lower_tiers(site(), {"bad": fail, "good": lambda _: healthy})
    assert opened.tiers == [healthy]
    assert list(opened.missing) == ["bad"]
    assert str(error) in opened.missing["bad"]


def test_a_medium_that_hangs_is_left_behind_and_closed_if_it_ever_opens() -> None:
    answer, closed = threading.Event(), threading.Event()

    class Late(MemoryTier):
        def close(self) -> None:
            closed.set()

    def hang(_: Site) -> Tier:
        assert answer.wait(30)
        return Late(16, 4)

    began = time.monotonic()
    opened = open_lower_tiers(site(), {"dead": hang, "good": lambda _: MemoryTier(16, 4)}, timeout_s=0.2)
    assert time.monotonic() - began < 5
    assert list(opened.missing) == ["dead"]
    assert len(opened.tiers) == 1
    answer.set()
    assert closed.wait(10)


def test_a_wrong_option_stops_the_start_and_closes_what_had_opened() -> None:
    closed = threading.Event()

    class Other(MemoryTier):
        def close(self) -> None:
            closed.set()

    def wrong(_: Site) -> Tier:
        raise ConfigError("nvme_bytes is 1; raise it")

    with pytest.raises(ConfigError, match="raise it"):
        open_lower_tiers(site(), {"good": lambda _: Other(16, 4), "wrong": wrong})
    assert closed.wait(10)


def test_memory_is_told_to_the_tiers_that_can_use_it(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    class Card(MemoryTier):
        def register(self, memory: memoryview) -> bool:
            told.append(memory.nbytes)
            return memory.nbytes < 100

    tiers = [MemoryTier(16, 4), Card(16, 4, name="pool")]
    register_memory(tiers, memoryview(bytes(64)))
    assert not caplog.records
    register_memory(tiers, memoryview(bytes(128)))
    assert told == [64, 128]
    assert "raise ulimit -l" in caplog.text
