"""The node: requests arrive, wait for room, load or compute, decode and leave; blocks move between three tiers.

What it does is said by a `Variant`; how eviction is ordered and where a found prefix is cut is decided by the objects
production uses (`kvtier.place`). One node replays one trace once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.admission import AdmitByValue
from kvtier.place.busy import BusyMeter
from kvtier.place.gate import GpuLoad, LinkLoad, LoadCurve, choose_cut
from kvtier.place.policy import make_policy
from kvtier.place.prices import Prices
from kvtier.predict.forecast import Forecast
from kvtier.sim.node.arrivals import Session
from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.flight import Flight, Load
from kvtier.sim.node.gpu import Gpu
from kvtier.sim.node.hardware import Hardware, LinkSpeed
from kvtier.sim.node.hints import Announcer, Hinted
from kvtier.sim.node.links import Link, Priority
from kvtier.sim.node.loads import Loader
from kvtier.sim.node.promote import Promotion
from kvtier.sim.node.score import Score
from kvtier.sim.node.speculation import Speculation
from kvtier.sim.node.stores import Storer
from kvtier.sim.node.tier import NodeTier
from kvtier.sim.node.variants import Variant
from kvtier.sim.node.watch import Watch
from kvtier.sim.traces.records import TRACE_KEY_BYTES

Path = Sequence[Segment]


class Node:
    """A serving node in virtual time. `blocks` gives the tiers' sizes; an absent one has none."""

    def __init__(
        self,
        hardware: Hardware,
        variant: Variant,
        blocks: dict[str, int],
        *,
        block_tokens: int,
        score: Score,
        seed: int = 1,
        announcer: Announcer | None = None,
        tools_known: bool = False,
    ) -> None:
        """`announcer` says what clients know of returns, if the variant takes hints; `tools_known`: the trace tells
        tool calls from ends of turns."""
        self.hardware = hardware
        self.variant = variant
        self.block_tokens = block_tokens
        self.block_bytes = round(hardware.block_bytes * block_tokens / hardware.block_tokens)
        self.loop = EventLoop()
        self.score = score
        self.tree = PrefixTree(key_bytes=TRACE_KEY_BYTES)
        below = blocks if variant.lower_tiers else {}
        self.hbm = NodeTier(self.tree, blocks["hbm"], "hbm", reserves=True)
        self.dram = NodeTier(self.tree, below.get("dram", 0), "dram")
        self.nvme = NodeTier(self.tree, below.get("nvme", 0), "nvme")
        self.tiers = (self.hbm, self.dram, self.nvme)
        self.tree.may_grow = lambda leaf: not any(t.pins(leaf) or t.is_protected(leaf) for t in self.tiers)
        orders = {"hbm": variant.hbm, "dram": variant.dram, "nvme": variant.nvme}
        needs_forecast = variant.admit_by_value or variant.promote or any(name != "lru" for name in orders.values())
        self.forecast = Forecast(self.tree, block_tokens=block_tokens) if needs_forecast else None
        for tier in self.tiers:
            tier.policy = make_policy(orders[tier.name] if tier.capacity_rows else "lru", tier, self.forecast)
        links = hardware.links
        self.h2d, self.d2h = self._link("h2d", links.h2d), self._link("d2h", links.d2h)
        self.nvme_read, self.nvme_write = (
            self._link("nvme_read", links.nvme_read),
            self._link("nvme_write", links.nvme_write),
        )
        self.links = (self.h2d, self.d2h, self.nvme_read, self.nvme_write)
        self.gpu = Gpu(self.loop, hardware.compute, block_tokens, variant.overlap)
        self.gpu.resident, self.gpu.on_prefilled = self._resident, self._prefilled
        self.gpu_busy = BusyMeter(0.0)
        self.gpu.on_busy = self._meter(self.gpu_busy)
        self._link_busy = {link.name: BusyMeter(0.0) for link in (self.h2d, self.nvme_read)}
        for link in (self.h2d, self.nvme_read):
            link.on_demand = partial(self._link_used, link.name)
        self.loader = Loader(self.loop, self.tree, self.hbm, self.dram, self.h2d, self.nvme_read, self.block_bytes)
        self.storer = Storer(self.dram, self.nvme, self.d2h, self.nvme_write, self.block_bytes)
        self.speculation = Speculation(self.tree)
        self.hbm.on_evicted = self.speculation.evicted
        self.hinted: Hinted | None = None
        if variant.hints:
            self.hinted = Hinted(
                self.loop,
                self.tree,
                self.tiers,
                self.loader,
                self.speculation,
                announcer or Announcer(),
                block_bytes=self.block_bytes,
                seed=seed,
                tools_known=tools_known,
            )
            self.hinted.hold = self._hold_until_landed
            self.hinted.allows = self._may_speculate
        self.watch = Watch(self.loop, self.dram, ("h2d", "nvme_read"))
        self.admission = self._admit_by_value() if variant.admit_by_value else None
        self.promotion = self._promotion() if variant.promote else None
        self.waiting: deque[Flight] = deque()
        self.running = 0
        self.refused = 0
        self._arrived = 0

    def run(self, sessions: Sequence[Session]) -> None:
        """Serve all of them."""
        self.plan(sessions)
        self.loop.run()

    def check_integrity(self) -> None:
        """Raise IntegrityError if tiers disagree with what is under way. A full traversal of each."""
        for tier in self.tiers:
            tier.check_integrity()
        idle = not (self.running or self.waiting or len(self.loader.into_hbm) or len(self.loader.into_dram))
        if idle and any(tier.pinned or tier.outside for tier in self.tiers):
            raise IntegrityError("blocks are pinned for nobody")

    def plan(self, sessions: Sequence[Session]) -> None:
        """Put their arrivals on the clock."""
        for session in sessions:
            if session.closed:
                self.loop.at(session.at_s[0], self._arrival(session, 0))
            else:
                for position, at_s in enumerate(session.at_s):
                    self.loop.at(at_s, self._arrival(session, position))

    # --- a request ------------------------------------------------------------------------------------------------

    def _arrival(self, session: Session, position: int) -> Callable[[], None]:
        return lambda: self._arrive(session, position)

    def _arrive(self, session: Session, position: int) -> None:
        now = self.loop.now
        request = session.requests[position]
        flight = Flight(
            index=self._arrived,
            session=session,
            position=position,
            arrived_s=now,
            request=request,
            prompt_tokens=max(request.context.prompt_tokens, request.blocks * self.block_tokens, 1),
            output_blocks=-(-request.outcome.output_tokens // self.block_tokens),
        )
        self._arrived += 1
        if flight.blocks + flight.output_blocks > self.hbm.capacity_rows:
            self.refused += 1  # no engine could serve it
            self._next_turn(flight)
            return
        if self.hinted is not None:
            self.hinted.arrived(session.name)
        path = self.tree.insert(flight.chain)
        if self.forecast is not None:
            self.forecast.on_arrival(path, request.context, now)
        for tier in self.tiers:
            tier.policy.on_arrival(path, request.context, now)
        self.waiting.append(flight)
        self._admit()
        if self.variant.look_ahead and self.waiting and self.waiting[-1] is flight:
            self._look_ahead(flight)
        if self.promotion is not None:
            self.promotion.tick()

    def _admit(self) -> None:
        while self.waiting and self.running < self.hardware.compute.max_running:
            flight = self.waiting[0]
            path = self.tree.insert(flight.chain)
            new = self.hbm.unpinned_blocks(path) + flight.output_blocks
            if self.hbm.pinned + self.hbm.outside + new > self.hbm.capacity_rows:
                return
            self.waiting.popleft()
            self._begin(flight, path)

    def _begin(self, flight: Flight, path: Path) -> None:
        now, hbm = self.loop.now, self.hbm
        self.running += 1
        flight.admitted_s = now
        if flight.protected:
            self._unprotect(flight, path)
        for tier in self.tiers:
            tier.pin(path)
        hbm.outside += flight.output_blocks
        hbm.make_room(0, now, force=True)
        if self.variant.prefix_cache:
            in_hbm, in_dram, found = self._found(path)
            flight.from_hbm = in_hbm
            flight.cut = self._cut(flight, in_hbm, in_dram, found)
            flight.declined = found - flight.cut
            flight.from_dram = max(0, min(flight.cut, in_dram) - in_hbm)
            flight.from_nvme = flight.cut - in_hbm - flight.from_dram
            self.speculation.used(path, flight.cut)
            if self.promotion is not None:
                self.promotion.used(path)
            self._load(flight, path)
        self.gpu.join(flight)

    def _load(self, flight: Flight, path: Path) -> None:
        coming = self.loader.into_hbm.on_path(path, flight.from_hbm)
        for load in coming:
            self.loader.bump(load, Priority.DEMAND)
        if flight.cut > flight.from_hbm:
            coming = coming + self.loader.to_hbm(path, flight.from_hbm, flight.cut, Priority.DEMAND)
        flight.loads = coming
        flight.loads_left = len(coming)
        for load in coming:
            load.waiting.append(lambda: self._landed(flight))

    def _landed(self, flight: Flight) -> None:
        flight.loads_left -= 1
        if not flight.loads_left:
            flight.loaded_s = self.loop.now
            self.watch.waited(self.loop.now - flight.admitted_s)
            self.gpu.loaded(flight)

    def _resident(self, flight: Flight) -> int:
        """How much of a prompt need not be computed, now that its turn has come: also what others have computed since
        it was admitted."""
        if not self.variant.prefix_cache:
            return 0
        path = self.tree.insert(flight.chain)
        coming = self.loader.into_hbm.on_path(path, flight.blocks)
        there = min([load.start for load in coming if load not in flight.loads], default=flight.blocks)
        return max(flight.cut, min(self.hbm.leading(path), there))

    def _prefilled(self, flight: Flight) -> None:
        now, path = self.loop.now, self.tree.insert(flight.chain)
        self.score.first_token(flight, now)
        for segment in path:
            self.hbm.grow(segment, segment.length, now)
        self.loop.after(
            flight.request.outcome.output_tokens / self.hardware.compute.decode_tokens_per_s,
            lambda: self._finish(flight),
        )
        if self.variant.lower_tiers:
            self.storer.store(path, flight.blocks if self.admission is None else 0, now)

    def _finish(self, flight: Flight) -> None:
        now, path = self.loop.now, self.tree.insert(flight.chain)
        context, outcome = flight.request.context, flight.request.outcome
        if self.forecast is not None:
            self.forecast.on_finish(path, context, outcome, now)
        for tier in self.tiers:
            tier.policy.on_finish(path, context, outcome, now)
        if self.admission is not None:  # by value: known only now
            self.admission.busy = self.gpu_busy.share(now)
            admitted = self.admission.admit(path, now)
            self.storer.store(path, path[admitted - 1].stop if admitted else 0, now)
        for tier in self.tiers:
            tier.unpin(path)
        self.hbm.outside -= flight.output_blocks
        self.running -= 1
        if self.hinted is not None:
            self.hinted.finished(flight.session.name, flight.session, flight.position, flight.chain)
        self._next_turn(flight)
        self._admit()
        if self.hinted is not None:
            self.hinted.resume()

    def _next_turn(self, flight: Flight) -> None:
        session, following = flight.session, flight.position + 1
        if session.closed and following < len(session.requests):
            self.loop.after(session.pauses_s[following], self._arrival(session, following))

    # --- decisions ------------------------------------------------------------------------------------------------

    def _found(self, path: Path) -> tuple[int, int, int]:
        """Leading blocks in HBM; in HBM or DRAM; anywhere."""
        in_hbm = self.hbm.leading(path)
        in_dram = max(in_hbm, self.dram.leading(path))
        return in_hbm, in_dram, max(in_dram, self.nvme.leading(path))

    def _cut(self, flight: Flight, in_hbm: int, in_dram: int, found: int) -> int:
        """How many leading blocks not to compute: all found, or fewer where the gate says so."""
        n = found - in_hbm
        if not n or self.variant.gate == "none":
            return found
        cuts = np.arange(n + 1)
        over_h2d = (cuts * self.block_bytes).astype(np.float64)
        over_nvme = (np.maximum(0, cuts - (in_dram - in_hbm)) * self.block_bytes).astype(np.float64)
        now = self.loop.now
        compute = self.hardware.compute
        starts = np.minimum((in_hbm + cuts) * self.block_tokens, flight.prompt_tokens - 1)
        tokens = flight.prompt_tokens - starts
        recompute = tokens / compute.prefill_tokens_per_s
        if compute.attention_tokens:
            recompute = recompute * (1.0 + (starts + flight.prompt_tokens) / 2 / compute.attention_tokens)
        priced = self.variant.gate == "priced"
        others = self.running + len(self.waiting) - 1
        stage = [
            LinkLoad(
                LoadCurve(link.latency_s, link.bytes_per_s, link.backlog_s()),
                cumulative,
                self._link_busy[link.name].price(now, others) if priced and self.variant.price_links else 0.0,
            )
            for link, cumulative in ((self.h2d, over_h2d), (self.nvme_read, over_nvme))
        ]
        gpu = GpuLoad(self.gpu.backlog_s, self.gpu_busy.price(now, others) if priced else 0.0, self.variant.overlap)
        return in_hbm + choose_cut([stage], recompute, n, gpu).blocks

    def _look_ahead(self, flight: Flight) -> None:
        """It has to wait: keep what it needs, and bring what is on NVMe to DRAM meanwhile."""
        path = self.tree.insert(flight.chain)
        if any(2 * (t.protected + flight.blocks) > t.capacity_rows for t in (self.hbm, self.dram)):
            return
        flight.protected = True
        self.hbm.protect(path)
        self.dram.protect(path)
        in_hbm, in_dram, found = self._found(path)
        cut = self._cut(flight, in_hbm, in_dram, found)
        if cut > in_dram and self.dram.leading(path) >= in_dram:
            self._hold_until_landed(path, self.loader.to_dram(path, cut, Priority.LOOK_AHEAD), flight.chain)

    def _hold_until_landed(self, path: Path, loads: Sequence[Load], chain: bytes) -> None:
        """Nobody may take away the blocks on their way, nor those they are read from."""
        if not loads:
            return
        tiers = self.tiers
        for tier in tiers[1:]:
            tier.pin(path)
        left = len(loads)

        def landed() -> None:
            nonlocal left
            left -= 1
            if not left:
                for tier in tiers[1:]:
                    tier.unpin(self.tree.insert(chain))

        for load in loads:
            load.waiting.append(landed)

    def _conservative(self) -> bool:
        return self.variant.conservative and self.watch.conservative

    def _may_speculate(self) -> bool:
        """Nobody waits for room in HBM, and nothing is overloaded."""
        return not self.waiting and not self._conservative()

    def _link_used(self, name: str, seconds: float) -> None:
        self._link_busy[name].note(seconds, self.loop.now)
        self.watch.moved(name, seconds)

    def _admit_by_value(self) -> AdmitByValue:
        assert self.forecast is not None
        return AdmitByValue(
            self.tree,
            self.forecast,
            block_bytes=self.block_bytes,
            recompute_s=self.hardware.compute.prefill_s,
            prices=Prices(gpus=self.hardware.gpus),
        )

    def _promotion(self) -> Promotion:
        assert self.forecast is not None
        hbm, dram = self.hbm, self.dram
        args = (self.loop, self.tree, hbm, dram, self.h2d, self.loader, self.speculation, self.forecast)
        promotion = Promotion(*args, self.block_bytes)
        promotion.hold = self._hold_until_landed
        promotion.idle = lambda: self._may_speculate() and not self.h2d.backlog_s()
        return promotion

    def _unprotect(self, flight: Flight, path: Path) -> None:
        flight.protected = False
        self.hbm.unprotect(path)
        self.dram.unprotect(path)

    def _link(self, name: str, speed: LinkSpeed) -> Link:
        return Link(self.loop, name, speed.bytes_per_s, speed.latency_s)

    def _meter(self, meter: BusyMeter) -> Callable[[float], None]:
        return lambda seconds: meter.note(seconds, self.loop.now)
