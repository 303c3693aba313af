"""A progress bar on stderr, for a person to watch; nothing is written where no one looks."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ReplayProgress:
    """One bar over a whole grid of replays. A context manager, and a `sim.experiment.Progress`."""

    def __init__(self, replays: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._replays = replays
        self._task: TaskID | None = None

    def __enter__(self) -> ReplayProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, description: str, requests: int) -> None:
        """A replay of so many requests starts."""
        if self._task is None:
            self._task = self._bar.add_task(description, total=requests * self._replays)
        self._bar.update(self._task, description=description)

    def advance(self, requests: int) -> None:
        """So many more were served."""
        if self._task is not None:
            self._bar.advance(self._task, requests)


class StepProgress:
    """A bar for work that reports (what, steps done, steps in all); several stages follow each other. Callable."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many steps of a stage are done."""
        self._bar.update(self._task, description=what, completed=done, total=max(1, total))
