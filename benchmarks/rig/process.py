"""The parent's side of an engine process: start it, command it, wait without hanging, end it whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.rig.engine import Answer
from kvtier.testing.scenario import end_process_group, engine_environment, log_tail

START_LIMIT_S = 300.0
COMMAND_LIMIT_S = 900.0
_POLL_S = 0.1
_END_S = 30.0
REPOSITORY = Path(__file__).resolve().parents[2]

Turn = Sequence[int]
Session = Sequence[Turn]


class EngineFailure(Exception):
    """The engine process ended or did not answer in time; the message ends with what it last printed."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one `run` command measured."""

    answers: list[Answer]
    wall_s: float
    cpu_s: float

    @property
    def ttft_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.answers]


@dataclass(frozen=True)
class EngineSetup:
    """How to start a contender's engine. `store` is the folder its lower tier keeps its files in."""

    model: Path
    llm: Mapping[str, Any]
    store: Path
    connector: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable


class EngineProcess:
    """A running engine; a context manager that closes it in order, or kills it when the block raised.

    `while_waiting` is called about ten times a second while a command runs (a progress display).
    """

    def __init__(self, setup: EngineSetup, log_path: Path, while_waiting: Callable[[], None] | None = None) -> None:
        self._log_path = log_path
        self._while_waiting = while_waiting
        commands_read, commands_write = os.pipe()
        replies_read, replies_write = os.pipe()
        setup.store.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [setup.python, "-m", "benchmarks.rig.engine", str(commands_read), str(replies_write)],
                env=engine_environment({"PYTHONPATH": str(REPOSITORY), **setup.environment}),
                cwd=log_path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(commands_read, replies_write),
                start_new_session=True,
            )
        os.close(commands_read)
        os.close(replies_write)
        self._commands = os.fdopen(commands_write, "w", buffering=1)
        self._replies = os.fdopen(replies_read)
        settings = {"model": str(setup.model), "llm": dict(setup.llm), "connector": setup.connector}
        try:
            self.start_s = self._exchange({**settings, "store": str(setup.store)}, START_LIMIT_S)["start_s"]
        except BaseException:
            self.kill()
            raise

    def run(self, sessions: Sequence[Session], *, max_tokens: int, in_flight: int, profile: str = "") -> Run:
        """Answer all turns of all sessions (see `benchmarks.rig.engine`) and wait until what follows is written."""
        found = self.call("run", sessions=sessions, max_tokens=max_tokens, in_flight=in_flight, profile=profile)
        return Run([Answer(**answer) for answer in found["answers"]], found["wall_s"], found["cpu_s"])

    def ask(self, prompt: Turn, *, max_tokens: int) -> Answer:
        """Answer a single prompt."""
        return self.run([[prompt]], max_tokens=max_tokens, in_flight=1).answers[0]

    def reset(self) -> None:
        """Empty the device cache. Raises EngineFailure if the engine refuses, since what follows would mean nothing."""
        if not self.call("reset"):
            raise EngineFailure("the device cache could not be emptied: blocks are still in use")

    def counters(self, prefix: str) -> dict[str, float]:
        found: dict[str, float] = self.call("counters", prefix=prefix)
        return found

    def call(self, command: str, **arguments: Any) -> Any:
        return self._exchange({"command": command, **arguments}, COMMAND_LIMIT_S)

    def close(self) -> None:
        """Let the engine finish its writes and end the process. Does nothing after `kill`."""
        if self._replies.closed:
            return
        try:
            self.call("close")
            self._child.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            pass  # threads of a peer may outlive its shutdown; everything measured is written by now
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._replies.close()
        end_process_group(self._child)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> Any:
        try:
            self._commands.write(json.dumps(message) + "\n")
        except BrokenPipeError as error:
            raise self._failure("ended") from error
        deadline_s = time.monotonic() + limit_s
        while not select.select([self._replies], [], [], _POLL_S)[0]:
            if self._while_waiting is not None:
                self._while_waiting()
            if time.monotonic() > deadline_s:
                raise self._failure(f"did not answer within {limit_s:.0f} s")
        line = self._replies.readline()
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def _failure(self, what: str) -> EngineFailure:
        return EngineFailure(f"the engine process {what}\n{log_tail(self._log_path)}")
