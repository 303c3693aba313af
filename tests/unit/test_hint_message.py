"""Hints as text: what is understood, and one line for what is not."""

from __future__ import annotations

import pytest

from kvtier.cli.hint import send
from kvtier.errors import HintError
from kvtier.place.hint_message import parse_hints, parse_seconds
from kvtier.place.hints import Hint, HintKind


def test_every_kind_is_understood() -> None:
    message = {
        "session": "s",
        "client": "c",
        "returns_in": "3s",
        "pin": "10m",
        "pin_bytes": "2GiB",
        "retain_for": 60,
        "demote": False,
        "prefetch": True,
        "share": "1h",
    }
    assert parse_hints(message, 0.0) == [
        Hint(session="s", client="c", kind=HintKind.RETURNS_IN, seconds=3.0),
        Hint(session="s", client="c", kind=HintKind.PIN, seconds=600.0, max_bytes=2 << 30),
        Hint(session="s", client="c", kind=HintKind.RETAIN_UNTIL, seconds=60.0),
        Hint(session="s", client="c", kind=HintKind.PREFETCH),
        Hint(session="s", client="c", kind=HintKind.SHARE, seconds=3600.0),
    ]


def test_until_is_a_moment_and_the_session_may_be_known_already() -> None:
    assert parse_hints({"retain_until": 1100}, 1000.0, session="s")[0].seconds == 100.0
    assert parse_hints({"retain_until": 900}, 1000.0, session="s")[0].seconds == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("3s", 3.0), ("500ms", 0.5), ("2min", 120.0), ("1.5h", 5400.0), ("7", 7.0), (2, 2.0)]
)
def test_times(text: object, seconds: float) -> None:
    assert parse_seconds("x", text) == seconds


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ([], "JSON object"),
        ({"session": "s"}, "at least one"),
        ({"returns_in": 3}, "session"),
        ({"session": "", "returns_in": 3}, "session"),
        ({"session": 5, "returns_in": 3}, "session must be a text"),
        ({"session": "s" * 513, "returns_in": 3}, "512"),
        ({"session": "s", "return_in": 3}, "did you mean returns_in"),
        ({"session": "s", "returns_in": "soon"}, "returns_in is 'soon'"),
        ({"session": "s", "returns_in": True}, "returns_in is True"),
        ({"session": "s", "returns_in": -1}, "returns_in is -1"),
        ({"session": "s", "returns_in": float("nan")}, "returns_in is nan"),
        ({"session": "s", "pin": True, "pin_bytes": "lots"}, "pin_bytes is 'lots'"),
    ],
)
def test_what_is_not_understood_is_one_line_that_says_what_to_change(message: object, said: str) -> None:
    with pytest.raises(HintError, match=said) as caught:
        parse_hints(message, 0.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "token", "says"),
    [
        ("file:///etc", "", "must begin with http:// or https://"),
        ("127.0.0.1:7077", "", "must begin with http:// or https://"),
        ("http://127.0.0.1:7077", "secret\nline", "--token must be printable ASCII"),
        ("http://127.0.0.1:7077", "\u2192", "--token must be printable ASCII"),
    ],
)
def test_an_address_or_token_that_cannot_be_is_said_without_the_token(url: str, token: str, says: str) -> None:
    with pytest.raises(HintError) as caught:
        send(url, token, {"session": "s", "returns_in": "3s"})
    assert says in str(caught.value)
    assert not token or token not in str(caught.value)
