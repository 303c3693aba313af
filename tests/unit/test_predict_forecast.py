"""The forecast as policies see it: worth, probabilities, batches, what may be forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.predict.calibration import Calibration
from kvtier.predict.forecast import RUNNING_WORTH, Forecast, ForecastOptions
from kvtier.predict.gittins import index_at_edges
from kvtier.predict.hazard import EDGES, bucket_of


class Server:
    """A forecast over a tree of two-byte keys, fed request by request."""

    def __init__(self, options: ForecastOptions | None = None) -> None:
        self.tree = PrefixTree(key_bytes=2)
        self.forecast = Forecast(self.tree, options=options)
        self.asked = 0

    def ask(self, words: list[int], now: float, stop: StopReason = StopReason.UNKNOWN, tool: str = "") -> Segment:
        context = RequestContext(request_id=str(self.asked), arrival_s=now)
        self.asked += 1
        path = self.tree.insert(np.array(words, np.uint16).tobytes())
        self.forecast.on_arrival(path, context, now)
        self.forecast.on_finish(path, context, Outcome(finished_s=now, stop_reason=stop, next_tool=tool), now)
        return path[-1]

    def worth(self, segment: Segment, now: float) -> float:
        return float(self.forecast.worth(np.array([segment.id], np.int32), now)[0])


def agents(server: Server, seed: int, sessions: int = 400) -> None:
    """Tool calls are followed up after about 10 s, ended turns rarely."""
    rng = random.Random(seed)
    queue = [(rng.uniform(0, 4000.0), [1, 2, 3, 1000 + s]) for s in range(sessions)]
    while queue:
        queue.sort()
        now, words = queue.pop(0)
        goes_on = rng.random() < 0.8
        server.ask(words, now, StopReason.TOOL_USE if goes_on else StopReason.END_TURN)
        if goes_on or rng.random() < 0.05:
            queue.append((now + rng.lognormvariate(2.3, 0.3), [*words, rng.randrange(1000, 60000)]))


def test_learns_that_tool_calls_return() -> None:
    server = Server()
    agents(server, 1)
    called = server.ask([1, 2, 3, 900, 901], 1e4, StopReason.TOOL_USE)
    ended = server.ask([1, 2, 3, 800, 801], 1e4, StopReason.END_TURN)
    ids = np.array([called.id, ended.id], np.int32)
    soon = server.forecast.return_probability(ids, 1e4, 60.0)
    assert soon[0] > 0.75
    assert soon[1] < 0.35
    assert server.worth(called, 1e4 + 5) > 3 * server.worth(ended, 1e4 + 5)
    assert server.worth(called, 1e4 + 8) > server.worth(called, 1e4 + 200)


def test_predictions_are_calibrated_when_the_world_holds_still() -> None:
    server = Server()
    agents(server, 2)
    server.forecast.log = log = Calibration()
    agents_later = Server()
    agents_later.forecast.model = server.forecast.model
    agents_later.forecast.log = log
    agents(agents_later, 3)
    assert log.count > 1000
    assert log.expected_calibration_error().value < 0.05
    assert log.brier().high < 0.2


def test_worth_is_the_interpolated_index() -> None:
    server = Server()
    agents(server, 4, 60)
    leaf = server.ask([1, 2, 3, 900], 1e4, StopReason.TOOL_USE)
    subject = int(server.forecast.sessions.owner[leaf.id])
    hazards = server.forecast.model.hazards(server.forecast.subjects.rows[subject : subject + 1])
    for age in (0.1, 3.0, 40.0, 5000.0):
        k = int(bucket_of(np.array([age]))[0])
        start, end = index_at_edges(hazards, np.array([k]))
        share = (age - EDGES[k]) / (EDGES[k + 1] - EDGES[k])
        assert server.worth(leaf, 1e4 + age) == pytest.approx(float(start[0] + (end[0] - start[0]) * share))
        assert server.forecast.worth_of(leaf.id, 1e4 + age) == pytest.approx(server.worth(leaf, 1e4 + age))


def test_few_and_many_segments_are_worth_the_same() -> None:
    server = Server()
    agents(server, 6, 80)
    ids = np.array([segment.id for segment in server.tree.segments()], np.int32)
    assert len(ids) > 50
    for now in (5e3, 2e4, 1e6):
        together = server.forecast.worth(ids, now)
        assert together == pytest.approx([server.forecast.worth_of(int(i), now) for i in ids])
    server.forecast.options = ForecastOptions(age=False)
    assert server.forecast.worth(ids, 2e4) == pytest.approx([server.forecast.worth_of(int(i), 2e4) for i in ids])


def test_running_requests_are_worth_most_and_old_ones_ever_less() -> None:
    server = Server()
    path = server.tree.insert(np.array([1, 2], np.uint16).tobytes())
    context = RequestContext(request_id="a", arrival_s=0.0)
    server.forecast.on_arrival(path, context, 0.0)
    assert server.worth(path[0], 100.0) == RUNNING_WORTH
    server.forecast.on_finish(path, context, Outcome(finished_s=100.0), 100.0)
    worths = [server.worth(path[0], 100.0 + age) for age in (1, 1e2, 1e4, 1e6, 1e8)]
    assert worths == sorted(worths, reverse=True)
    assert worths[-1] > 0


def test_segments_no_request_passed_through_have_a_worth() -> None:
    server = Server()
    path = server.tree.insert(np.array([1, 2], np.uint16).tobytes())
    assert 0 < server.worth(path[0], 50.0) < RUNNING_WORTH


def test_unmatched_finish_is_ignored() -> None:
    server = Server()
    path = server.tree.insert(np.array([1], np.uint16).tobytes())
    server.forecast.on_finish(path, RequestContext(request_id="x", arrival_s=0.0), Outcome(finished_s=1.0), 1.0)
    server.forecast.on_arrival([], RequestContext(request_id="y", arrival_s=1.0), 1.0)
    assert server.forecast.subjects.live == 0


def test_an_answer_is_one_event_per_bucket_waited_through() -> None:
    server = Server()
    server.ask([1, 2], 0.0)
    server.ask([1, 2, 3], float(EDGES[6]) + 1e-6)
    server.forecast.settle(float(EDGES[6]) + 1e-6)
    assert server.forecast.model.events == 7
    server.forecast.settle(1e9)
    assert server.forecast.model.events == 7 + 28


def test_same_seed_same_worths() -> None:
    worths = []
    for _ in range(2):
        server = Server()
        agents(server, 5, 100)
        ids = np.array([segment.id for segment in server.tree.segments()], np.int32)
        worths.append(server.forecast.worth(ids, 5000.0))
    assert (worths[0] == worths[1]).all()


def test_forgettable_names_the_oldest_leaves_nobody_needs() -> None:
    server = Server()
    leaves = [server.ask([7, n, n + 100], float(n)) for n in range(1, 9)]
    needed = {leaves[0].id}
    names = server.forecast.forgettable(5, lambda segment: segment.id in needed)
    assert [segment.id for segment in names] == [leaf.id for leaf in leaves[1:4]]
    for segment in names:
        server.tree.truncate(segment, 0)
    server.forecast.sessions.check_integrity()
    assert server.forecast.subjects.live < 9


def test_metadata_is_bounded_by_what_the_tree_remembers() -> None:
    server = Server()
    for n in range(3000):
        server.ask([n % 60000, (n * 7) % 60000], float(n))
        while len(server.tree) > 200:
            for segment in server.forecast.forgettable(2, lambda segment: False):
                server.tree.truncate(segment, 0)
    assert server.forecast.subjects.limit <= 512
    assert server.forecast.nbytes - server.forecast.model.nbytes < 200_000


def test_tools_known_by_name_set_the_expected_return() -> None:
    server = Server()
    for n in range(40):
        words = [5000 + n]
        for turn, (tool, wait_s) in enumerate((("grep", 2.0), ("build", 120.0)) * 3):
            server.ask(words, n * 1e4 + turn * 200.0, StopReason.TOOL_USE, tool)
            words = [*words, turn + 1]
            server.ask(words, n * 1e4 + turn * 200.0 + wait_s, StopReason.TOOL_USE, tool)
            words = [*words, turn + 50]
    tools = server.forecast.tools
    grep, build = tools.id_of("grep"), tools.id_of("build")
    assert tools.return_s[grep].count > 0
    assert tools.expected_return_s(build) != tools.expected_return_s(grep)


def test_explain_says_what_it_is() -> None:
    server = Server()
    leaf = server.ask([1, 2], 0.0)
    said = server.forecast.explain(leaf, 10.0)
    assert said["subject"] == "visit"
    assert said["age_s"] == 10.0
    assert 0 < float(said["p_60s"]) < float(said["p_1h"]) < 1
