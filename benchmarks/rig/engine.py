"""One vLLM engine in a process of its own, commanded over a pipe: every contender is asked and timed by this code.

Runs as `python -m benchmarks.rig.engine COMMANDS REPLIES` (two file descriptors, JSON lines) under the contender's own
interpreter, so it needs vLLM and the standard library only. The parent's side is `benchmarks.rig.process`.

A session is a list of turns, each a list of tokens. The prompt of a turn is everything said in the session so far, the
engine's own answers included, followed by the turn's tokens. Sessions wait in a queue; `in_flight` of them are answered
at a time, and one whose turn is answered goes to the end of the queue with its next turn.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_IDLE_STEP_S = 0.001  # what vLLM's engine process sleeps when a step had nothing to compute
_SETTLED_S = 0.4
_SETTLE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered turn, as it travels to the parent."""

    session: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    ttft_cpu_s: float
    """CPU time of the engine's thread up to the first token: other processes hardly move it, but it sees no waiting."""
    tokens: list[int]


@dataclass(slots=True)
class _Session:
    number: int
    name: str
    turns: deque[list[int]]
    said: list[int] = field(default_factory=list)
    turn: int = 0
    asked_s: tuple[float, float] = (0.0, 0.0)
    first_token_s: tuple[float, float] | None = None


class Engine:
    """An in-process `vllm.LLM` and the commands on it; each public method is one command."""

    def __init__(self, model: str, llm: dict[str, Any], connector: dict[str, Any] | None, store: str) -> None:
        from vllm import LLM

        settings = dict(llm)
        if connector is not None:
            settings["kv_transfer_config"] = connector
        self._store = Path(store)
        self._engine = LLM(model, **settings).llm_engine
        core: Any = self._engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._names = itertools.count()

    def run(
        self, sessions: list[list[list[int]]], max_tokens: int, in_flight: int, profile: str = ""
    ) -> dict[str, Any]:
        """Answer every turn of every session greedily with exactly `max_tokens` tokens each.

        `wall_s` ends with the last answer; `cpu_s` is this process's CPU time and includes the writing that follows.
        A path in `profile` receives cProfile's statistics of the engine thread, in CPU time.
        """
        profiler = cProfile.Profile(time.thread_time) if profile else None
        cpu_s, began_s = time.process_time(), time.perf_counter()
        if profiler is not None:
            answers = profiler.runcall(self._replay, sessions, max_tokens, in_flight)
            profiler.dump_stats(profile)
        else:
            answers = self._replay(sessions, max_tokens, in_flight)
        wall_s = time.perf_counter() - began_s
        self.settle()
        return {
            "answers": [asdict(answer) for answer in answers],
            "wall_s": wall_s,
            "cpu_s": time.process_time() - cpu_s,
        }

    def reset(self) -> bool:
        """Empty the device cache; what the connector holds stays. Refused while blocks are in use, so settle first."""
        self.settle()
        return bool(self._engine.reset_prefix_cache())

    def settle(self) -> float:
        """Step until the engine has no work and the files of the store have stopped changing; the seconds it took.

        An engine behind a server goes on stepping when the last answer is out; an in-process one must be asked to.
        """
        began_s = time.perf_counter()
        seen, since_s = self._store_state(), began_s
        while (now_s := time.perf_counter()) - began_s < _SETTLE_LIMIT_S:
            if self._scheduler.has_requests():
                self._step()
                since_s = now_s
            elif (state := self._store_state()) != seen:
                seen, since_s = state, now_s
            elif now_s - since_s >= _SETTLED_S or not seen:
                break
            else:
                time.sleep(_SETTLED_S / 8)
        return time.perf_counter() - began_s

    def counters(self, prefix: str) -> dict[str, float]:
        """vLLM's own counters and gauges whose names begin with `prefix`, as `name{label=value}` -> value."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        found: dict[str, float] = {}
        for metric in get_metrics_snapshot():
            value = getattr(metric, "value", None)
            if metric.name.startswith(prefix) and value is not None:
                labels = sorted((k, v) for k, v in metric.labels.items() if k not in ("engine", "model_name"))
                found[f"{metric.name}{{{','.join(f'{key}={text}' for key, text in labels)}}}"] = float(value)
        return found

    def thread_cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by thread name, numbers stripped; threads Python does not know are `native`."""
        names = {thread.native_id: thread.name.rstrip("-_0123456789") for thread in threading.enumerate()}
        ticks_per_s, found = os.sysconf("SC_CLK_TCK"), dict[str, float]()
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/stat") as stat:
                user, system = stat.read().rpartition(")")[2].split()[11:13]
            name = names.get(int(task), "native")
            found[name] = found.get(name, 0.0) + (int(user) + int(system)) / ticks_per_s
        return found

    def close(self) -> None:
        self.settle()
        self._engine.engine_core.shutdown()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _replay(self, sessions: list[list[list[int]]], max_tokens: int, in_flight: int) -> list[Answer]:
        waiting = deque(
            _Session(number, f"session-{next(self._names)}", deque(turns)) for number, turns in enumerate(sessions)
        )
        running: dict[str, _Session] = {}
        answers: list[Answer] = []
        while waiting or running:
            while waiting and len(running) < in_flight:
                session = waiting.popleft()
                running[self._ask(session, max_tokens)] = session
            for output in self._step():
                session = running[output.request_id]
                if session.first_token_s is None:
                    session.first_token_s = (time.perf_counter(), time.thread_time())
                if output.finished:
                    del running[output.request_id]
                    answers.append(self._take_answer(session, output))
                    if session.turns:
                        waiting.append(session)
        return answers

    def _ask(self, session: _Session, max_tokens: int) -> str:
        from vllm import SamplingParams

        session.said += session.turns.popleft()
        session.first_token_s = None
        session.asked_s = (time.perf_counter(), time.thread_time())
        name = f"{session.name}-{session.turn}"
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": list(session.said)}
        self._engine.add_request(name, prompt, parameters, session_id=session.name)
        return name

    def _take_answer(self, session: _Session, output: Any) -> Answer:
        tokens = list(output.outputs[0].token_ids)
        assert session.first_token_s is not None
        answer = Answer(
            session=session.number,
            turn=session.turn,
            prompt_tokens=len(session.said),
            cached_tokens=output.num_cached_tokens or 0,
            ttft_s=session.first_token_s[0] - session.asked_s[0],
            ttft_cpu_s=session.first_token_s[1] - session.asked_s[1],
            tokens=tokens,
        )
        session.said += tokens
        session.turn += 1
        return answer

    def _step(self) -> list[Any]:
        outputs = self._engine.step()
        if not self._scheduler.running and self._scheduler.has_requests():
            time.sleep(_IDLE_STEP_S)
        return outputs

    def _store_state(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(sorted(self._files()))

    def _files(self) -> Iterator[tuple[str, int, int]]:
        for folder, _, names in os.walk(self._store):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    found = os.stat(path)
                except FileNotFoundError:
                    continue  # renamed or evicted since it was listed: the next look sees the change
                yield path, found.st_size, found.st_mtime_ns


def serve(commands_fd: int, replies_fd: int) -> None:
    """Start the engine the first line describes, then carry out one command per line until `close` or end of file."""
    with os.fdopen(commands_fd) as commands, os.fdopen(replies_fd, "w", buffering=1) as replies:

        def reply(value: Any) -> None:
            replies.write(json.dumps(value) + "\n")

        began_s = time.perf_counter()
        engine = Engine(**json.loads(commands.readline()))
        reply({"start_s": time.perf_counter() - began_s})
        for line in commands:
            command = json.loads(line)
            name = command.pop("command")
            method: Callable[..., Any] = getattr(engine, name)
            reply(method(**command))
            if name == "close":
                return


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
