"""Progress on stderr: a bar on a terminal, one line per step elsewhere. stdout belongs to the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Steps:
    """How far a run is. `say` names what is being done now, `done` counts steps."""

    def __init__(self, total: int, bar: Progress | None) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total) if bar is not None else None
        self._total, self._count, self._began_s = total, 0, time.monotonic()

    def say(self, text: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)
        else:
            elapsed_s = time.monotonic() - self._began_s
            print(f"[{self._count}/{self._total}, {elapsed_s:.0f} s] {text}", file=sys.stderr, flush=True)

    def done(self, steps: int = 1) -> None:
        self._count += steps
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, steps)


@contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Show progress over `total` steps while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Steps(total, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield Steps(total, bar)
