"""The demo's steps: which process measures what, one after the other, with a progress bar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.demo import paths, prepare_model
from examples.demo.report import DemoResult, PathResult
from kvtier.testing.scenario import run_scenario

DRAM_BYTES = "512MiB"
NVME_BYTES = "1GiB"
_STEP_TIMEOUT_S = 900.0


def run_demo(folder: Path, questions: tuple[str, ...], model: Path | None, console: Console) -> DemoResult:
    """Measure every path. `folder` must be empty: it receives the NVMe tier and the processes' logs."""
    nvme = folder / "nvme"
    nvme.mkdir()
    kvtier = {"dram_bytes": DRAM_BYTES, "nvme_path": str(nvme), "nvme_bytes": NVME_BYTES}
    count = len(questions)
    with _Steps(folder, console, total=1 + 4 * count) as steps:
        name = prepare_model.MODEL_NAME if model is None else model.name
        if model is None:
            model = Path(steps.run(f"preparing {name} (once)", prepare_model.prepare))
        steps.done(1)
        same = {"model": str(model), "progress": str(steps.marks)}
        plain = steps.run("plain vLLM", paths.without_cache, questions=questions, **same)
        steps.done(1 + count)
        first = steps.run("vLLM with kvtier", paths.first_process, questions=questions, kvtier=kvtier, **same)
        steps.done(1 + 3 * count)
        restarted = []
        for number, question in enumerate(questions, start=1):
            title = f"new process {number} of {count}"
            restarted.append(steps.run(title, paths.new_process, question=question, kvtier=kvtier, **same))
            steps.done(1 + 3 * count + number)
    measured = {"cold": plain["cold"], "hbm": first["hbm"], "dram": first["dram"], "nvme_restart": _merged(restarted)}
    results = {path: PathResult.from_json(measured[path]) for path in measured}
    return DemoResult(name, questions, plain["shared_tokens"], results)


def _merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    loaded = sum((Counter(result["bytes_loaded"]) for result in results), Counter[str]())
    return {"answers": [answer for result in results for answer in result["answers"]], "bytes_loaded": dict(loaded)}


class _Steps:
    """Runs scenarios while a progress bar shows the step's name and how many questions have been answered."""

    def __init__(self, folder: Path, console: Console, total: int) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._progress.add_task("", total=total)
        self._folder = folder
        self._completed = 0
        self.marks = folder / "answered"
        """Scenarios append one byte to this file per answered question."""

    def __enter__(self) -> _Steps:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def run(self, title: str, scenario: Callable[..., Any], **arguments: Any) -> Any:
        """Run one scenario to its end."""
        self.marks.write_bytes(b"")
        self._progress.update(self._task, description=title)
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"demo: {title}")
        return run_scenario(
            scenario,
            work_folder=self._folder,
            arguments=arguments,
            environment={"VLLM_LOGGING_LEVEL": "WARNING"},
            timeout_s=_STEP_TIMEOUT_S,
            while_waiting=self._count_marks,
        )

    def done(self, completed: int) -> None:
        """Set how many units of work are behind us."""
        self._completed = completed
        self._progress.update(self._task, completed=completed)

    def _count_marks(self) -> None:
        self._progress.update(self._task, completed=self._completed + self.marks.stat().st_size)
