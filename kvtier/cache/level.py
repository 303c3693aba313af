"""One level of the hierarchy: a tier with its residency, its eviction policy, its leases and its measured cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.cache.lease import LeaseBook
from kvtier.cache.tier_health import TierHealth
from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.index.residency import ABSENT, Residency
from kvtier.index.tree import PrefixTree, Segment, TreeListener
from kvtier.observe.metrics import Recorder
from kvtier.place.gate import LoadCurve
from kvtier.place.policy import EvictionPolicy, TierView
from kvtier.tiers.protocol import CodecStats, Tier, TierProbe

Slots = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.intp]


class Level:
    """Keeps index and medium of one tier in step. One control thread.

    `capacity_rows` is the tier's size in rows; `closed_groups` the groups of which a block is useless without the block
    before it (all but sliding windows). A strict level holds no block without the block before it; memory need not,
    where a lower level or the device has the head (docs/decisions/0001).
    """

    def __init__(
        self,
        tier: Tier,
        tree: PrefixTree,
        capacity_rows: int,
        groups: int,
        closed_groups: tuple[int, ...],
        make_policy: Callable[[TierView], EvictionPolicy],
        clock: Clock,
        recorder: Recorder,
        probe: TierProbe | None = None,
        strict: bool = True,
        below: bool = True,
    ) -> None:
        self.tier = tier
        # Below the engine's own memory: watched, and left alone when it fails.
        self.below = below
        self.name = tier.name
        self.residency = Residency(tier.name, tree, capacity_rows, groups, prefix_closed=strict and bool(closed_groups))
        self.policy = make_policy(self.residency)
        self.book = LeaseBook(self.residency, self._free_quarantined)
        self._tree = tree
        self._closed_groups = closed_groups
        # Rows of windows are useless without the whole prefix: those of whole prefixes are published first.
        self.group_order = (*closed_groups, *(group for group in range(groups) if group not in closed_groups))
        # Told of every eviction, after it: (segment, keep). A lower level may have held the head of what memory holds.
        self.on_evict: Callable[[Segment, int], None] | None = None
        # Gives up to n rows that are in nobody's way, before anything is evicted.
        self.spare: Callable[[int], int] = lambda rows: 0
        # Gives up a promise to somebody who is not there, when eviction alone makes no room. False: nothing to give up.
        self.relieve: Callable[[], bool] = lambda: False
        # Publishes rows that waited for a prompt to name their place (`Orphans`).
        self.adopt: Callable[[bytes], None] = lambda chain: None
        # Transfers handed to the mover and not taken in again.
        self.moving = 0
        self.listeners: list[TreeListener] = []
        self._clock = clock
        self._recorder = recorder
        # Whether rows come back as other bytes than they went: not for requests that did not agree to that.
        self.lossy = False
        self._codec_counted = CodecStats()
        self._quarantine: set[int] = set()
        self.health = TierHealth(tier.name, clock, recorder, probe)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.tier.row_bytes

    def curve(self, backlog_bytes: int, budget_bytes_per_s: float = 0.0) -> LoadCurve:
        """What a read costs now, with `backlog_bytes` of reads queued before it, within a budget (0: none)."""
        cost = self.health.read
        rate = min(cost.bytes_per_s, budget_bytes_per_s or float("inf"))
        return LoadCurve(cost.latency_s, rate, backlog_bytes / rate)

    def copied(self, direction: str, rows: int) -> None:
        """Count rows the engine has copied out of ("read") or into ("write") this level."""
        self._recorder.add("kvtier_bytes", rows * self.row_bytes, self.name, direction)

    def make_room(self, rows: int) -> Slots | None:
        """Reserve `rows` slots, evicting by the policy where needed. None, and nothing evicted beyond what the policy
        named, if there is no room."""
        slots = self._make_room(rows)
        while slots is None and rows <= self.residency.capacity_rows and self.relieve():
            slots = self._make_room(rows)
        return slots

    def release(self, slots: Slots) -> None:
        """Give slots back to the tier. If it fails they are lost until it is opened again, and that is counted."""
        try:
            self.tier.release(slots)
        except TierError as error:
            self.health.asked(error.reason)

    def _reserve(self, rows: int) -> Slots | None:
        try:
            return self.tier.reserve(rows)
        except TierError as error:
            self.health.asked(error.reason)
            return None

    def _make_room(self, rows: int) -> Slots | None:
        slots = self._reserve(rows)
        if slots is not None or rows > self.residency.capacity_rows:
            return slots
        # Rows reserved by stores still under way are neither free nor evictable: ask the tier, not the index.
        free = self.residency.capacity_rows - self.tier.stats().used_rows
        free += self.spare(rows - max(0, free))
        if free >= rows:
            return self._reserve(rows)
        for victim in self.policy.victims(rows - max(0, free), self._clock.now()):
            self.evict(victim.segment, victim.keep, "policy")
        return self._reserve(rows)

    def evict(self, segment: Segment, keep: int, reason: str) -> int:
        """Drop the rows of a segment from offset `keep` on; returns how many."""
        old_extent = self.residency.extent(segment)
        slots = self.residency.drop(segment, keep)
        if len(slots):
            self.release(slots)
            self._recorder.add("kvtier_evictions", len(slots), self.name, reason)
            self.policy.on_evicted(segment, old_extent, self._clock.now())
            if self.on_evict is not None:
                self.on_evict(segment, keep)
        return len(slots)

    def evict_below(self, segment: Segment, keep: int, reason: str) -> None:
        """Drop a block and everything that builds on it: offset `keep` of `segment` and all its descendants.
        Pinned rows stay, and so do the rows before them."""
        stack, order = list(segment.children.values()), []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            if any(self.residency.extent(child) for child in node.children.values()):
                continue
            self.evict(node, self.residency.evictable_from(node), reason)
        if not any(self.residency.extent(child) for child in segment.children.values()):
            self.evict(segment, max(keep, self.residency.evictable_from(segment)), reason)

    def publish(
        self, chain: bytes, group: int, blocks: Blocks, slots: Slots, elsewhere: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Make written rows visible: block `blocks[i]` (ascending) of `chain` is in `slots[i]`.

        Rows that are resident already, or would be a tail without its head, are given back to the tier; `elsewhere`
        marks the blocks of the chain whose head may count as present because another level has it. Returns which rows
        became visible.
        """
        need = int(blocks[-1]) + 1 if len(blocks) else 0
        match = self._tree.walk(chain)
        if match.blocks < need:
            self._tree.insert(chain)
            match = self._tree.walk(chain)
        there = self.residency.slots_of(match) != ABSENT
        resident = there[:, group]
        wanted = ~resident[blocks]
        if group in self._closed_groups:
            after = resident.copy()
            if elsewhere is not None:
                after[: len(elsewhere)] |= elsewhere[: len(after)]
            after[blocks] = True
            holes = np.flatnonzero(~after)
            wanted &= blocks < (int(holes[0]) if holes.size else len(after))
        elif self.residency.prefix_closed:
            wanted &= there[blocks, self._closed_groups[0]]
        if not wanted.all():
            self.release(slots[~wanted])
            self._recorder.add("kvtier_stores_refused", int((~wanted).sum()), self.name, "superseded")
        if wanted.any():
            before = [(segment, self.residency.extent(segment)) for segment in match.path]
            self.residency.publish(match.path, blocks[wanted], group, slots[wanted])
            now = self._clock.now()
            for segment, extent in before:
                if self.residency.extent(segment) != extent:
                    self.policy.on_resident(segment, extent, now)
            self._recorder.add("kvtier_blocks_stored", int(wanted.sum()), self.name)
        visible: npt.NDArray[np.bool_] = wanted
        return visible

    def clear(self) -> int:
        """Forget every row. Rows under I/O are quarantined: free only when their copy has ended."""
        self.spare(self.residency.capacity_rows)
        segments = [(s, self.residency.extent(s)) for s in self._tree.segments() if self.residency.extent(s)]
        slots = self.residency.clear()
        pinned = self.residency.is_pinned(slots)
        self._quarantine.update(slots[pinned].tolist())
        if (~pinned).any():
            self.release(slots[~pinned])
        now = self._clock.now()
        for segment, extent in segments:
            self.policy.on_evicted(segment, extent, now)
        self._recorder.add("kvtier_evictions", len(slots), self.name, "reset")
        return len(slots)

    def gauges(self) -> None:
        """Write this level's gauges to the recorder."""
        stats = self.tier.stats()
        self._recorder.set("kvtier_resident_bytes", self.residency.resident_rows * self.row_bytes, self.name)
        self._recorder.set("kvtier_capacity_bytes", stats.cap_bytes, self.name)
        self._recorder.set("kvtier_medium_bytes", stats.medium_bytes, self.name)
        if self.below:
            self.health.gauges()
        if stats.dedup_ratio is not None:
            self._recorder.set("kvtier_dedup_ratio", stats.dedup_ratio, self.name)
        if stats.codec is not None:
            self._count_codec(stats.codec)

    def _count_codec(self, now: CodecStats) -> None:
        """Count what the tier's codec did since the last call."""
        add, name, then = self._recorder.add, self.name, self._codec_counted
        self._codec_counted = now
        for form in ("plain", "encoded"):
            for direction, verb in (("write", "written"), ("read", "read")):
                field = f"{form}_{verb}_bytes"
                add("kvtier_codec_bytes", getattr(now, field) - getattr(then, field), name, direction, form)
        add("kvtier_codec_seconds", now.encode_s - then.encode_s, name, "write")
        add("kvtier_codec_seconds", now.decode_s - then.decode_s, name, "read")
        for reason, count in now.refused.items():
            add("kvtier_codec_refused", count - then.refused.get(reason, 0), name, reason)

    def _free_quarantined(self, slots: Slots) -> None:
        if self._quarantine:
            freed = [slot for slot in slots.tolist() if slot in self._quarantine]
            self._quarantine.difference_update(freed)
            if freed:
                self.release(np.array(freed, np.int32))
