"""Moving blocks up: from DRAM or NVMe into HBM, from NVMe into DRAM.

Room is given when a load begins; until it has landed, whoever meets the blocks waits for it and, if it is more urgent,
pushes it. What is read from NVMe is kept in DRAM as well. A read and its copy to the device overlap: the read is cut
into parcels, each copied on as soon as it is there, ever smaller so that little is left when the last one arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.index.tree import PrefixTree, Segment
from kvtier.sim.node.events import EventLoop
from kvtier.sim.node.flight import Load
from kvtier.sim.node.links import CHUNK_BYTES, Link, Priority
from kvtier.sim.node.tier import NodeTier

_PARCEL_BYTES = 32 * CHUNK_BYTES  # at most


class Arriving:
    """Loads under way into one tier, by segment. A TreeListener."""

    def __init__(self, tree: PrefixTree) -> None:
        self._by_segment: dict[int, list[Load]] = {}
        tree.listen(self)

    def __len__(self) -> int:
        return len(self._by_segment)

    def add(self, load: Load) -> None:
        """A load begins."""
        self._by_segment.setdefault(load.segment.id, []).append(load)

    def remove(self, load: Load) -> None:
        """A load has landed."""
        node: Segment | None = load.segment
        while node is not None and node.stop > load.start:
            held = self._by_segment.get(node.id)
            if held is not None and load in held:
                held.remove(load)
                if not held:
                    del self._by_segment[node.id]
            node = node.parent

    def on_path(self, path: Sequence[Segment], stop: int) -> list[Load]:
        """Loads of blocks before depth `stop` of a path, each once, head first."""
        if not self._by_segment:
            return []
        found: list[Load] = []
        for segment in path:
            if segment.depth >= stop:
                break
            for load in self._by_segment.get(segment.id, ()):
                if load.start < stop and load not in found:
                    found.append(load)
        return found

    def on_create(self, segment: Segment) -> None:
        return

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        held = self._by_segment.get(tail.id)
        if not held:
            return
        above = [load for load in held if load.start < head.stop]
        below = [load for load in held if load.stop > head.stop]
        if above:
            self._by_segment[head.id] = above
        for load in above:
            if load.segment is tail and load.stop <= head.stop:
                load.segment = head
        if below:
            self._by_segment[tail.id] = below
        else:
            del self._by_segment[tail.id]

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        return

    def on_remove(self, segment: Segment) -> None:
        return


class Loader:
    """Begins loads and lands them. `on_landed` is told of everything that has arrived in HBM."""

    def __init__(
        self,
        loop: EventLoop,
        tree: PrefixTree,
        hbm: NodeTier,
        dram: NodeTier,
        h2d: Link,
        nvme_read: Link,
        block_bytes: int,
    ) -> None:
        self._loop = loop
        self._hbm = hbm
        self._dram = dram
        self._h2d = h2d
        self._nvme_read = nvme_read
        self._block_bytes = block_bytes
        self.into_hbm = Arriving(tree)
        self.into_dram = Arriving(tree)

    def to_hbm(self, path: Sequence[Segment], start: int, stop: int, priority: Priority) -> list[Load]:
        """Load blocks [start, stop) of a path. There is room for them in HBM, what is before `start` is resident, and
        the path is pinned in DRAM and NVMe until all have landed."""
        in_dram = min(self._dram.leading(path), stop)
        kept = in_dram
        if start <= in_dram < stop:  # DRAM, too, takes no tail without its head
            kept += self._dram.make_room(stop - in_dram, self._loop.now)
        loads: list[Load] = []
        for segment in path:
            a, b = max(start, segment.depth), min(stop, segment.stop)
            if a >= b:
                continue
            for low, high in ((a, min(b, in_dram)), (max(a, in_dram), b)):
                if low < high:
                    load = Load(self._hbm, segment, low, high, priority)
                    self._hbm.grow(segment, high - segment.depth, self._loop.now)
                    self.into_hbm.add(load)
                    if high <= in_dram:
                        self._from_dram(load, path)
                    else:
                        self._from_nvme(load, min(high, kept))
                    loads.append(load)
        return loads

    def to_dram(self, path: Sequence[Segment], stop: int, priority: Priority) -> list[Load]:
        """Load the blocks before `stop` that DRAM lacks from NVMe, as far as there is room. The path is pinned in DRAM
        and NVMe until all have landed."""
        start = self._dram.leading(path)
        stop = start + self._dram.make_room(stop - start, self._loop.now) if stop > start else start
        loads: list[Load] = []
        for segment in path:
            a, b = max(start, segment.depth), min(stop, segment.stop)
            if a < b:
                load = Load(self._dram, segment, a, b, priority)
                self._dram.grow(segment, b - segment.depth, self._loop.now)
                self.into_dram.add(load)
                job = self._nvme_read.submit(self._bytes(b - a), priority, lambda load=load: self.land(load))  # type: ignore[misc]
                load.jobs.append((self._nvme_read, job))
                load.expected_s = self._loop.now + self._nvme_read.backlog_s(priority)
                loads.append(load)
        return loads

    def estimate_s(self, in_hbm: int, in_dram: int, found: int) -> float:
        """Seconds to bring up what is found beyond HBM, behind the demand now queued."""
        over_h2d = self._h2d.backlog_s() + self._bytes(found - in_hbm) / self._h2d.bytes_per_s
        over_nvme = self._nvme_read.backlog_s() + self._bytes(found - in_dram) / self._nvme_read.bytes_per_s
        return max(over_h2d if found > in_hbm else 0.0, over_nvme if found > in_dram else 0.0)

    def bump(self, load: Load, priority: Priority) -> None:
        """Somebody more urgent waits for this load."""
        if load.done or priority >= load.priority:
            return
        load.priority = priority
        if load.after is not None:
            self.bump(load.after, priority)
        for link, job in load.jobs:
            link.bump(job, priority)
        waits_s = [link.backlog_s(priority) for link, _ in load.jobs]
        if load.after is not None:
            waits_s.append(load.after.expected_s - self._loop.now + self._h2d.backlog_s(priority))
        load.expected_s = self._loop.now + max(waits_s, default=0.0)

    def land(self, load: Load) -> None:
        """The last byte is there."""
        load.done = True
        (self.into_hbm if load.tier is self._hbm else self.into_dram).remove(load)
        for told in load.waiting:
            told()

    def _from_dram(self, load: Load, path: Sequence[Segment]) -> None:
        """Copy what DRAM has, or will have in a moment."""
        n_bytes = self._bytes(load.stop - load.start)
        coming = [c for c in self.into_dram.on_path(path, load.stop) if c.stop > load.start]
        if not coming:
            self._copy(load, n_bytes, last=True)
            load.expected_s = self._loop.now + self._h2d.backlog_s(load.priority)
            return
        last = coming[-1]
        for above in coming:
            self.bump(above, load.priority)
        load.after = last
        load.expected_s = max(c.expected_s for c in coming) + n_bytes / self._h2d.bytes_per_s
        last.waiting.append(lambda: self._copy(load, n_bytes, last=True))

    def _from_nvme(self, load: Load, kept: int) -> None:
        """Read and copy on, parcel by parcel; the blocks before depth `kept` stay in DRAM as well."""
        twin: Load | None = None
        if kept > load.start:
            twin = Load(self._dram, load.segment, load.start, kept, load.priority)
            self._dram.grow(load.segment, kept - load.segment.depth, self._loop.now)
            self.into_dram.add(twin)
        left = self._bytes(load.stop - load.start)
        smallest = min(self._bytes(1), CHUNK_BYTES)
        while left > 0:
            parcel = min(left, _PARCEL_BYTES, max(smallest, left / 2))
            left = left - parcel if left - parcel > 1.0 else 0.0
            job = self._nvme_read.submit(parcel, load.priority, self._read(load, twin, parcel, last=not left))
            load.jobs.append((self._nvme_read, job))
            if twin is not None:
                twin.jobs.append((self._nvme_read, job))
        load.expected_s = self._loop.now + self._nvme_read.backlog_s(load.priority)
        if twin is not None:
            twin.expected_s = load.expected_s
        load.expected_s += smallest / self._h2d.bytes_per_s
        load.behind = self._h2d

    def _read(self, load: Load, twin: Load | None, parcel: float, *, last: bool) -> Callable[[], None]:
        def arrived() -> None:
            self._copy(load, parcel, last=last)
            if last and twin is not None:
                self.land(twin)

        return arrived

    def _copy(self, load: Load, n_bytes: float, *, last: bool) -> None:
        job = self._h2d.submit(n_bytes, load.priority, (lambda: self.land(load)) if last else _nothing)
        load.jobs.append((self._h2d, job))
        load.after = None
        if last:
            load.behind = None

    def _bytes(self, blocks: int) -> float:
        return float(blocks * self._block_bytes)


def _nothing() -> None:
    return
