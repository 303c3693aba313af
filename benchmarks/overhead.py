"""What kvtier costs where it cannot help: prompts that never repeat, with kvtier against vLLM without a connector.

    python -m benchmarks.overhead [--model smollm2|tiny] [--pairs N] [--starts N] [--against NAME] [--json]

Two engines stand in two processes. Each batch of unique prompts is given to one and then to the other, and the order
alternates, so that drift of the machine falls on both. What counts is the ratio within a pair. Where its memory happens
to lie can make one process faster than its twin for as long as it lives, so both are started several times.
`--against none` measures plain vLLM against itself and shows how much of a ratio is noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.contenders import BASELINE, CONTENDERS, Contender, Room, contender
from benchmarks.rig.figures import Samples, load
from benchmarks.rig.process import EngineProcess, Run
from benchmarks.rig.progress import Steps, steps
from benchmarks.rig.prompts import unique_prompts
from benchmarks.rig.settings import end_in_order, engine_settings, scratch_folder
from benchmarks.rig.workloads import PairedRuns, run_pairs
from examples.demo.prepare_model import smollm2
from tests.e2e.models import BYTE_TOKENS, tiny_llama

FLOOR, GOAL = 0.97, 0.99
_RUNNING = 8
_ROOM = Room(dram_bytes=256 << 20, disk_bytes=4 << 30)


@dataclass(frozen=True)
class Case:
    """A model and a batch that keeps it busy for some seconds."""

    title: str
    model: Callable[[], Path]
    vocabulary: range
    prompts: int
    prompt_tokens: int
    answer_tokens: int
    device_blocks: int


CASES = {
    "smollm2": Case("SmolLM2-135M float32", smollm2, range(1_000, 40_000), 40, 128, 8, 96),
    # Steps of a few milliseconds: what is spent per step and per request shows as nowhere else.
    "tiny": Case("random Llama, 4 layers of 64", tiny_llama, range(BYTE_TOKENS), 160, 100, 16, 256),
}


@dataclass(frozen=True)
class Result:
    """The pairs of every start of the two engines."""

    title: str
    starts: list[PairedRuns]
    loads: tuple[float, float]

    @property
    def ratio(self) -> Samples:
        return Samples([ratio for pairs in self.starts for ratio in pairs.wall_ratios])

    @property
    def cpu_ratio(self) -> Samples:
        return Samples([ratio for pairs in self.starts for ratio in pairs.cpu_ratios])

    @property
    def baseline(self) -> list[Run]:
        return [run for pairs in self.starts for run in pairs.baseline]

    @property
    def contender(self) -> list[Run]:
        return [run for pairs in self.starts for run in pairs.contender]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.title,
            "throughput_ratio": self.ratio.as_json(),
            "cpu_ratio": self.cpu_ratio.as_json(),
            "ratios_by_start": [pairs.wall_ratios for pairs in self.starts],
            "cpu_ratios_by_start": [pairs.cpu_ratios for pairs in self.starts],
            "baseline_wall_s": [run.wall_s for run in self.baseline],
            "wall_s": [run.wall_s for run in self.contender],
            "baseline_cpu_s": [run.cpu_s for run in self.baseline],
            "cpu_s": [run.cpu_s for run in self.contender],
            "load": self.loads,
            "floor_met": self.ratio.median >= FLOOR,
            "goal_met": self.ratio.median >= GOAL,
        }


def measure(case: Case, against: Contender, pairs: int, starts: int, progress: Steps) -> Result:
    """Measure pairs in several starts of the two engines."""
    progress.say(f"{case.title}: preparing the model")
    model = case.model()
    python = against.interpreter(progress.say)
    before = load()
    found = [measure_start(case, model, against, python, pairs, start, progress) for start in range(starts)]
    return Result(case.title, found, (before, load()))


def measure_start(
    case: Case, model: Path, against: Contender, python: str, pairs: int, start: int, progress: Steps
) -> PairedRuns:
    """Start both engines, in another order each time, warm both up with a batch of the same shape, then alternate."""
    llm = engine_settings(case.device_blocks, _RUNNING)
    engines = [(contender(BASELINE), sys.executable, "plain"), (against, python, "other")]
    running: dict[str, EngineProcess] = {}
    with scratch_folder("overhead") as folder, ExitStack() as stack:
        for who, interpreter, name in engines if start % 2 == 0 else reversed(engines):
            progress.say(f"{case.title}: start {start + 1} of {who.title}")
            setup = who.setup(interpreter, model, llm, folder / f"store-{name}", _ROOM)
            running[name] = stack.enter_context(EngineProcess(setup, folder / f"{name}.log"))
            progress.done()
        plain, other = running["plain"], running["other"]
        progress.say(f"{case.title}: unique prompts, plain vLLM and {against.title} in turns")
        run_pairs(plain, other, [_batch(case, f"{start} warm-up")], case.answer_tokens, progress.done)
        batches = [_batch(case, f"{start} {number}") for number in range(pairs)]
        return run_pairs(plain, other, batches, case.answer_tokens, progress.done)


def _batch(case: Case, seed: str) -> list[list[list[int]]]:
    prompts = unique_prompts(f"overhead {seed}", case.prompts, case.prompt_tokens, case.vocabulary)
    return [[prompt] for prompt in prompts]


def table(results: list[Result], against: Contender) -> Table:
    found = Table(title=f"{against.title} against plain vLLM, prompts that never repeat: median and range of the pairs")
    found.add_column("model")
    for heading in ("plain, s", "with, s", "throughput ratio", "per CPU second", "load", f"≥ {FLOOR}", f"≥ {GOAL}"):
        found.add_column(heading, justify="right")
    for result in results:
        plain = Samples([run.wall_s for run in result.baseline])
        other = Samples([run.wall_s for run in result.contender])
        marks = ["yes" if result.ratio.median >= bar else "NO" for bar in (FLOOR, GOAL)]
        loads = "–".join(f"{value:.1f}" for value in result.loads)
        found.add_row(
            result.title, plain.text(2), other.text(2), result.ratio.text(3), result.cpu_ratio.text(3), loads, *marks
        )
    return found


def main() -> None:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*CASES, "both"], default="both")
    parser.add_argument("--pairs", type=int, default=3, help="pairs per start of the engines, at least 3")
    parser.add_argument("--starts", type=int, default=2, help="how often both engines are started")
    parser.add_argument("--against", choices=[known.name for known in CONTENDERS], default="kvtier")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    if options.pairs < 3:
        parser.error("--pairs must be at least 3: a median of fewer says nothing")
    against = contender(options.against)
    chosen = [case for name, case in CASES.items() if options.model in (name, "both")]
    with steps(len(chosen) * options.starts * (2 * options.pairs + 4)) as progress:
        results = [measure(case, against, options.pairs, options.starts, progress) for case in chosen]
    if options.json:
        summary = {
            "against": against.name,
            "pairs": options.pairs,
            "starts": options.starts,
            "cases": [result.as_json() for result in results],
        }
        json.dump(summary, sys.stdout, indent=1)
        print()
        return
    Console(width=None if sys.stdout.isatty() else 160).print(table(results, against))


if __name__ == "__main__":
    main()
