"""The fault matrix of the pool: an owner and the master are stopped and killed under a serving engine, and come back.

What must hold is what `test_matrix` says: each byte right, no exception, each fault counted, nobody waits longer than
the deadline; the breaker opens where the pool does not answer, and takes it back when it does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.faulty_tier import Fault
from kvtier.tiers.health import BreakerState
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import PoolOptions
from kvtier.tiers.protocol import Tier
from tests.fault.serving import BLOCKS, CACHES, CONFIG, DEADLINE_S, PROMPTS, ROW, Medium
from tests.pool_rig import Pool, needs_mooncake, running_pool

pytestmark = needs_mooncake


class PoolMedium(Medium):
    """A client of a running pool."""

    def __init__(self, pool: Pool, *faults: Fault) -> None:
        self.pool = pool
        super().__init__("pool", Path(), *faults)

    def _open(self) -> Tier:
        options = PoolOptions(master=self.pool.address, host="127.0.0.1")
        return PoolTier(options, b"s" * 32, "layout", ROW, handles=1024)


def kill(pool: Pool, master: bool) -> Callable[[], object]:
    """SIGKILL; what brings another one."""
    process = pool.master if master else pool.processes[1]
    process.kill()
    process.wait()
    return pool.start_master if master else pool.add_owner


def stop(pool: Pool, master: bool) -> Callable[[], object]:
    """SIGSTOP; what lets it go on."""
    process = pool.master if master else pool.processes[1]
    pool.stop(process)
    return lambda: process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("cache", list(CACHES))
@pytest.mark.parametrize("master", [False, True], ids=["owner", "master"])
@pytest.mark.parametrize("harm", [stop, kill], ids=["stopped", "killed"])
def test_a_peer_dies_and_comes_back(
    harm: Callable[[Pool, bool], Callable[[], object]], master: bool, cache: str
) -> None:
    with running_pool(1) as pool:
        served = CACHES[cache](PoolMedium(pool))
        served.run()
        assert served.timed(PROMPTS[0]) == BLOCKS
        breaker = served.level.health.breaker
        served.longest_s = 0.0
        restore = harm(pool, master)
        for i in range(6):
            for prompt in (*PROMPTS, range(100 + 10 * i, 103 + 10 * i)):  # what is there, and what is new
                served.timed(prompt)
        # An answer is waited for, then a load, then (in a storage call) a store.
        assert served.longest_s < CONFIG.discover_deadline_s + 2 * DEADLINE_S + 1.0
        if harm is stop or master:
            assert breaker.opened, "nothing is sent to a pool that does not answer"
        restore()
        deadline = time.monotonic() + 60
        while served.timed(PROMPTS[0]) < BLOCKS and time.monotonic() < deadline:
            time.sleep(0.2)
        assert served.timed(PROMPTS[0]) == BLOCKS, "the pool serves again"
        while breaker.state is not BreakerState.CLOSED and time.monotonic() < deadline:
            served.timed(PROMPTS[0])
        assert breaker.state is BreakerState.CLOSED
        served.end()
        faults = served.counted("kvtier_faults")
        assert set(faults) & {"io_error", "stall", "vanished", "discovery_deadline", "full"}, faults
