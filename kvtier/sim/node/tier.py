"""A tier of the node: what is resident, what running requests hold on to, what should stay for a while.

Adds to the single-tier replay's `SimTier` what time brings with it: pins (a request reads or writes these segments),
protection (a queued or hinted request will need them; gives way only when nothing else is left), and blocks that have
been given room and are not there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.place.policy import EvictionPolicy
from kvtier.sim.tier import SimTier


class NodeTier(SimTier):
    """One tier. With `reserves`, room is kept for all blocks of a pinned segment, also those still to be computed."""

    def __init__(self, tree: PrefixTree, capacity_blocks: int, name: str, *, reserves: bool = False) -> None:
        self._reserves = reserves
        self._pins = [0] * max(1, tree.id_limit)
        self._protections = [0] * max(1, tree.id_limit)
        super().__init__(tree, capacity_blocks, name)
        self.policy: EvictionPolicy
        self.outside = 0  # blocks in use that the tree does not know (output of running requests)
        self.pinned = 0  # blocks of pinned segments
        self.reserved = 0  # of these, not resident yet
        self.protected = 0  # blocks of protected segments
        self.forced = 0  # blocks evicted although protected, because nothing else was left
        self.evicted = 0
        self.on_evicted: Callable[[Segment, int], None] = lambda segment, keep: None
        self._lifted = False

    def pins(self, segment: Segment) -> int:
        """How many requests hold on to this segment."""
        return self._pins[segment.id]

    def is_protected(self, segment: Segment) -> bool:
        """A queued or hinted request will need it."""
        return self._protections[segment.id] > 0

    def pin(self, path: Sequence[Segment]) -> None:
        """Hold on to a path."""
        pins, extents = self._pins, self._extents
        for segment in path:
            if not pins[segment.id]:
                self.pinned += segment.length
                self.reserved += segment.length - extents[segment.id]
            pins[segment.id] += 1

    def unpin(self, path: Sequence[Segment]) -> None:
        """Let go of a path."""
        pins, extents = self._pins, self._extents
        for segment in path:
            pins[segment.id] -= 1
            if not pins[segment.id]:
                self.pinned -= segment.length
                self.reserved -= segment.length - extents[segment.id]

    def protect(self, path: Sequence[Segment]) -> None:
        """Keep what is resident of a path for a while."""
        for segment in path:
            if not self._protections[segment.id]:
                self.protected += segment.length
            self._protections[segment.id] += 1

    def unprotect(self, path: Sequence[Segment]) -> None:
        """The wait is over."""
        for segment in path:
            self._protections[segment.id] -= 1
            if not self._protections[segment.id]:
                self.protected -= segment.length

    def unprotected_blocks(self, path: Sequence[Segment]) -> int:
        """Blocks of a path that are not protected: what protecting it would add."""
        protections = self._protections
        return sum(segment.length for segment in path if not protections[segment.id])

    def unpinned_blocks(self, path: Sequence[Segment]) -> int:
        """Blocks of a path that nobody has pinned: what pinning it would add."""
        pins = self._pins
        return sum(segment.length for segment in path if not pins[segment.id])

    def evictable_from(self, segment: Segment) -> int:
        i = segment.id
        if self._pins[i] or (self._protections[i] and not self._lifted):
            return self._extents[i]
        return 0

    def make_room(self, blocks: int, now: float, *, force: bool = False) -> int:
        """Evict until `blocks` more would fit, or nothing more may go; returns how many fit. With `force`, protection
        gives way in the end."""
        excess = self._used() + blocks - self._capacity
        while excess > 0:
            gone = self._evict_some(excess, now)
            if not gone and force and not self._lifted:
                self._lifted = True
                gone = self._evict_some(excess, now)
                self._lifted = False
                self.forced += gone
            if not gone:
                break
            excess = self._used() + blocks - self._capacity
        return max(0, min(blocks, blocks - excess))

    def grow(self, segment: Segment, extent: int, now: float) -> None:
        """Blocks came: `segment` now has its first `extent` ones. Its parent must be whole."""
        old = self._extents[segment.id]
        if extent <= old:
            return
        if extent > segment.length or not (
            segment.parent is None or self._extents[segment.parent.id] == segment.parent.length
        ):
            raise IntegrityError(f"{self.name}: {segment!r} cannot have {extent} blocks without its head")
        self._extents[segment.id] = extent
        self._resident += extent - old
        if self._pins[segment.id]:
            self.reserved -= extent - old
        if not old:
            self._appear(segment)
        self.policy.on_resident(segment, old, now)

    def check_integrity(self) -> None:
        """SimTier's, and the counts of pins and protection."""
        super().check_integrity()
        pinned = [s for s in self.tree.segments() if self._pins[s.id]]
        protected = sum(s.length for s in self.tree.segments() if self._protections[s.id])
        counts = (sum(s.length for s in pinned), sum(s.length - self._extents[s.id] for s in pinned), protected)
        if counts != (self.pinned, self.reserved, self.protected) or min((0, *self._pins, *self._protections)) < 0:
            raise IntegrityError(f"{self.name}: {counts} pinned, reserved, protected blocks; other counts are kept")
        if self._used() > self._capacity:
            raise IntegrityError(f"{self.name} is {self._used() - self._capacity} blocks over its capacity")

    def _used(self) -> int:
        return self._resident + self.outside + (self.reserved if self._reserves else 0)

    def _evict_some(self, blocks: int, now: float) -> int:
        gone = 0
        for victim in self.policy.victims(blocks, now):
            old = self.evict(victim.segment, victim.keep)
            gone += old - victim.keep
            self.policy.on_evicted(victim.segment, old, now)
            self.on_evicted(victim.segment, victim.keep)
        self.evicted += gone
        return gone

    def on_split(self, head: Segment, tail: Segment) -> None:
        super().on_split(head, tail)
        self._pins[head.id] = self._pins[tail.id]
        self._protections[head.id] = self._protections[tail.id]

    def _reserve(self, segment: Segment) -> None:
        super()._reserve(segment)
        missing = len(self._extents) - len(self._pins)
        if missing > 0:
            self._pins.extend([0] * missing)
            self._protections.extend([0] * missing)
        self._pins[segment.id] = self._protections[segment.id] = 0
