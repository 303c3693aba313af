"""TierCache: the one orchestrator. Decides once, under one lock; I/O threads only carry bytes.

The life of a request: `open` → `lookup` (repeated while promotions are under way) → `take_load` … `end_load` →
`offer_store` … `commit_store` → `close_request`. A connector calls `poll` every engine step.

Every method but `attach` is called by whoever holds `lock`: the engine's thread, or another while the engine sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cache.accounting import Accounting
from kvtier.cache.attach import Arrival
from kvtier.cache.canary import Canary
from kvtier.cache.damage import Damage
from kvtier.cache.device import DeviceView
from kvtier.cache.geometry import Geometry
from kvtier.cache.ghosts import Ghosts
from kvtier.cache.hierarchy import Hierarchy
from kvtier.cache.hinted import Hinted
from kvtier.cache.level import Level
from kvtier.cache.loads import Loader
from kvtier.cache.look_ahead import LookAhead
from kvtier.cache.mover import Mover, Transfer, Urgency
from kvtier.cache.promoting import Promotion
from kvtier.cache.request import CachedRequest, LoadPlan
from kvtier.cache.seals import Seals
from kvtier.cache.seeker import Seeker
from kvtier.cache.speculation import Speculation
from kvtier.cache.stores import Granted, Rows, Storer, as_rows
from kvtier.cache.traffic import Traffic
from kvtier.cache.watch import Watch
from kvtier.cache.writing import Writing
from kvtier.clock import Clock, MonotonicClock
from kvtier.config import CacheConfig
from kvtier.errors import IntegrityError
from kvtier.index.residency import ABSENT
from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.keys import Chain
from kvtier.model.request import Outcome, RequestContext
from kvtier.observe.metrics import Recorder
from kvtier.place.gate import LoadCurve, PrefillModel
from kvtier.place.hints import HintLimits
from kvtier.tiers.protocol import Tier

Slots = npt.NDArray[np.int32]

_ROWS_A_POLL = 512
"""Rows taken in by one poll, or one transfer: what arrives at once is spread over a few engine steps."""
_WATCH_S = 0.5
"""How often transfers under way are looked at for one that hangs."""


class TierCache:
    """The cache of one engine: memory rows the engine reads and writes, and any number of tiers below.

    `memory` is the tier whose rows the engine's worker copies from and to; `memory_row(slot)` gives a writable view of
    one. `lower` are the tiers below, in any order: each probes its cost. `seals` are those the engine's worker makes.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: Geometry,
        memory: Tier,
        memory_row: Callable[[int], memoryview],
        lower: Sequence[Tier] = (),
        clock: Clock | None = None,
        seals: Seals | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or MonotonicClock()
        self.block_tokens = geometry.block_tokens
        self.groups = geometry.groups
        self.closed_groups = geometry.closed_groups
        self.window_groups = geometry.window_groups
        self.tree = PrefixTree()
        self.recorder = Recorder()
        self.prefill = PrefillModel()
        self.traffic = Traffic(self.clock, self.recorder, config.io_threads, [tier.name for tier in lower])
        self.memory_row = memory_row
        # Opens a configured tier again, from any thread; set by the connector.
        self.reopen: Callable[[str], Tier] | None = None
        self.seals = seals or Seals.own(memory.stats().capacity_rows, memory.row_bytes)
        self.mover = Mover(config.io_threads, config.chunk_bytes, config.link_budgets, self.clock.now)
        self.epoch = 0
        self._watch_at_s = float("-inf")
        # Whoever calls holds it: the engine's thread, or the timekeeper while the engine sleeps (docs/decisions/0008).
        self.lock = threading.RLock()
        self.levels = Hierarchy(config, geometry, self.tree, self.clock, self.recorder, memory, lower)
        self.forecast, self.memory = self.levels.forecast, self.levels.memory
        self.group_order = self.memory.group_order
        self.seeker = Seeker(self)
        self.canary = Canary(self, config.canary_share, geometry.dtype)
        self.damage = Damage(self)
        self.loader = Loader(self)
        self.storer = Storer(self)
        self.watch = Watch(lambda: self.memory.residency.pinned_share, self.traffic, self.recorder)
        self.hinted = Hinted(self, HintLimits(pin_bytes_per_client=config.hint_pin_bytes))
        self.look_ahead = LookAhead(self)
        self.speculation = Speculation(self)
        self.writing = Writing(self)
        self.memory.relieve = self.hinted.relieve
        self._ghosts = Ghosts(self.tree, self.levels.residencies, config.ghost_blocks)
        self._accounting = Accounting(self)
        self._live: set[CachedRequest] = set()
        self.levels.recover()

    @property
    def lower(self) -> list[Level]:
        """The tiers below memory, fastest first."""
        return self.levels.lower

    @property
    def device(self) -> DeviceView | None:
        """The engine's own pool, where it is seen."""
        return self.levels.device

    # --- requests -----------------------------------------------------------------------------------------------

    def open(self, context: RequestContext, chain: Chain) -> CachedRequest:
        """A request arrived with this prompt. Settles forecasts; promises nothing yet."""
        self.levels.adopt(chain)
        known = self.tree.walk(chain).blocks
        path = self.tree.insert(chain)
        request = CachedRequest(context, chain, known)
        request.canary = self.canary.drawn(request)
        self._live.add(request)
        self.traffic.arrived()
        self.levels.arrived(path, context)
        self._ghosts.visited(path)
        self.hinted.arrived(request)
        self.speculation.arrived(path, context)
        self.look_ahead.arrived(request)
        self.seeker.ask(request)
        return request

    def extend(self, request: CachedRequest, more: Chain) -> None:
        """The request's chain grew by the blocks it generated."""
        if more:
            request.chain = Chain(request.chain + more)

    def lookup(self, request: CachedRequest, start: int) -> LoadPlan | None:
        """What can be loaded after the first `start` blocks (those the device has). None: ask again next step.

        Leases what it promises. Safe to call again: while nothing changed it answers from memory.
        """
        if self.canary.declines(request):
            self.look_ahead.asked(request)
            self.loader.release_hold(request)  # what an earlier plan promised is not asked about again
            self._accounting.looked_up(request, start)
            return LoadPlan(start, 0, np.zeros((0, self.groups), np.uint8), self.epoch)
        if request.asking and self.seeker.awaits(request, start):
            return None
        plan = None if self.look_ahead.asked(request) else request.plan
        if plan is not None and plan.start == start and plan.waiting:
            if request.awaited and not self._overdue(request):
                return None
        elif plan is not None:
            if plan.start == start and plan.epoch == self.epoch:
                return plan
            # Nobody came for what was offered, and things have changed: the gate decides anew.
            request.limit_blocks = None
        plan = self.loader.plan(request, start)
        self._expect(request, plan)
        self._accounting.looked_up(request, start)
        return None if plan.waiting else plan

    def started(self, request: CachedRequest) -> None:
        """The engine runs the request for the first time: where its prompt came from is settled. Whatever it looks up
        later, after a preemption, is looked up afresh."""
        request.started = True
        request.limit_blocks = None
        self.traffic.started(request)
        self.hinted.started(request)
        self.look_ahead.started(request)

    def take_load(self, request: CachedRequest, rows: Rows) -> Slots:
        """Lease the memory slots of `rows` (of the last plan) until `end_load`, in the order given."""
        if request.load is not None:
            raise IntegrityError(f"request {request.context.request_id} is loading already")
        blocks, groups = as_rows(rows)
        slots: Slots = self.memory.residency.slots_of(self.tree.walk(request.chain))[blocks, groups]
        if (slots == ABSENT).any():
            raise IntegrityError(f"request {request.context.request_id} loads a block that was not promised")
        request.load = self.memory.book.take(slots, request.context.request_id)
        self._accounting.loaded(request, np.flatnonzero(np.bincount(blocks)))
        self.memory.copied("read", len(rows))
        self.loader.release_hold(request)
        request.limit_blocks = None
        return slots

    def end_load(self, request: CachedRequest) -> None:
        """The engine has copied what it loaded."""
        if request.load is not None:
            load, request.load = request.load, None
            load.release()
            self.damage.loaded(request, load)
        self._let_go(request)

    def offer_store(self, request: CachedRequest, rows: Rows) -> Granted:
        """Which computed rows the engine shall write, and where. See `Storer.offer`."""
        return self.storer.offer(request, rows)

    def commit_store(self, request: CachedRequest, rows: Rows) -> None:
        """The engine has written these rows."""
        self.storer.commit(request, rows)
        self._let_go(request)

    def close_request(self, request: CachedRequest, outcome: Outcome) -> None:
        """The request ended. What it holds is let go; stores and loads under way may still end later."""
        if request.ended:
            return
        request.ended = True
        self.traffic.started(request)
        self.traffic.left()
        request.asking.clear()
        self.loader.forget(request)
        self.loader.release_hold(request)
        self._let_go(request)
        self.finish(request, outcome)
        self._ghosts.prune()
        self.hinted.started(request)
        self.hinted.ended(request)
        self.writing.ended(request, self.tree.walk(request.chain).path)
        self.look_ahead.started(request)

    def finish(self, request: CachedRequest, outcome: Outcome) -> None:
        """The request will generate nothing more: it is counted, and its forecast starts. `close_request` does this
        too; an engine that frees a request's blocks before it may be closed says so first."""
        if request.finished:
            return
        request.finished = True
        self._accounting.ended(request, outcome)
        path = self.tree.insert(request.chain)
        self.levels.finished(path, request.context, outcome)
        self._ghosts.visited(path)

    # --- the device ---------------------------------------------------------------------------------------------

    def attach_device(self, blocks: int, columns: int, row_bytes: int, in_use: Callable[[int], bool]) -> DeviceView:
        """From now on the engine's own pool is a tier of its own: see `DeviceView` for the arguments."""
        return self.levels.attach_device(blocks, columns, row_bytes, in_use)

    def protect(self, segments: Sequence[Segment], until_s: float) -> bool:
        """Keep these segments on the device until then, as far as the engine's order of eviction can: a request in the
        queue needs them, or a hint says so. False if there is no device view or too much is protected already."""
        return self.device is not None and self.device.protect(segments, until_s)

    # --- every step ---------------------------------------------------------------------------------------------

    def observe_prefill(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """One engine step computed tokens [start, stop) of some prompts in `seconds`: what loading competes with."""
        with self.lock:
            self.prefill.observe(spans, seconds)
            self.traffic.prefilled(seconds)

    def poll(self) -> None:
        """Take in what the mover finished and what was found in shared tiers. Cheap when nothing was."""
        self.seeker.take_in()
        now = self.clock.now()
        if now >= self._watch_at_s and self.mover.busy:
            self._watch_at_s = now + _WATCH_S
            self.levels.stalled(self.mover.stuck(self.config.load_deadline_s))
        self._take_in_transfers(_ROWS_A_POLL)
        self.levels.step(lambda level: not level.moving and not self.storer.under_way(level))
        now = self.clock.now()
        for part in (self.hinted, self.speculation, self.watch):
            part.tick(now)

    def _take_in_transfers(self, rows: int | None = None) -> None:
        for transfer in self.mover.collect(rows):
            (self.loader if isinstance(transfer.tag, Promotion) else self.storer).finished(transfer)

    def stepped(self) -> None:
        """The engine has chosen what to run: whoever is still in the queue is looked ahead for."""
        self.poll()
        self.look_ahead.pump()

    @property
    def conservative(self) -> bool:
        """Whether only what must be done is done: no prefetch, no migration, loads with a shorter deadline."""
        return self.watch.conservative

    @property
    def busy(self) -> bool:
        """Whether polling again soon is worth it: rows are moving."""
        return self.mover.busy or self.seeker.busy

    def leases(self) -> int:
        """Leases outstanding over all tiers. Zero when no request is open and nothing moves."""
        return sum(level.book.outstanding for level in self.levels.all)

    def gauges(self) -> None:
        """Write every gauge to the recorder."""
        self.levels.gauges()
        for direction, rows in self.mover.rows_waiting.items():
            self.recorder.set("kvtier_queue_depth", rows, direction)
        self.traffic.gauges()
        self.recorder.set("kvtier_hinted_sessions", len(self.hinted))
        self.recorder.set("kvtier_conservative", float(self.conservative))
        self.recorder.set("kvtier_leases", self.leases())

    def reset(self) -> None:
        """Forget every block in every tier. Jobs of the engine are void; copies of ours under way end unseen."""
        for part in (self.hinted, self.look_ahead, self.speculation):
            part.clear()
        self.seeker.reset()
        self.loader.reset()
        self.storer.reset()
        for request in list(self._live):
            self.loader.release_hold(request)
            self.storer.abort(request)
            self.end_load(request)
            request.waits_no_more()
            request.limit_blocks = None
        self.levels.clear()
        self.epoch += 1

    def close(self, drain_s: float = 10.0) -> None:
        """Finish writes under way (up to `drain_s` seconds), stop the I/O threads, close the tiers. Idempotent."""
        self.seeker.close()
        self.mover.drain(drain_s)
        self.mover.close(drain_s)
        self.poll()
        self._take_in_transfers()
        for part in (self.hinted, self.speculation):
            part.clear()
        for request in list(self._live):
            self.end_load(request)
            self.loader.release_hold(request)
        self.levels.close()

    def attach(self, tier: Tier) -> int:
        """Take in a tier opened elsewhere; returns the rows it brings. From any thread, not under `lock`: the engine
        waits neither for the medium nor for the index. Raises ConfigError if its name is taken, TierError if it fails.
        """
        arrival = Arrival.of(tier, self.groups)
        with self.lock:
            rebuild = self.levels.attach(arrival)
            self.seeker.attach(rebuild.level)
        rebuild.in_turns(self.lock, lambda level: level in self.lower)
        with self.lock:
            self.epoch += 1
            return self.levels.recovered(rebuild)

    def detach(self, name: str, wait_s: float = 10.0) -> bool:
        """Let go of a tier: it is asked for nothing more, what has begun may end, then it is closed with what it holds.
        False if that takes longer than `wait_s`: `poll` goes on with it. Raises ConfigError for a name unknown."""
        self.seeker.detach(self.levels.detach(name))
        self.mover.detach(name, 0.0)
        self.epoch += 1
        return self.levels.wait_for(name, self.poll, wait_s)

    def check_integrity(self) -> None:
        """Raise IntegrityError if index, residency or reachability is broken. Costs a full traversal."""
        self.levels.check_integrity()

    # --- for the parts of the cache -----------------------------------------------------------------------------

    def submit(self, level: Level, *transfers: Transfer) -> None:
        """Hand transfers of a usable level to the mover."""
        if transfers:
            level.health.sent()
            level.moving += len(transfers)
            self.mover.submit(*transfers)

    def load_curve(self, level: Level) -> LoadCurve:
        """What reading from a level costs now: measured, behind what is queued there, within its budget."""
        return level.curve(self.mover.backlog_bytes(level.name, True), self.mover.budget(level.name, True))

    def note_transfer(self, level: Level, transfer: Transfer) -> None:
        """Count a finished transfer and keep what is known of its tier current."""
        level.moving -= 1
        if transfer.read and transfer.urgency <= Urgency.LOOK_AHEAD:
            self.traffic.moved(level.name, transfer.seconds)
        level.health.note(*transfer.asked, transfer.calls, transfer.read, level.row_bytes, transfer.seconds)

    def _expect(self, request: CachedRequest, plan: LoadPlan) -> None:
        """Until it starts, the request is in the queue at the GPU with what it will compute."""
        if not request.started and not request.ended:
            begin = np.array([(plan.start + plan.blocks) * self.block_tokens])
            self.traffic.waits(request, float(self.prefill.seconds_from(begin, request.context.prompt_tokens)[0]))

    def _let_go(self, request: CachedRequest) -> None:
        """Forget a request that ended and has no job of the engine under way: a reset voids those that have."""
        if request.ended and request.load is None and not request.writes:
            self._live.discard(request)

    def _overdue(self, request: CachedRequest) -> bool:
        if request.deadline_s is not None and self.clock.now() > request.deadline_s:
            request.refuses_to_wait = True
            self.loader.give_up(request)
            return True
        return False
