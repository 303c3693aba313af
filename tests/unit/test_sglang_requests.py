"""The radix policy's view of SGLang: requests become visits, nodes find the segment their last page lies in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from kvtier.model.request import StopReason
from kvtier.testing.clock import VirtualClock
from kvtier_sglang.request_feed import RequestFeed, _stop_reason

PAGE = 4


@dataclass
class Reason:
    kind: str

    def to_json(self) -> dict[str, str]:
        return {"type": self.kind}


@dataclass
class Request:
    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    finished_reason: Reason | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    def finished(self) -> bool:
        return self.finished_reason is not None


@dataclass
class Key:
    tokens: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    is_bigram: bool = False

    def raw_token_ids(self) -> array[int]:
        return self.tokens


@dataclass
class Node:
    parent: Node | None
    key: Any


def node(parent: Node, tokens: list[int], **namespace: Any) -> Node:
    return Node(parent, Key(array("q", tokens), **namespace))


def served(feed: RequestFeed, rid: str, tokens: list[int], output: list[int] | None = None, **namespace: Any) -> None:
    request = Request(rid, tokens, **namespace)
    feed.stepped([request])
    request.output_ids = output or []
    request.finished_reason = Reason("stop")
    feed.stepped([request])


def test_a_node_finds_the_segment_of_its_last_page() -> None:
    feed = RequestFeed(PAGE, 100, 1_000, guarded=True, clock=VirtualClock())
    prompt, output = list(range(12)), [50, 51, 52, 53, 54]
    served(feed, "a", prompt, output)
    root = Node(None, None)
    head = node(root, prompt[:8])
    tail = node(head, [*prompt[8:], *output[:4]])
    assert feed.segment_of(tail) is feed.segment_of(head) is not None
    assert feed.segment_of(node(head, [9, 9, 9, 9])) is None, "never seen"
    assert feed.segment_of(node(root, [99] * 8)) is None


def test_splitting_a_node_does_not_change_where_it_ends() -> None:
    feed = RequestFeed(PAGE, 100, 1_000, guarded=True, clock=VirtualClock())
    served(feed, "a", list(range(16)))
    root = Node(None, None)
    whole = node(root, list(range(16)))
    before = feed.segment_of(whole)
    head = node(root, list(range(8)))
    whole.parent, whole.key = head, Key(array("q", range(8, 16)))
    assert feed.segment_of(whole) is before
    assert feed.segment_of(node(head, list(range(8, 16)))) is before


def test_adapters_and_salts_are_other_trees() -> None:
    feed = RequestFeed(PAGE, 100, 1_000, guarded=True, clock=VirtualClock())
    served(feed, "a", list(range(8)), extra_key="adapter")
    root = Node(None, None)
    assert feed.segment_of(node(root, list(range(8)), extra_key="adapter")) is not None
    assert feed.segment_of(node(root, list(range(8)))) is None
    assert feed.segment_of(node(root, list(range(8)), cache_salt="adapter")) is None


def test_speculative_keys_are_left_to_recency() -> None:
    feed = RequestFeed(PAGE, 100, 1_000, guarded=True, clock=VirtualClock())
    served(feed, "a", list(range(8)))
    assert feed.segment_of(node(Node(None, None), list(range(8)), is_bigram=True)) is None


def test_what_returns_is_worth_more_than_what_never_did() -> None:
    """Without the guard the forecast alone orders: a prompt that came back often outlives a one-off of the same age."""
    feed = RequestFeed(PAGE, 1_000, 10_000, guarded=False, clock=VirtualClock())
    for number in range(300):
        served(feed, f"one-off {number}", [10_000 + number * 100 + i for i in range(16)])
        served(feed, f"again {number}", list(range(16)))
    root, now = Node(None, None), feed.now()
    again = feed.segment_of(node(root, list(range(16))))
    once = feed.segment_of(node(root, [10_000 + 299 * 100 + i for i in range(16)]))
    assert again is not None
    assert once is not None
    assert feed.trusts_forecast
    assert feed.policy.forecast.worth_of(again.id, now) > feed.policy.forecast.worth_of(once.id, now)


def test_the_tree_is_bounded() -> None:
    feed = RequestFeed(PAGE, 50, 200, guarded=True, clock=VirtualClock())
    for number in range(400):
        served(feed, f"r{number}", [number * 1_000 + i for i in range(40)])
    assert feed.tree.blocks <= 260
    feed.tree.check_integrity()


def test_a_request_is_one_visit_however_many_steps_it_is_in() -> None:
    feed = RequestFeed(PAGE, 50, 200, guarded=False, clock=VirtualClock())
    told: list[str] = []
    feed.policy.on_arrival = lambda *_: told.append("arrival")  # type: ignore[method-assign]
    feed.policy.on_finish = lambda *_: told.append("finish")  # type: ignore[method-assign]
    once = Request("ends at once", list(range(8)), [1], Reason("length"))
    feed.stepped([once])
    feed.stepped([once])
    assert told == ["arrival", "finish"]
    longer = Request("longer", list(range(8)))
    for _ in range(3):
        feed.stepped([longer])
    longer.finished_reason = Reason("stop")
    feed.stepped([longer])
    feed.stepped([longer])
    assert told == ["arrival", "finish"] * 2


def test_stop_reasons() -> None:
    assert _stop_reason(Reason("stop")) is StopReason.END_TURN
    assert _stop_reason(Reason("length")) is StopReason.LENGTH
    assert _stop_reason(Reason("abort")) is StopReason.ABORTED
    assert _stop_reason(None) is StopReason.UNKNOWN
