"""Hints that come with a request: in kv_transfer_params.kvtier, or in vLLM's kv_hints envelope (0.31 on).

Both hold from the request's end. An action of the envelope is ours if its type is one of a hint's keys, with or without
"kvtier." before it; its payload says {"seconds": 3}, or {"value": ...} in whatever form the key takes in a message, and
may name a session. Actions of other types are for other components.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from vllm.v1.request import Request

from kvtier.errors import HintError
from kvtier.place.hint_message import HINT_KEYS, parse_hints
from kvtier.place.hints import Hint

_PREFIX = "kvtier."


def hints_of(request: Request, params: Mapping[str, object], session: str) -> tuple[list[Hint], list[str]]:
    """The hints of a request, and what could not be understood of them: bad hints cost the hint, not the request."""
    now = time.time()
    messages: list[dict[str, object]] = []
    said = {key: value for key, value in params.items() if key in HINT_KEYS}
    if said.keys() - {"client", "pin_bytes"}:
        messages.append(said)
    envelope = getattr(request, "kv_hints", None)
    for action in envelope.actions if envelope is not None else ():
        kind = action.action_type.removeprefix(_PREFIX)
        if kind in HINT_KEYS:
            payload = action.payload
            about = {key: payload[key] for key in ("session", "client", "pin_bytes") if key in payload}
            messages.append({**about, kind: payload.get("seconds", payload.get("value", True))})
    hints: list[Hint] = []
    errors: list[str] = []
    for message in messages:
        try:
            hints += parse_hints(message, now, session=session)
        except HintError as error:
            errors.append(str(error))
    return hints, errors
