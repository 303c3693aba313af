"""The reuse forecast of one cache: what every tier's policy asks for the worth of segments.

One object per cache, shared by all its tiers. It is told of every request once, when it arrives and when it ends,
infers sessions (sessions.py), learns their return hazard (hazard.py) and answers with Gittins indices (gittins.py).
One pass, online, deterministic; eviction is no evidence here: what left a tier stays known as long as the tree
remembers it, and goes on teaching.

Work is done in batches: events are learned 64 or more at a time, age buckets are advanced by one scan over all
subjects whose cost per request is bounded, curves are computed only for subjects that are asked for and have entered
a new bucket since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import BlockType, Outcome, RequestContext
from kvtier.predict.features import FeatureSet, RunFacts, VisitFacts, run_row, tail_row, visit_row, with_stop
from kvtier.predict.gittins import index_at_edges, return_probability
from kvtier.predict.hazard import BUCKETS, EDGES, LAST_EDGE_S, WIDTHS, Float, HazardModel, Int, bucket_of, empty_rows
from kvtier.predict.sessions import Arrival, RunTouch, Sessions
from kvtier.predict.subjects import NOTHING_KNOWN, SubjectKind, Subjects
from kvtier.predict.tool_chain import ToolChain

_LEARN_BATCH = 64
_LEARN_LIMIT = 256
_ANSWERS_AT_ONCE = 16
_FEW = 16  # segments
_EDGES_S: list[float] = EDGES.tolist()
_REQUESTS_PER_SCAN = 8  # at least; worth never waits for a scan, only learning does
_SCANNED_PER_REQUEST = 2048  # subjects; the scan runs as seldom as keeps its cost per request below this
RUNNING_WORTH = 1e30  # of a segment whose request has not ended


class PredictionLog(Protocol):
    """Receives every prediction with its outcome, before the model has learned from it."""

    def add(self, predicted: Float, outcome: Float) -> None:
        """Probabilities and 0/1 outcomes of one batch."""
        ...


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """Defaults are the same for every workload; switches exist for the ablation (docs/forecast.md)."""

    features: FeatureSet = field(default_factory=FeatureSet)
    age: bool = True  # False: the worth a subject has when its waiting begins holds for good
    horizon_s: float = 0.0  # > 0: rank by P(reuse within it) instead of the Gittins index


class Forecast:
    """Worth of segments by reuse forecast. Not thread-safe: one control thread."""

    def __init__(
        self,
        tree: PrefixTree,
        *,
        now: float = 0.0,
        block_tokens: int = 512,
        options: ForecastOptions | None = None,
        tools: ToolChain | None = None,
    ) -> None:
        self.options = options or ForecastOptions()
        self.tree = tree
        self.block_tokens = block_tokens
        self.model = HazardModel()
        self.subjects = Subjects(now)
        self.sessions = Sessions(tree, self.subjects, self, now)
        self.tools = tools or ToolChain()
        self.log: PredictionLog | None = None
        self._running: dict[str, Arrival] = {}
        self._rows = empty_rows(4 * _LEARN_LIMIT)
        self._buckets: Int = np.zeros(4 * _LEARN_LIMIT, np.int64)
        self._outcomes: Float = np.zeros(4 * _LEARN_LIMIT)
        self._pending = 0
        self._requests_since_scan = 0
        self._answers: list[tuple[npt.NDArray[np.int16], int, int]] = []  # (row, first bucket, bucket of return)

    @property
    def nbytes(self) -> int:
        """Bytes of metadata held: weights, subjects, state by segment."""
        return self.model.nbytes + self.subjects.nbytes + self.sessions.nbytes + self._rows.nbytes

    def on_arrival(self, path: Sequence[Segment], context: RequestContext, now: float) -> None:
        """A request arrived whose prompt is `path` (inserted into the tree). Settles the visit it answers."""
        self._advance(now)
        if not path:
            return
        arrival = self.sessions.arrive(path, now)
        if arrival.tool >= 0:
            self.tools.observe_return(arrival.tool, arrival.gap_s, arrival.new_blocks * self.block_tokens)
        for run in arrival.runs:
            self._describe_run(run, arrival.branched, now)
        self._running[context.request_id] = arrival

    def on_finish(self, path: Sequence[Segment], context: RequestContext, outcome: Outcome, now: float) -> None:
        """The request ended: its visit begins to wait. `path` now includes what was generated."""
        arrival = self._running.pop(context.request_id, None)
        if arrival is None:
            return
        subjects, visit = self.subjects, arrival.visit
        for touch in arrival.runs if outcome.stop_reason else ():
            if self.sessions.is_current(touch.run, touch.serial):
                row = subjects.rows[touch.run]
                with_stop(row, arrival.branched, int(outcome.stop_reason), self.options.features)
                subjects.curve_bucket[touch.run] = -1
        if not self.sessions.is_current(visit, arrival.serial):
            return
        tool = self.tools.id_of(outcome.next_tool) if outcome.next_tool else -1
        if tool >= 0:
            self.tools.observe_call(arrival.tool, tool)
        subjects.tool[visit] = tool
        subjects.rows[visit] = visit_row(self._facts(arrival, path, context, outcome, tool, now), self.options.features)
        subjects.running[visit] = False
        subjects.wait_from(visit, now)
        known_runs = len(arrival.runs)
        self.sessions.grow(arrival, path, now)
        for run in arrival.runs[known_runs:]:
            self._describe_run(run, arrival.branched, now)

    def worth_of(self, segment_id: int, now: float) -> float:
        """The worth of one segment: the same as `worth`."""
        return self._worth_of_few([segment_id], now)[0]

    def worth(self, segments: npt.NDArray[np.int32], now: float) -> Float:
        """Expected hits per block second of each segment (by id) with the best stopping time."""
        if len(segments) <= _FEW:
            return np.array(self._worth_of_few(segments.tolist(), now))
        subjects = self.subjects
        s = self.sessions.owner[segments]
        age = now - subjects.since_s[s]
        bucket = np.searchsorted(EDGES, age, side="right") - 1
        if not self.options.age:
            bucket[:] = 0
            age[:] = 0.0
        np.minimum(bucket, BUCKETS - 1, out=bucket)
        stale = subjects.curve_bucket[s] != bucket
        if stale.any():
            self._refresh(s[stale], bucket[stale])
        start, end = subjects.worth_start[s], subjects.worth_end[s]
        share = (age - EDGES[bucket]) / WIDTHS[bucket]
        worth: Float = start + (end - start) * np.minimum(share, 1.0)
        beyond = age > LAST_EDGE_S
        if beyond.any():
            worth[beyond] *= LAST_EDGE_S / age[beyond]
        running = subjects.running[s]
        if running.any():
            worth[running] = RUNNING_WORTH
        return worth

    def return_probability(
        self, segments: npt.NDArray[np.int32], now: float, horizon_s: float, at_age: float | None = None
    ) -> Float:
        """P(a request passes through each segment within `horizon_s`); 1 while one runs on it.

        `at_age`: as if each had waited for so long, instead of as long as it has.
        """
        s = self.sessions.owner[segments]
        age = np.maximum(now - self.subjects.since_s[s], 0.0) if at_age is None else np.full(len(s), at_age)
        probability = return_probability(self.model.hazards(self.subjects.rows[s]), age, horizon_s)
        probability[self.subjects.running[s]] = 1.0
        return probability

    def forgettable(self, blocks: int, is_needed: Callable[[Segment], bool]) -> list[Segment]:
        """Leaves of the tree that nobody needs, least recently used first, together at least `blocks` long (or all).

        What to hand to `PrefixTree.truncate` to bound the metadata; `is_needed` tells of residency, leases and the
        like. Children forgotten make their parents leaves: call again if more must go.
        """
        touched = self.sessions.touched_s
        idle = [s for s in self.tree.segments() if not s.children and not is_needed(s)]
        chosen: list[Segment] = []
        for segment in nsmallest(min(len(idle), blocks), idle, key=lambda s: (touched(s), s.id)):
            if blocks <= 0:
                break
            chosen.append(segment)
            blocks -= segment.length
        return chosen

    def explain(self, segment: Segment, now: float) -> dict[str, float | str | int]:
        """What the forecast thinks of a segment, for people."""
        s = int(self.sessions.owner[segment.id])
        ids = np.array([segment.id], np.int32)
        return {
            "subject": SubjectKind(self.subjects.kind[s]).name.lower() if s != NOTHING_KNOWN else "unknown",
            "age_s": now - float(self.subjects.since_s[s]),
            "turn": self.subjects.turn[s],
            "arrivals": self.sessions.arrivals(segment),
            "worth": float(self.worth(ids, now)[0]),
            "p_60s": float(self.return_probability(ids, now, 60.0)[0]),
            "p_1h": float(self.return_probability(ids, now, 3600.0)[0]),
        }

    def returned(self, subject: int, now: float) -> None:
        """SubjectEvents: it came back. It did not in the buckets before, and did in this one."""
        subjects = self.subjects
        age = now - float(subjects.since_s[subject])
        first, last = int(subjects.bucket[subject]), int(np.searchsorted(EDGES, age, side="right")) - 1
        if first < BUCKETS:
            self._answers.append((subjects.rows[subject].copy(), first, last))

    def left_behind(self, tail: int) -> None:
        """SubjectEvents: an abandoned tail needs its row."""
        subjects = self.subjects
        depth_tokens = (subjects.end[tail] - subjects.top[tail]) * self.block_tokens
        subjects.rows[tail] = tail_row(subjects.turn[tail], depth_tokens, self.options.features)

    def settle(self, now: float) -> None:
        """Learn everything known up to now, however small the batch. For the end of a replay."""
        self._scan(now)
        self._learn(1)

    def _advance(self, now: float) -> None:
        self._requests_since_scan += 1
        if self._requests_since_scan >= max(_REQUESTS_PER_SCAN, self.subjects.limit // _SCANNED_PER_REQUEST):
            self._scan(now)
        self._learn(_LEARN_BATCH)

    def _scan(self, now: float) -> None:
        """Whatever waited past the end of a bucket did not return in it."""
        self._requests_since_scan = 0
        subjects = self.subjects
        due = np.flatnonzero(subjects.due_s <= now)
        if not len(due):
            return
        reached = bucket_of(now - subjects.since_s[due])
        first = subjects.bucket[due].astype(np.int64)
        passed = reached - first
        which = np.repeat(np.arange(len(due)), passed)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(passed) - passed, passed)
        self._queue(subjects.rows[due[which]], first[which] + offset, np.zeros(len(which)))
        subjects.bucket[due] = reached
        open_ended = reached >= BUCKETS
        subjects.due_s[due] = subjects.since_s[due] + EDGES[np.minimum(reached + 1, BUCKETS)]
        subjects.due_s[due[open_ended]] = np.inf

    def _queue(self, rows: npt.NDArray[np.int16], buckets: Int, outcomes: Float) -> None:
        n = len(buckets)
        while self._pending + n > len(self._buckets):
            self._rows = np.concatenate([self._rows, empty_rows(len(self._buckets))])
            self._outcomes = np.concatenate([self._outcomes, np.zeros(len(self._buckets))])
            self._buckets = np.concatenate([self._buckets, np.zeros(len(self._buckets), np.int64)])
        at = slice(self._pending, self._pending + n)
        self._rows[at], self._buckets[at], self._outcomes[at] = rows, buckets, outcomes
        self._pending += n

    def _queue_answers(self) -> None:
        """Every answer is one event for each bucket waited through."""
        first = np.array([answer[1] for answer in self._answers])
        last = np.array([answer[2] for answer in self._answers])
        waited = np.minimum(last + 1, BUCKETS) - first
        which = np.repeat(np.arange(len(first)), waited)
        buckets = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(waited) - waited, waited)
        rows = np.array([answer[0] for answer in self._answers])
        self._queue(rows[which], buckets, (buckets == last[which]).astype(np.float64))
        self._answers.clear()

    def _learn(self, at_least: int) -> None:
        if self._answers and (at_least == 1 or len(self._answers) >= _ANSWERS_AT_ONCE):
            self._queue_answers()
        done = 0
        while self._pending - done >= at_least:
            at = slice(done, min(done + _LEARN_LIMIT, self._pending))
            predicted = self.model.learn(self._rows[at], self._buckets[at], self._outcomes[at])
            if self.log is not None:
                self.log.add(predicted, self._outcomes[at].copy())
            done = at.stop
        if done:
            rest = self._pending - done
            for column in (self._rows, self._buckets, self._outcomes):
                column[:rest] = column[done : self._pending].copy()
            self._pending = rest

    def _worth_of_few(self, segments: list[int], now: float) -> list[float]:
        """What `worth` does, for so few segments that array operations would cost more than the work."""
        subjects, owner = self.subjects, self.sessions.owner
        since, fresh = subjects.since_s.item, subjects.curve_bucket.item
        asked: list[tuple[int, float, int]] = []
        stale: dict[int, int] = {}
        for i in segments:
            s = owner.item(i)
            age = now - since(s) if self.options.age else 0.0
            bucket = min(bisect_right(_EDGES_S, age), BUCKETS) - 1
            asked.append((s, age, bucket))
            if fresh(s) != bucket:
                stale[s] = bucket
        if stale:
            self._refresh(np.array(list(stale), np.int32), np.array(list(stale.values())))
        start, end, running = subjects.worth_start.item, subjects.worth_end.item, subjects.running.item
        worths: list[float] = []
        for s, age, bucket in asked:
            if running(s):
                worths.append(RUNNING_WORTH)
                continue
            low, high = _EDGES_S[bucket], _EDGES_S[bucket + 1]
            worth = start(s) + (end(s) - start(s)) * min((age - low) / (high - low), 1.0)
            worths.append(worth * LAST_EDGE_S / age if age > LAST_EDGE_S else worth)
        return worths

    def _refresh(self, stale: npt.NDArray[np.int32], bucket: Int) -> None:
        """Compute the worths of these subjects at the edges of the buckets they are in now."""
        subjects = self.subjects
        s, first = np.unique(stale, return_index=True)
        hazards, bucket = self.model.hazards(subjects.rows[s]), bucket[first]
        if self.options.horizon_s:
            ends = np.minimum(bucket + 1, BUCKETS - 1)
            start = return_probability(hazards, EDGES[bucket], self.options.horizon_s)
            end = return_probability(hazards, EDGES[ends], self.options.horizon_s)
        else:
            start, end = index_at_edges(hazards, bucket)
        subjects.worth_start[s], subjects.worth_end[s] = start, end
        subjects.curve_bucket[s] = bucket

    def _describe_run(self, touch: RunTouch, branched: bool, now: float) -> None:
        subjects, run = self.subjects, touch.run
        if not self.sessions.is_current(run, touch.serial):
            return
        facts = RunFacts(
            gap_s=touch.gap_s,
            ewma_log_gap=subjects.ewma_log_gap[run],
            arrivals=touch.arrivals,
            count=touch.count,
            depth_tokens=touch.depth_blocks * self.block_tokens,
            branched=branched,
            age_s=now - subjects.birth_s[run],
        )
        subjects.rows[run] = run_row(facts, self.options.features)
        subjects.curve_bucket[run] = -1

    def _facts(
        self,
        arrival: Arrival,
        path: Sequence[Segment],
        context: RequestContext,
        outcome: Outcome,
        tool: int,
        now: float,
    ) -> VisitFacts:
        subjects, visit = self.subjects, arrival.visit
        return VisitFacts(
            stop=int(outcome.stop_reason),
            input_type=int(context.input_type),
            turn=subjects.turn[visit],
            gap_s=arrival.gap_s,
            ewma_log_gap=subjects.ewma_log_gap[visit],
            session_age_s=now - subjects.birth_s[visit],
            input_tokens=context.prompt_tokens or path[-1].stop * self.block_tokens,
            output_tokens=outcome.output_tokens,
            new_tokens=arrival.new_blocks * self.block_tokens,
            shared=bool(arrival.runs),
            block_type=int(_newest_type(context)),
            transition=int(context.transition),
            tool_s=self.tools.expected_return_s(tool) if tool >= 0 else -1.0,
        )


def _newest_type(context: RequestContext) -> BlockType:
    """What the end of the prompt is made of."""
    return context.role_spans[-1].type if context.role_spans else BlockType.UNKNOWN
