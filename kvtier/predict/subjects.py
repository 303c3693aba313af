"""The subjects of the forecast as columns: visits, abandoned tails and shared runs, indexed by subject id.

A visit is one finished request waiting for its session to come back. An abandoned tail is what a session left behind
when it went on along another path. A shared run is a stretch of segments that several live visits pass through, and
waits for the next touch. Subject 0 stands for "nothing known" and is never freed.

Columns read in batches are numpy arrays, columns read one by one are `array`s (twice as fast for that).
"""

from __future__ import annotations

import math
from array import array
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.predict.features import blank_row
from kvtier.predict.hazard import EDGES, Float, empty_rows

_FIRST_EDGE_S = float(EDGES[1])
NOTHING_KNOWN = 0  # the subject of whatever was never seen in a request


class SubjectKind(IntEnum):
    """What a subject is; FREE ids may be given out again."""

    FREE = 0
    VISIT = 1
    TAIL = 2
    RUN = 3


class Subjects:
    """Columns by subject id. Growing doubles the arrays: do not hold on to them across `new`."""

    def __init__(self, now: float) -> None:
        n = 64
        self.kind = array("b", bytes(n))
        self.serial = array("q", bytes(8 * n))  # tells a subject from an earlier one with the same id
        self.running = np.zeros(n, np.bool_)
        self.since_s: Float = np.zeros(n)  # when the waiting began
        self.due_s: Float = np.full(n, np.inf)  # when the bucket being waited through ends
        self.rows = empty_rows(n)
        self.bucket: npt.NDArray[np.int8] = np.zeros(n, np.int8)  # the bucket being waited through
        self.curve_bucket: npt.NDArray[np.int8] = np.full(n, -1, np.int8)  # bucket of the stored worths; -1: stale
        self.worth_start: Float = np.zeros(n)
        self.worth_end: Float = np.zeros(n)
        # The stretch of blocks a subject covers, as depths: [top, end).
        self.top = array("i", bytes(4 * n))
        self.end = array("i", bytes(4 * n))
        self.end_segment = array("i", bytes(4 * n))  # of visits and tails: the segment their path ends with
        self.turn = array("i", bytes(4 * n))
        self.tool = array("i", bytes(4 * n))
        self.ewma_log_gap = array("d", bytes(8 * n))
        self.birth_s = array("d", bytes(8 * n))
        self._free = list(range(n - 1, 0, -1))
        self._serial = 0
        self.live = 0
        self.kind[0] = SubjectKind.RUN
        self.since_s[0] = now

    @property
    def nbytes(self) -> int:
        """Bytes held by all columns."""
        columns = (self.running, self.since_s, self.due_s, self.rows, self.bucket, self.curve_bucket)
        lists = (
            self.kind,
            self.serial,
            self.top,
            self.end,
            self.end_segment,
            self.turn,
            self.tool,
            self.ewma_log_gap,
            self.birth_s,
        )
        return (
            sum(column.nbytes for column in columns)
            + self.worth_start.nbytes
            + self.worth_end.nbytes
            + sum(len(column) * column.itemsize for column in lists)
        )

    @property
    def limit(self) -> int:
        """One more than the largest id ever used."""
        return len(self.kind)

    def new(self, kind: SubjectKind, now: float, top: int, end: int) -> int:
        """A subject that starts to wait now; the caller sets its row."""
        if not self._free:
            self._grow()
        s = self._free.pop()
        self._serial += 1
        self.live += 1
        self.kind[s] = kind
        self.serial[s] = self._serial
        self.running[s] = False
        self.top[s], self.end[s] = top, end
        self.turn[s], self.tool[s] = 1, -1
        self.ewma_log_gap[s], self.birth_s[s] = math.nan, now
        self.wait_from(s, now)
        return s

    def wait_from(self, s: int, now: float) -> None:
        """(Re)start the waiting of a subject; its stored worth becomes stale."""
        self.since_s[s] = now
        self.due_s[s] = now + _FIRST_EDGE_S
        self.bucket[s] = 0
        self.curve_bucket[s] = -1

    def hold(self, s: int) -> None:
        """The request runs: nothing is waited for."""
        self.running[s] = True
        self.due_s[s] = np.inf

    def free(self, s: int) -> None:
        """Forget a subject."""
        self.kind[s] = SubjectKind.FREE
        self.due_s[s] = np.inf
        self.rows[s] = blank_row()
        self.live -= 1
        self._free.append(s)

    def _grow(self) -> None:
        old = len(self.kind)
        extra = old
        for name in ("running", "since_s", "bucket", "worth_start", "worth_end"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(extra, column.dtype)]))
        self.due_s = np.concatenate([self.due_s, np.full(extra, np.inf)])
        self.curve_bucket = np.concatenate([self.curve_bucket, np.full(extra, -1, np.int8)])
        self.rows = np.concatenate([self.rows, empty_rows(extra)])
        for column in (self.kind, self.serial, self.top, self.end, self.end_segment, self.turn, self.tool):
            column.frombytes(bytes(column.itemsize * extra))
        for doubles in (self.ewma_log_gap, self.birth_s):
            doubles.frombytes(bytes(8 * extra))
        self._free.extend(range(old + extra - 1, old - 1, -1))
