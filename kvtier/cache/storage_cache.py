"""StorageCache: kvtier below an engine that keeps device and host memory itself (SGLang's HiCache).

The engine asks (`find`), reads into its own pages (`load`) and writes from them (`store`), from several threads at
once. Index, residency, policies, leases, health and accounting are those of TierCache; what is different is who waits:
the calling thread, until the I/O threads have carried its bytes or `load_deadline_s` is over.

Thread-safe. One lock guards all decisions; bytes move outside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cache.attach import Arrival, Cleared, Leaving, arrivals, build, by_cost, pick, refuse_twice
from kvtier.cache.copies import Buffers, Copy, carry
from kvtier.cache.geometry import Geometry
from kvtier.cache.ghosts import Ghosts
from kvtier.cache.inquiry import Inquiry
from kvtier.cache.lease import Lease
from kvtier.cache.level import Level
from kvtier.cache.mover import Mover
from kvtier.cache.paths import Paths, Run
from kvtier.cache.recovery import Rebuild
from kvtier.cache.storage_policy import StoragePolicy
from kvtier.cache.storing import Storing
from kvtier.cache.visits import Question, Visits
from kvtier.clock import Clock, MonotonicClock
from kvtier.config import CacheConfig
from kvtier.index.residency import ABSENT, Residency
from kvtier.index.tree import PrefixTree
from kvtier.model.keys import KEY_BYTES, chain_length
from kvtier.model.request import MissReason
from kvtier.observe.metrics import Labels, Recorder
from kvtier.place.policy import EvictionPolicy, TierView, make_policy
from kvtier.predict.forecast import Forecast
from kvtier.tiers.inflight import InFlight
from kvtier.tiers.protocol import RowStatus, Tier

Slots = npt.NDArray[np.int32]
Levels = npt.NDArray[np.int8]
Mask = npt.NDArray[np.bool_]


class StorageCache:
    """The storage level of one engine rank. `tiers` are ordered from fast to slow.

    A block is a row in each of `geometry.groups` groups: the engine's page in as many contiguous pieces.
    """

    def __init__(
        self, config: CacheConfig, geometry: Geometry, tiers: Sequence[Tier], clock: Clock | None = None
    ) -> None:
        self.config = config
        self.clock = clock or MonotonicClock()
        self.geometry = geometry
        self.tree = PrefixTree()
        self.recorder = Recorder()
        self.forecast = Forecast(self.tree, now=self.clock.now(), block_tokens=geometry.block_tokens)
        self._paths = Paths(self.tree)
        arrived = arrivals(tiers, self.recorder, geometry.groups)
        found = [Rebuild(self.tree, self._level(arrival), arrival) for arrival in arrived]
        self.levels = by_cost(rebuild.level for rebuild in found)
        self._leaving = Leaving(self.tree)
        self._cleared = Cleared()
        self.policy = StoragePolicy(config, geometry, self.tree, self.levels, self.clock, self.recorder, self.forecast)
        self._storing = Storing(self.levels, self.tree, self._paths, self.recorder, geometry, self.policy.worth_writing)
        self._visits = Visits(self.tree, self.levels, self.recorder, geometry.block_tokens, self.forecast)
        self._ghosts = Ghosts(self.tree, self._residencies, config.ghost_blocks)
        self._mover = Mover(config.io_threads, config.chunk_bytes, config.link_budgets)
        self._lock = threading.Lock()
        self._inquiry = Inquiry(self.levels, self.clock, self.recorder, geometry, config)
        self._in_flight = InFlight()
        self._generation = 0
        self._closed = False
        for rebuild in found:
            rebuild.all()
            self._taken_in(rebuild)

    # --- the engine's calls -------------------------------------------------------------------------------------

    def find(self, keys: bytes, head: bytes = b"") -> int:
        """How many leading blocks of `keys` can be loaded and are worth it. They are leased until loaded, or until the
        question is 30 s old. `head` are the keys before the first one, if the engine tells (or just the last of them).
        """
        began = time.perf_counter()
        with self._lock:
            if self._closed or not keys:
                return 0
            self._tick(self.clock.now())
            runs = self._paths.place(keys, head)
            asked = self._inquiry.ask(
                runs, _leading(self._storing.present(runs, chain_length(keys))), chain_length(keys)
            )
        late = self._inquiry.wait(asked)
        with self._lock:
            self._inquiry.take_in(late)
            return self._offer(keys, runs, began)

    def load(self, keys: bytes, targets: Buffers) -> list[bool]:
        """Read blocks into `targets` and verify them. True for those that are there; the content of the others is
        undefined."""
        n = chain_length(keys)
        done, failed = np.zeros(n, np.bool_), dict[int, MissReason]()
        source = np.full(n, -1, np.int8)
        with self._in_flight.transfer() as admitted:
            began_s = time.monotonic()
            with self._lock:
                deadline_s = began_s + self.policy.load_deadline_s(self._paths.known(keys))
            levels = list(self.levels if admitted else [])
            for index, level in enumerate(levels):
                with self._lock:
                    copies = self._reads(level, keys, ~done, targets)
                    self._visits.take(keys[:KEY_BYTES])  # the copies hold the rows now; damaged ones must be free to go
                late = carry(self._mover, copies, deadline_s)
                with self._lock:
                    self._give_up(late)
                    for copy in copies:
                        arrived = self._landed_read(copy, failed)
                        done[arrived] = True
                        source[arrived] = index
                if done.all():
                    break
            with self._lock:
                self.policy.waited(time.monotonic() - began_s)
                self._account_load(keys, done, [levels[i].name for i in source[: _leading(done)].tolist()], failed)
        return [bool(ok) for ok in done]

    def store(self, keys: bytes, sources: Buffers, head: bytes = b"") -> list[bool]:
        """Write blocks that no tier has yet to every tier that takes them. True for those that are in some tier
        afterwards, or being written by another call."""
        n = chain_length(keys)
        with self._in_flight.transfer() as admitted:
            if not admitted or not n:
                return [False] * n
            with self._lock:
                now = self.clock.now()
                self._tick(now)
                runs = self._paths.place(keys, head)
                # Before room is made, so that nothing of this path is the next victim.
                for run in runs:
                    self._visits.stored(run.keys, run.before, run.chain, not run.known, now)
                begin, now_in = self._storing.begin, self._generation
                copies = [copy for level in self.levels for copy in begin(level, runs, sources, now_in)]
            late = carry(self._mover, copies, time.monotonic() + self.config.load_deadline_s)
            with self._lock:
                self._give_up(late)
                for copy in copies:
                    if not copy.abandoned:
                        self._note_transfer(copy)
                        self._storing.landed(copy, self._generation)
                present = self._storing.present(runs, n)
                self._ghosts.prune()
        return [bool(there) for there in present]

    def attach(self, tier: Tier) -> int:
        """Take in a tier opened elsewhere; returns the rows it brings, which become visible a few at a time. Raises
        ConfigError if its name is taken, TierError if it fails; whoever opened it closes it then."""
        arrival = Arrival.of(tier, self.geometry.groups)
        with self._lock:
            refuse_twice([*self.levels, *self._leaving.levels], tier.name)
            rebuild = Rebuild(self.tree, self._level(arrival), arrival)
            self.levels[:] = by_cost([*self.levels, rebuild.level])
            self._inquiry.attach(rebuild.level)
            if self._cleared.missed(tier.name):
                rebuild.level.clear()
        rebuild.in_turns(self._lock, lambda level: level in self.levels)
        with self._lock:
            return self._taken_in(rebuild)

    def detach(self, name: str, wait_s: float = 10.0) -> bool:
        """Let go of a tier: it is asked for nothing more, what has begun may end, then it is closed with what it holds.
        False if that takes longer than `wait_s`. Raises ConfigError for a name unknown."""
        with self._lock:
            level = pick(self.levels, name)
            self._visits.settle_all(self.clock.now())
            self.levels.remove(level)
            self._leaving.add(level)
            self._inquiry.detach(level)
            self._mover.detach(name, 0.0)
        return self._leaving.wait(name, self._step, wait_s)

    def clear(self) -> None:
        """Forget every block in every tier. What is being written now is not kept."""
        with self._lock:
            self._visits.settle_all(self.clock.now())
            self._generation += 1
            self._inquiry.forget()
            for level in (levels := [*self.levels, *self._leaving.levels]):
                level.clear()
            self._cleared.reset(levels)

    def close(self, drain_s: float = 10.0) -> None:
        """Answer nothing from now on, wait for transfers under way, close the tiers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inquiry.close()
            self._visits.settle_all(self.clock.now())
            self._gauges()
        self._in_flight.close(drain_s)
        self._mover.close(drain_s)
        with self._lock:
            self._land_late()
        for level in (*self.levels, *self._leaving.levels):
            level.tier.close()

    # --- what can be seen ---------------------------------------------------------------------------------------

    def observe_prefill(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One engine step computed tokens [start, stop) of some prompts in `seconds`: what loading competes with."""
        with self._lock:
            self.policy.prefill.observe(spans, seconds)
            self.policy.traffic.prefilled(seconds)

    def note_fault(self, reason: str) -> None:
        """Something failed in the engine's own calls around this cache."""
        with self._lock:
            self.recorder.add("kvtier_faults", 1, "engine", reason)

    def leases(self) -> int:
        """Leases outstanding over all tiers."""
        return sum(level.book.outstanding for level in self.levels)

    def settle(self) -> None:
        """Count what is open as it stands, and let go of every promise."""
        with self._lock:
            self._visits.settle_all(self.clock.now())

    def drain(self) -> tuple[dict[tuple[str, Labels], float], dict[tuple[str, Labels], list[float]]]:
        """What was counted since the last call, and the gauges now."""
        with self._lock:
            if not self._closed:
                self._tick(self.clock.now())
                self._gauges()
            return self.recorder.drain()

    def check_integrity(self) -> None:
        """Raise IntegrityError if index or residency is broken. Costs a full traversal."""
        with self._lock:
            self.tree.check_integrity()
            for level in self.levels:
                level.residency.check_integrity()

    def _gauges(self) -> None:
        for level in self.levels:
            level.gauges()
        self.policy.gauges()
        self.recorder.set("kvtier_leases", self.leases())
        self.recorder.set("kvtier_segments", len(self.tree))
        self.recorder.set("kvtier_index_blocks", self.tree.blocks)

    # --- questions ----------------------------------------------------------------------------------------------

    def _offer(self, keys: bytes, runs: list[Run], began: float) -> int:
        """How many blocks of a question are offered, now that all is known that can be; promises them."""
        if self._closed:
            return 0
        now = self.clock.now()
        where, slots, reasons = self._storing.where(runs, chain_length(keys))
        found = _leading(where >= 0)
        offered = self.policy.worth_loading(runs[0].depth, where[:found])
        reasons[offered:found] = [MissReason.DECLINED_RECOMPUTE_CHEAPER] * (found - offered)
        question = Question(keys, offered, reasons[offered:], self._promise(where[:offered], slots))
        self._visits.asked(question, [run.chain for run in runs], runs[0].before, now)
        self._ghosts.visited([segment for run in runs for segment in self.tree.walk(run.chain).path])
        self._ghosts.prune()
        self.recorder.observe("kvtier_control_seconds", time.perf_counter() - began, "find")
        return offered

    def _promise(self, where: Levels, slots: list[Slots]) -> list[Lease]:
        leases = []
        for index, level in enumerate(self.levels):
            mine = np.flatnonzero(where == index)
            if mine.size:
                leases.append(level.book.take(slots[index][mine].ravel(), "a question"))
        return leases

    # --- loads --------------------------------------------------------------------------------------------------

    def _reads(self, level: Level, keys: bytes, wanted: Mask, targets: Buffers) -> list[Copy]:
        copies = []
        for run in self._paths.known(keys):
            slots = self._paths.slots(level, run)
            mine = (slots != ABSENT).all(axis=1) & wanted[run.part]
            if mine.any():
                rows = np.repeat(mine[:, None], self.geometry.groups, axis=1)
                copies.append(Copy.of(level, run, rows, slots[rows], targets, read=True, generation=self._generation))
        return copies

    def _landed_read(self, copy: Copy, failed: dict[int, MissReason]) -> npt.NDArray[np.intp]:
        """Blocks that arrived whole; adds to `failed` why the others did not. What is damaged leaves the tier."""
        if copy.abandoned:
            failed.update(dict.fromkeys(copy.at.tolist(), MissReason.DEADLINE))
            return np.empty(0, np.intp)
        self._note_transfer(copy)
        for block, status in zip(copy.at.tolist(), copy.statuses, strict=True):
            if status in (RowStatus.CORRUPT, RowStatus.FOREIGN, RowStatus.VANISHED):
                failed[block] = MissReason.VANISHED if status is RowStatus.VANISHED else MissReason.CORRUPT
                self._drop_damaged(copy, block, status)
            elif status is not RowStatus.OK:
                failed.setdefault(block, MissReason.LOAD_FAILED)
        return np.setdiff1d(copy.at, copy.at[~copy.ok])

    def _drop_damaged(self, copy: Copy, block: int, status: RowStatus) -> None:
        if copy.generation != self._generation:
            return
        depth = copy.run.depth + block - copy.run.start
        for segment in self.tree.walk(copy.run.chain).path:
            if segment.depth <= depth < segment.stop:
                copy.level.evict_below(segment, depth - segment.depth, status.value)

    def _account_load(self, keys: bytes, done: Mask, names: list[str], failed: dict[int, MissReason]) -> None:
        leading = _leading(done)
        failure = None if leading == len(done) else failed.get(leading, MissReason.EVICTED)
        self._visits.loaded(keys[:KEY_BYTES], names, failure, self.clock.now())

    # --- transfers ----------------------------------------------------------------------------------------------

    def _note_transfer(self, copy: Copy) -> None:
        """Count a finished copy, keep what is known of its tier current, let go of its rows."""
        if copy.lease is not None:
            copy.lease.release()
        transfer = copy.transfer
        if transfer.read:
            self.policy.traffic.moved(copy.level.name, transfer.seconds)
        copy.level.health.note(*transfer.asked, transfer.calls, transfer.read, copy.level.row_bytes, transfer.seconds)

    def _give_up(self, late: list[Copy]) -> None:
        """Their calls return now; what the tier still holds lands later, for nobody."""
        for copy in late:
            if not copy.transfer.done.is_set():
                copy.abandoned = True
                copy.level.health.stalled()

    def _land_late(self) -> None:
        """Let go of what was given up and has ended since."""
        for transfer in self._mover.collect():
            copy = transfer.tag
            if isinstance(copy, Copy) and copy.abandoned:
                self._note_transfer(copy)
                if not transfer.read:
                    self._storing.landed_for_nobody(copy)
        if self._leaving.levels:
            self._leaving.step(lambda level: not level.book.outstanding and self._storing.idle(level))

    def _tick(self, now: float) -> None:
        self._visits.expire(now)
        self._land_late()
        self.policy.watch.tick(now)

    def _step(self) -> None:
        with self._lock:
            self._land_late()

    def _taken_in(self, rebuild: Rebuild) -> int:
        """What a tier brought has been published. Rows whose head did not survive are let go: nothing leads to them
        before it is written again, and then so are they. A tier that has left meanwhile keeps what it has."""
        level = rebuild.level
        kept = rebuild.kept - (level.spare(level.residency.capacity_rows) if level in self.levels else 0)
        self.recorder.add("kvtier_recovered_rows", kept, level.name)
        return kept

    def _residencies(self) -> list[Residency]:
        return [level.residency for level in (*self.levels, *self._leaving.levels)]

    def _level(self, arrival: Arrival) -> Level:
        def policy(view: TierView) -> EvictionPolicy:
            return make_policy(self.config.policy, view, self.forecast)

        groups, closed = self.geometry.groups, self.geometry.closed_groups
        tier, capacity, probe = arrival.tier, arrival.capacity_rows, arrival.cost
        # Not strict: the engine's own memory may hold the head of what a tier holds.
        return build(
            self.tree,
            lambda: Level(tier, self.tree, capacity, groups, closed, policy, self.clock, self.recorder, probe, False),
        )


def _leading(mask: Mask) -> int:
    """How many leading entries are true."""
    holes = np.flatnonzero(~mask)
    return int(holes[0]) if holes.size else len(mask)
