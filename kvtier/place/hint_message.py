"""Hints as people and programs write them: one JSON object about one session, any number of claims in it.

    {"session": "s-17", "returns_in": "3s"}
    {"session": "s-17", "pin": "10m", "pin_bytes": "2GiB", "client": "team-a"}
    {"session": "s-17", "retain_for": "1h"}        or "retain_until": 1767225600 (seconds since the epoch)
    {"session": "s-17", "demote": true}            also: "prefetch", "share"; a time says for how long

A message is taken whole or not at all: an unknown key, a time that is none, or no session is one clear error.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping

from kvtier.config import parse_bytes
from kvtier.errors import ConfigError, HintError
from kvtier.place.hints import Hint, HintKind

_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h)?\s*$", re.IGNORECASE)
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_KINDS = {
    "returns_in": HintKind.RETURNS_IN,
    "pin": HintKind.PIN,
    "retain_for": HintKind.RETAIN_UNTIL,
    "retain_until": HintKind.RETAIN_UNTIL,
    "demote": HintKind.DEMOTE,
    "prefetch": HintKind.PREFETCH,
    "share": HintKind.SHARE,
}
_OPEN_ENDED = frozenset({"pin", "demote", "prefetch", "share"})  # may be `true`: for as long as is allowed
_ABOUT = ("session", "client", "pin_bytes")
HINT_KEYS = frozenset(_KINDS) | {"client", "pin_bytes"}
"""Keys of a message beside its session."""
_LONGEST_ID = 512


def parse_seconds(name: str, value: object) -> float:
    """A time in seconds from a number or a text such as "3s", "500ms", "10m". Raises HintError naming the key."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (found := _TIME.match(value)):
        seconds = float(found[1]) * _UNITS_S[(found[2] or "s").lower()]
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise HintError(f'{name} is {value!r}; write a time such as "3s", "500ms", "10m" or a number of seconds')
    return seconds


def parse_hints(message: object, wall_s: float, session: str = "", client: str = "") -> list[Hint]:
    """The hints of one message. `session` and `client` hold where it names none; `wall_s` is now, since the epoch.

    Raises HintError with one line that says what to change.
    """
    if not isinstance(message, Mapping):
        raise HintError('a hint is a JSON object such as {"session": "s-17", "returns_in": "3s"}')
    for key in message:
        if key not in _KINDS and key not in _ABOUT:
            near = difflib.get_close_matches(str(key), [*_KINDS, *_ABOUT], n=1, cutoff=0.5)
            known = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted([*_KINDS, *_ABOUT]))}"
            raise HintError(f"unknown key {str(key)!r} in a hint; {known}")
    session, client = _text(message, "session", session), _text(message, "client", client)
    if not session:
        raise HintError('a hint needs the "session" it is about')
    max_bytes = 0
    if "pin_bytes" in message:
        try:
            max_bytes = parse_bytes("pin_bytes", message["pin_bytes"])
        except ConfigError as error:
            raise HintError(str(error)) from error
    hints = []
    for key, kind in _KINDS.items():
        value = message.get(key)
        if value is None or value is False:
            continue
        if value is True and key in _OPEN_ENDED:
            seconds = 0.0
        elif key == "retain_until":
            seconds = max(0.0, parse_seconds(key, value) - wall_s)
        else:
            seconds = parse_seconds(key, value)
        bound = max_bytes if kind is HintKind.PIN else 0
        hints.append(Hint(session=session, kind=kind, seconds=seconds, max_bytes=bound, client=client))
    if not hints:
        raise HintError(f"a hint says at least one of {', '.join(_KINDS)}")
    return hints


def _text(message: Mapping[str, object], key: str, otherwise: str) -> str:
    value = message.get(key, otherwise)
    if not isinstance(value, str) or len(value) > _LONGEST_ID:
        raise HintError(f"{key} must be a text of at most {_LONGEST_ID} characters")
    return value
