"""Two engines alive at once over one shared tier: each computes a prompt that the other then finds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.e2e.engine import answers, ask, cached_tokens, device_bytes, metrics, settle, start_engine
from tests.e2e.models import prompt_tokens


def one_of_two(
    model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any], folder: str, number: int
) -> dict[str, Any]:
    """Engine `number` (0 or 1) computes prompt `number`, waits for the other, then asks for the other's prompt."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    own = ask(llm, [prompt_tokens(number, tokens)])
    result: dict[str, Any] = {"computed": answers(own)[0], "computed_cached": cached_tokens(own)[0]}
    result["computed_bytes"] = device_bytes(llm)
    settle(llm)
    _meet(Path(folder), "stored", number)
    found = ask(llm, [prompt_tokens(1 - number, tokens)])
    result |= {"found": answers(found)[0], "found_cached": cached_tokens(found)[0], "found_bytes": device_bytes(llm)}
    cache = settle(llm)
    cache.check_integrity()
    result |= {"metrics": metrics("kvtier_"), "leases": cache.leases()}
    _meet(Path(folder), "done", number)
    return result


def _meet(folder: Path, what: str, number: int) -> None:
    """Wait until the other has come as far."""
    (folder / f"{what}-{number}").touch()
    deadline = time.monotonic() + 240
    while not (folder / f"{what}-{1 - number}").exists():
        assert time.monotonic() < deadline, f"the other engine never was {what}"
        time.sleep(0.05)
