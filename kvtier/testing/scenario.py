"""Run a function in a fresh Python process, so that a test, a demo or a benchmark may start a real engine.

vLLM keeps process-wide state (distributed groups, the platform, registered plug-ins), so two engines in one process
disturb each other, and one that crashes takes everything down. A scenario is a top-level function of an importable
module; it takes and returns plain JSON values:

    result = run_scenario(scenarios.ask_twice, work_folder=tmp_path, arguments={"model": str(model), "prompts": 3})

The child prints to a log file; when it fails, `ScenarioError` carries the log's tail, and a timeout ends the child's
whole process group. A lease of kvtier left behind in the child counts as a failure. Run as a module
(`python -m kvtier.testing.scenario ...`) this file is the child.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.testing.leases import no_lease_left_behind

DEFAULT_TIMEOUT_S = 300.0
_LOG_TAIL_CHARACTERS = 6_000
_POLL_S = 0.05

# What makes vLLM offline, repeatable and bearable on a CPU that other processes use too.
ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in the scenario's own process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two OpenMP threads spin against each other on a busy two-core machine
    "KMP_BLOCKTIME": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONFAULTHANDLER": "1",
}


class ScenarioError(AssertionError):
    """The child process raised, crashed or ran out of time; the message ends with what it last printed."""


def run_scenario(
    scenario: Callable[..., Any],
    *,
    work_folder: Path,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    while_waiting: Callable[[], None] | None = None,
    python: Path | None = None,
) -> Any:
    """Call `scenario(**arguments)` in a new process and return its JSON result.

    `work_folder` receives arguments, result and log under a name that is new for each call. `while_waiting` is called
    about 20 times a second (a progress display). `python` is another environment's interpreter; it must have kvtier or
    find it through `environment`. Raises ScenarioError; one killed by a signal says by which.
    """
    name = f"{scenario.__name__}-{time.monotonic_ns()}"
    arguments_path, result_path, log_path = (work_folder / f"{name}.{ending}" for ending in ("args", "result", "log"))
    arguments_path.write_text(json.dumps(dict(arguments or {})))
    target = f"{scenario.__module__}:{scenario.__qualname__}"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [
                str(python or sys.executable),
                "-m",
                "kvtier.testing.scenario",
                target,
                str(arguments_path),
                str(result_path),
            ],
            env=engine_environment({"PYTHONPATH": _import_root(scenario), **(environment or {})}),
            cwd=work_folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline_s = time.monotonic() + timeout_s
        try:
            while (status := child.poll()) is None and time.monotonic() < deadline_s:
                if while_waiting is not None:
                    while_waiting()
                time.sleep(_POLL_S)
        finally:
            end_process_group(child)
    if status is None:
        raise ScenarioError(f"{target} did not end within {timeout_s:.0f} s\n{log_tail(log_path)}")
    if status != 0 or not result_path.exists():
        ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        raise ScenarioError(f"{target} ended with {ending}\n{log_tail(log_path)}")
    return json.loads(result_path.read_text())


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a process that runs vLLM: this process's own, the settings above, then `extra`.

    A `PYTHONPATH` in `extra` is put in front of the present one instead of replacing it.
    """
    environment = {**os.environ, **ENGINE_ENVIRONMENT, **(extra or {})}
    inherited = os.environ.get("PYTHONPATH", "")
    if extra is not None and "PYTHONPATH" in extra and inherited:
        environment["PYTHONPATH"] = os.pathsep.join([extra["PYTHONPATH"], inherited])
    return environment


def end_process_group(child: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """End `child`, the leader of its own group, and all it started: SIGTERM, then SIGKILL after `grace_s` seconds."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        deadline_s = time.monotonic() + wait_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        while time.monotonic() < deadline_s:
            child.poll()  # reaps the leader, without which the group never empties
            if not _group_exists(child.pid):
                return
            time.sleep(_POLL_S)


def log_tail(path: Path) -> str:
    """Return the last part of a log file for an error message."""
    text = path.read_text(errors="replace") if path.exists() else "(no log)"
    return f"--- end of {path} ---\n{text[-_LOG_TAIL_CHARACTERS:]}"


def _import_root(scenario: Callable[..., Any]) -> str:
    """Return the folder from which the scenario's module can be imported by its full name."""
    module = sys.modules[scenario.__module__]
    if scenario.__module__ == "__main__" or module.__file__ is None or "." in scenario.__qualname__:
        raise ValueError(f"a scenario must be a top-level function of an importable module: {scenario!r}")
    depth = scenario.__module__.count(".")
    return str(Path(module.__file__).resolve().parents[depth])


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="module:function")
    parser.add_argument("arguments", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    module_name, _, function_name = options.target.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    with no_lease_left_behind():
        result = function(**json.loads(options.arguments.read_text()))
    draft = options.result.with_suffix(".draft")
    draft.write_text(json.dumps(result))
    draft.replace(options.result)


if __name__ == "__main__":
    _main()
