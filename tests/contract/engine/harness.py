"""What the contract of an engine with kvtier is tested through: the few things a person can do with a running server.

An engine joins the suite by a harness of its own in `available`; nothing in the tests names an engine.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NVME_BYTES = 56 << 20  # enough for every test but the one that is to overflow it


@dataclass(frozen=True)
class Answer:
    """The tokens an engine generated, and how many prompt tokens kvtier's durable tiers spared it."""

    output: list[int]
    from_kvtier: int


class EngineUnderTest(Protocol):
    """A served model with 4096 tokens on the device, over one nvme tier of `NVME_BYTES`. Greedy, so that equal caches
    give equal answers."""

    block_tokens: int
    nvme_path: Path

    def answer(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "") -> Answer:
        """`flush`, then answer with 8 tokens.

        `tenant` is the engine's cache salt; `adapter` whatever makes two requests use different weights."""
        ...

    def ask(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Answer from wherever. May be called from several threads at once."""
        ...

    def abandon(self, prompt: Sequence[int], max_tokens: int, after_s: float) -> None:
        """Ask, and hang up after so many seconds."""
        ...

    def flush(self) -> None:
        """Have everything above kvtier's durable tiers forget, as soon as nothing runs."""
        ...

    def wait_stored(self, prompt: Sequence[int]) -> None:
        """Wait until every full block of a prompt that was answered last is in the durable tier."""
        ...

    def counters(self) -> dict[str, float]:
        """kvtier's exported metrics: `name{label=value,...}` -> value, counters with their `_total`."""
        ...

    def preemptions(self) -> float:
        """Running requests that the engine took the device's memory away from, so far."""
        ...

    def restart(self, shared_fs_path: Path | None = None) -> None:
        """Stop the server as an operator does, and start it again over the same folder; with one tier more."""
        ...

    def clear(self) -> None:
        """Have kvtier forget everything, the way this engine offers it."""
        ...

    def stop(self) -> None:
        """End the server. Idempotent."""
        ...


def available() -> dict[str, Callable[[Path], EngineUnderTest]]:
    """Harnesses that can run here, by name of the engine."""
    found: dict[str, Callable[[Path], EngineUnderTest]] = {}
    from tests.sglang.server import sglang_python

    if sglang_python() is not None:
        from tests.contract.engine.sglang import SGLangUnderTest

        found["sglang"] = SGLangUnderTest
    if importlib.util.find_spec("vllm") is not None:
        from tests.contract.engine.vllm import VLLMUnderTest

        found["vllm"] = VLLMUnderTest
    return found


def hang_up(port: int, path: str, body: Mapping[str, Any], after_s: float) -> None:
    """Send a request and close the connection after so many seconds, as a client does that lost its patience."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(after_s)
    with contextlib.suppress(OSError):
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
