"""Hints that come with vLLM's requests: parameters and envelope, the good ones taken, the bad ones named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvtier.place.hints import HintKind
from kvtier_vllm.hints import hints_of


def test_parameters_that_are_no_hints_are_none() -> None:
    assert hints_of(SimpleNamespace(), {"session": "s", "tool": "grep", "client": "c"}, "s") == ([], [])


def test_hints_in_the_parameters_are_about_the_requests_own_session() -> None:
    hints, errors = hints_of(SimpleNamespace(kv_hints=None), {"tool": "grep", "returns_in": "3s", "pin": 60}, "s")
    assert not errors
    assert [(h.session, h.kind, h.seconds) for h in hints] == [
        ("s", HintKind.RETURNS_IN, 3.0),
        ("s", HintKind.PIN, 60.0),
    ]


def test_actions_of_the_envelope_are_taken_by_their_type() -> None:
    actions = [
        KvHintAction("1", "kvtier.retain_for", "1", {"seconds": 60}),
        KvHintAction("2", "returns_in", "1", {"value": "2s", "session": "other"}),
        KvHintAction("3", "kvtier.pin", "1", {"value": "soon"}),
        KvHintAction("4", "somebody.else", "1", {"seconds": "??"}),
        KvHintAction("5", "demote", "1", {}),
    ]
    request = SimpleNamespace(kv_hints=KvHintsEnvelope("1", "m", actions))
    hints, errors = hints_of(request, {}, "s")
    assert [(h.session, h.kind, h.seconds) for h in hints] == [
        ("s", HintKind.RETAIN_UNTIL, 60.0),
        ("other", HintKind.RETURNS_IN, 2.0),
        ("s", HintKind.DEMOTE, 0.0),
    ]
    assert len(errors) == 1
    assert "pin is 'soon'" in errors[0]


def test_without_a_session_there_is_nothing_to_keep() -> None:
    hints, errors = hints_of(SimpleNamespace(kv_hints=None), {"returns_in": 3}, "")
    assert hints == []
    assert "session" in errors[0]
