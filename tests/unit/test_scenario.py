"""Scenarios: results come back, failures explain themselves, nothing stays running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.scenario import (
    ENGINE_ENVIRONMENT,
    ScenarioError,
    end_process_group,
    engine_environment,
    run_scenario,
)


def describe(names: list[str]) -> dict[str, Any]:
    return {"pid": os.getpid(), "values": {name: os.environ.get(name) for name in names}}


def fail(message: str) -> None:
    raise ValueError(message)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def sleep_with_child(seconds: float, pid_path: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    Path(pid_path).write_text(str(sleeper.pid))
    time.sleep(seconds)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_runs_in_another_process_with_the_engine_environment(tmp_path: Path) -> None:
    names = [*ENGINE_ENVIRONMENT, "KVTIER_TEST_VALUE"]
    result = run_scenario(
        describe, work_folder=tmp_path, arguments={"names": names}, environment={"KVTIER_TEST_VALUE": "7"}
    )
    assert result["pid"] != os.getpid()
    assert result["values"] == {**ENGINE_ENVIRONMENT, "KVTIER_TEST_VALUE": "7"}


def test_an_exception_in_the_child_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"exit status 1(.|\n)*ValueError: the reason"):
        run_scenario(fail, work_folder=tmp_path, arguments={"message": "the reason"})


def test_a_crash_names_the_signal(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="SIGKILL"):
        run_scenario(die, work_folder=tmp_path, arguments={"number": int(signal.SIGKILL)})


def test_a_timeout_ends_the_whole_process_group(tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    waits = []
    with pytest.raises(ScenarioError, match="did not end within"):
        run_scenario(
            sleep_with_child,
            work_folder=tmp_path,
            arguments={"seconds": 60.0, "pid_path": str(pid_path)},
            timeout_s=3.0,
            while_waiting=lambda: waits.append(1),
        )
    assert not is_running(int(pid_path.read_text()))
    assert waits


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    end_process_group(child, grace_s=0.3)
    assert child.returncode == -signal.SIGKILL
    child.stdout.close()


def test_only_top_level_functions_can_run_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top-level function"):
        run_scenario(lambda: None, work_folder=tmp_path)


def test_an_extra_search_path_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/kept")
    assert engine_environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"/mine{os.pathsep}/kept"
    assert engine_environment()["PYTHONPATH"] == "/kept"
