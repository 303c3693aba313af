"""Who came back: sessions inferred from the prefix tree alone, without session ids.

A request that goes on below the last known segment of its path continues the one live visit that covers that segment.
If several live visits cover it the request is a new branch, unless a visit ended exactly there. What a continued visit
leaves behind on another path becomes an abandoned tail. Segments covered by two or more live visits are shared; each
stretch of them with the same past is one subject (a run) whose event is the next touch of its deepest block.

Subjects know the blocks they cover as depths, not as segments, so that a split costs a few copies and nothing else.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.index.tree import PrefixTree, Segment
from kvtier.predict.subjects import NOTHING_KNOWN, SubjectKind, Subjects

_NEWEST_GAP_SHARE = 0.3  # in the moving average of log gaps
_NONE = -1


@dataclass(slots=True)
class RunTouch:
    """A shared run as a request left it."""

    run: int
    serial: int
    gap_s: float
    arrivals: int
    count: int
    depth_blocks: int


@dataclass(slots=True)
class Arrival:
    """What the tree said about a request: the visit it makes, and how it relates to what was known."""

    visit: int
    serial: int
    gap_s: float  # since the visit it continues, negative if it continues none
    new_blocks: int
    branched: bool  # a new branch below known segments
    tool: int  # the tool the continued visit had called, -1 if none or not known
    runs: list[RunTouch]


class SubjectEvents(Protocol):
    """Told of what happens to subjects."""

    def returned(self, subject: int, now: float) -> None:
        """It came back; it is freed after this call."""
        ...

    def left_behind(self, tail: int) -> None:
        """A new abandoned tail, whose row is not set yet."""
        ...


class Sessions:
    """State by segment, and the rules above. A TreeListener; one writer."""

    def __init__(self, tree: PrefixTree, subjects: Subjects, events: SubjectEvents, now: float) -> None:
        self._tree = tree
        self._subjects = subjects
        self._events = events
        n = max(64, tree.id_limit)
        self._count = array("i", bytes(4 * n))  # live visits whose path covers the segment
        self._ends = array("i", [_NONE]) * n  # the live visit whose path ends with the segment
        self._arrivals = array("i", bytes(4 * n))
        self._seen = array("i", bytes(4 * n))  # blocks already there at the last touch
        self._birth_s = array("d", [now]) * n
        self._touched_s = array("d", [now]) * n
        self.owner: npt.NDArray[np.int32] = np.full(n, NOTHING_KNOWN, np.int32)
        tree.listen(self)

    @property
    def nbytes(self) -> int:
        """Bytes held by state by segment."""
        columns = (self._count, self._ends, self._arrivals, self._seen, self._birth_s, self._touched_s)
        return self.owner.nbytes + sum(len(column) * column.itemsize for column in columns)

    def touched_s(self, segment: Segment) -> float:
        """When a request last passed through the segment."""
        return self._touched_s[segment.id]

    def is_shared(self, segment: Segment) -> bool:
        """Several live visits pass through the segment."""
        return self._count[segment.id] > 1

    def arrivals(self, segment: Segment) -> int:
        """Requests that passed through the segment."""
        return self._arrivals[segment.id]

    def arrive(self, path: Sequence[Segment], now: float) -> Arrival:
        """Settle what this request answers and start its visit: running, row not set. `path` is not empty."""
        subjects, count = self._subjects, self._count
        known = len(path)
        while known and not self._arrivals[path[known - 1].id]:
            known -= 1
        new_blocks = sum(segment.length - self._seen[segment.id] for segment in path)
        before = self._continued(path[known - 1], known == len(path)) if known else _NONE
        visit = subjects.new(SubjectKind.VISIT, now, 0, path[-1].stop)
        subjects.hold(visit)
        gap_s, tool, top = -1.0, -1, 0
        if before != _NONE:
            last = path[known - 1]
            top = subjects.top[before]
            if not subjects.running[before]:
                gap_s, tool = now - float(subjects.since_s[before]), subjects.tool[before]
                self._inherit(visit, before, gap_s)
                self._events.returned(before, now)
            if self._ends[last.id] == before:
                self._ends[last.id] = _NONE
            self._leave_behind(before, last, now)
            subjects.free(before)
        for i, segment in enumerate(path):
            if before == _NONE or i >= known or segment.depth < top:
                count[segment.id] += 1
        self._end_at(path[-1], visit)
        runs = self._touch(path, visit, now)
        branched = before == _NONE and known > 0
        return Arrival(visit, subjects.serial[visit], gap_s, new_blocks, branched, tool, runs)

    def grow(self, arrival: Arrival, path: Sequence[Segment], now: float) -> None:
        """The path of a running visit became longer: its output is in the tree."""
        visit, subjects = arrival.visit, self._subjects
        end = subjects.end[visit]
        if path[-1].stop <= end:
            return
        added = [segment for segment in path if segment.stop > end]
        self._ends[subjects.end_segment[visit]] = _NONE
        if added[0].depth < end:  # the leaf it ended at grew in place
            self._seen[added[0].id] = added[0].length
            added = added[1:]
        for segment in added:
            self._count[segment.id] += 1
        subjects.end[visit] = path[-1].stop
        self._end_at(path[-1], visit)
        arrival.runs += self._touch(added, visit, now)

    def is_current(self, subject: int, serial: int) -> bool:
        """The subject with this id is still the one it was."""
        return self._subjects.serial[subject] == serial and self._subjects.kind[subject] != SubjectKind.FREE

    def check_integrity(self) -> None:
        """Raise IntegrityError if owners, ends and counts disagree with the live subjects. A full traversal."""
        subjects, live = self._subjects, (SubjectKind.VISIT, SubjectKind.TAIL)
        covered: dict[int, int] = {}
        ended: set[int] = set()
        for segment in self._tree.segments():
            owner, visit = int(self.owner[segment.id]), self._ends[segment.id]
            if subjects.kind[owner] == SubjectKind.FREE:
                raise IntegrityError(f"{segment!r} belongs to subject {owner}, which was freed")
            if visit == _NONE:
                continue
            if subjects.kind[visit] not in live or visit in ended:
                raise IntegrityError(f"the visit {visit} that ends at {segment!r} is not alive or ends twice")
            ended.add(visit)
            node = segment
            while node.parent is not None and node.depth >= subjects.top[visit]:
                covered[node.id] = covered.get(node.id, 0) + 1
                node = node.parent
        for segment in self._tree.segments():
            if self._count[segment.id] != covered.get(segment.id, 0):
                raise IntegrityError(f"{segment!r} counts {self._count[segment.id]} visits")
        if len(ended) != sum(kind in live for kind in subjects.kind):
            raise IntegrityError(f"{len(ended)} visits end somewhere, others are left over")

    def on_create(self, segment: Segment) -> None:
        self._reset(segment.id)

    def on_extend(self, segment: Segment, old_length: int) -> None:
        return

    def on_split(self, head: Segment, tail: Segment) -> None:
        h, t = head.id, tail.id
        self._reset(h)
        self._count[h], self._arrivals[h] = self._count[t], self._arrivals[t]
        self._birth_s[h], self._touched_s[h] = self._birth_s[t], self._touched_s[t]
        self.owner[h] = self.owner[t]
        seen = self._seen[t]
        self._seen[h], self._seen[t] = min(seen, head.length), max(0, seen - head.length)
        if seen <= head.length:  # the leaf had grown by blocks that no request has passed through yet
            visit = self._ends[t]
            self._reset(t)
            self._ends[h] = visit
            if visit != _NONE:
                self._subjects.end_segment[visit] = h

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        self._seen[segment.id] = min(self._seen[segment.id], segment.length)
        for subject in (self._ends[segment.id], int(self.owner[segment.id])):
            if subject > NOTHING_KNOWN:
                self._subjects.end[subject] = min(self._subjects.end[subject], segment.stop)

    def on_remove(self, segment: Segment) -> None:
        subjects, parent = self._subjects, segment.parent
        visit, owner = self._ends[segment.id], int(self.owner[segment.id])
        if visit != _NONE:
            if parent is not None and self._owns_above(segment, visit):
                subjects.end[visit] = segment.depth
                self._end_at(parent, visit)
            else:
                self._forget(visit, segment)
        if owner != NOTHING_KNOWN and subjects.kind[owner] == SubjectKind.RUN:
            subjects.end[owner] = min(subjects.end[owner], segment.depth)
            if subjects.end[owner] <= subjects.top[owner]:
                subjects.free(owner)
        self._reset(segment.id)

    def _continued(self, last: Segment, ends_here: bool) -> int:
        """The live visit continued by a request whose last known segment this is; -1 for a new branch."""
        subjects = self._subjects
        ended = self._ends[last.id]
        if ended != _NONE and ends_here:
            return ended
        owner = int(self.owner[last.id])
        if self._count[last.id] != 1 or subjects.running[owner]:
            return _NONE
        return owner if subjects.kind[owner] in (SubjectKind.VISIT, SubjectKind.TAIL) else _NONE

    def _inherit(self, visit: int, before: int, gap_s: float) -> None:
        subjects = self._subjects
        subjects.turn[visit] = subjects.turn[before] + 1
        subjects.birth_s[visit] = subjects.birth_s[before]
        subjects.ewma_log_gap[visit] = _average(subjects.ewma_log_gap[before], gap_s)

    def _leave_behind(self, before: int, last: Segment, now: float) -> None:
        """What `before` covered below `last` becomes an abandoned tail."""
        subjects, owner = self._subjects, self.owner
        if subjects.end[before] <= last.stop:
            return
        node = self._tree.segment(subjects.end_segment[before])
        tail = subjects.new(SubjectKind.TAIL, now, last.stop, subjects.end[before])
        subjects.turn[tail], subjects.birth_s[tail] = subjects.turn[before], subjects.birth_s[before]
        subjects.ewma_log_gap[tail] = subjects.ewma_log_gap[before]
        self._events.left_behind(tail)
        self._end_at(node, tail, instead_of=before)
        while node is not last and node.parent is not None:
            if owner[node.id] == before:
                owner[node.id] = tail
            node = node.parent

    def _end_at(self, last: Segment, visit: int, instead_of: int = _NONE) -> None:
        """`visit` ends at `last`; another live visit that ended there can no longer be told from it."""
        other = self._ends[last.id]
        self._ends[last.id] = visit
        self._subjects.end_segment[visit] = last.id
        if other not in (_NONE, visit, instead_of):
            self._forget(other, last)

    def _forget(self, visit: int, last: Segment) -> None:
        """A visit that ended at `last` is given up without an event: the outcome will never be known."""
        top, node = self._subjects.top[visit], last
        while node.parent is not None and node.depth >= top:
            self._count[node.id] -= 1
            if int(self.owner[node.id]) == visit:
                self.owner[node.id] = NOTHING_KNOWN
            node = node.parent
        self._subjects.free(visit)

    def _owns_above(self, segment: Segment, visit: int) -> bool:
        """Some segment above is the visit's alone."""
        top, node = self._subjects.top[visit], segment.parent
        while node is not None and node.parent is not None and node.depth >= top:
            if int(self.owner[node.id]) == visit:
                return True
            node = node.parent
        return False

    def _touch(self, path: Sequence[Segment], visit: int, now: float) -> list[RunTouch]:
        """Settle the shared runs touched, form the new ones, and make `visit` the owner of the rest of the path."""
        subjects, owner = self._subjects, self.owner
        touched: dict[int, int] = {}  # old run -> depth to which it was touched
        groups: list[tuple[tuple[int, int, int], list[Segment]]] = []
        for segment in path:
            i = segment.id
            if not self._arrivals[i]:
                self._birth_s[i] = now
            self._arrivals[i] += 1
            self._seen[i] = segment.length
            self._touched_s[i] = now
            old = int(owner[i])
            if subjects.kind[old] != SubjectKind.RUN:
                old = NOTHING_KNOWN
            elif old != NOTHING_KNOWN:
                touched[old] = segment.stop
            if self._count[i] < 2:
                owner[i] = visit
                continue
            key = (self._count[i], self._arrivals[i], old)
            if groups and groups[-1][0] == key:
                groups[-1][1].append(segment)
            else:
                groups.append((key, [segment]))
        touches = [self._form_run(key, segments, now) for key, segments in groups]
        for run, stop in touched.items():
            if stop >= subjects.end[run]:
                self._events.returned(run, now)
                subjects.free(run)
            else:
                subjects.top[run] = stop  # what lies deeper waits on
        return touches

    def _form_run(self, key: tuple[int, int, int], segments: Sequence[Segment], now: float) -> RunTouch:
        subjects = self._subjects
        count, arrivals, old = key
        run = subjects.new(SubjectKind.RUN, now, segments[0].depth, segments[-1].stop)
        gap_s = -1.0
        if old == NOTHING_KNOWN:
            subjects.birth_s[run] = self._birth_s[segments[0].id]
        else:
            gap_s = now - float(subjects.since_s[old])
            subjects.birth_s[run] = subjects.birth_s[old]
            subjects.ewma_log_gap[run] = _average(subjects.ewma_log_gap[old], gap_s)
        for segment in segments:
            self.owner[segment.id] = run
        return RunTouch(run, subjects.serial[run], gap_s, arrivals, count, segments[0].depth)

    def _reset(self, i: int) -> None:
        while i >= len(self._count):
            self._grow()
        self._count[i] = self._arrivals[i] = self._seen[i] = 0
        self._ends[i] = _NONE
        self.owner[i] = NOTHING_KNOWN

    def _grow(self) -> None:
        n = len(self._count)
        for column in (self._count, self._arrivals, self._seen):
            column.frombytes(bytes(4 * n))
        self._ends.extend([_NONE] * n)
        for times in (self._birth_s, self._touched_s):
            times.frombytes(bytes(8 * n))
        self.owner = np.concatenate([self.owner, np.full(n, NOTHING_KNOWN, np.int32)])


def _average(log_gap: float, gap_s: float) -> float:
    """Moving average of log2 gaps."""
    newest = math.log2(max(gap_s, 0.25))
    return newest if math.isnan(log_gap) else log_gap + _NEWEST_GAP_SHARE * (newest - log_gap)
