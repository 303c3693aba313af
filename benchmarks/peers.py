"""kvtier beside its peers on one workload: `python -m benchmarks.peers [--rounds N] [--only NAMES] [--json]`.

Plain vLLM, vLLM's own tiering with its `fs` tier, LMCache and kvtier answer the same prompts in turns, each in its own
processes with the same device pool, the same memory and a store folder; all together need about 8 GB of memory.
docs/benchmarks.md says what each figure means and what it does not show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig import workloads
from benchmarks.rig.contenders import BASELINE, CONTENDERS, Contender, Room, contender
from benchmarks.rig.engine import Answer
from benchmarks.rig.figures import Samples, load, percentile
from benchmarks.rig.lmcache_environment import Absent
from benchmarks.rig.process import EngineFailure, EngineProcess, Run
from benchmarks.rig.progress import Steps, steps
from benchmarks.rig.prompts import Document
from benchmarks.rig.settings import BLOCK_TOKENS, end_in_order, engine_settings, scratch_folder
from benchmarks.rig.workloads import Prompts, Work
from examples.demo.prepare_model import smollm2

ROOM = Room(dram_bytes=256 << 20, disk_bytes=2 << 30)
_QUICK = Work(documents=2, sessions=4, turns=3, unique=8, unique_batches=1)


@dataclass
class Result:
    """What one contender did, over all rounds."""

    title: str
    absent: str = ""
    cold_ttft_s: Samples = field(default_factory=Samples)
    device_ttft_s: Samples = field(default_factory=Samples)
    reset_ttft_s: Samples = field(default_factory=Samples)
    fresh_ttft_s: Samples = field(default_factory=Samples)
    agents_mean_ttft_s: Samples = field(default_factory=Samples)
    agents_p95_ttft_s: Samples = field(default_factory=Samples)
    agents_total_s: Samples = field(default_factory=Samples)
    agents_cpu_s: Samples = field(default_factory=Samples)
    unique_ratio: Samples = field(default_factory=Samples)
    unique_cpu_ratio: Samples = field(default_factory=Samples)
    start_s: Samples = field(default_factory=Samples)
    load: Samples = field(default_factory=Samples)
    reset_cached: int = 0
    fresh_cached: int = 0
    agents_cached: int = 0
    agents_tokens: int = 0
    different: int = 0
    compared: int = 0
    poison_wrong: int = 0
    poison_asked: int = 0
    poison_cached: int = 0
    poison_flips: int = 0

    def as_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, Samples)}
        return plain | {name: value.as_json() for name, value in vars(self).items() if isinstance(value, Samples)}


class Round:
    """One pass of all contenders over one set of prompts.

    All engines of a part are up at once and take turns, another one first each time: what the machine does meanwhile
    falls on all of them.
    """

    def __init__(
        self, number: int, work: Work, results: dict[str, Result], folder: Path, progress: Steps, profiles: Path | None
    ) -> None:
        self._number, self._results, self._folder = number, results, folder
        self._progress, self._profiles = progress, profiles
        self._model = smollm2()
        self._prompts = Prompts.of(self._model, work, number)
        self._llm = engine_settings(work.device_blocks)
        self._answers: dict[str, dict[str, list[Answer]]] = {name: {} for name in results}
        self._turn = number

    def run(self) -> None:
        with self._engines("first process") as engines:
            self._documents(engines)
            self._agents(engines)
            self._unique(engines)
        with self._engines("fresh process") as engines:
            self._fresh(engines)
        for name, result in self._results.items():
            if name != BASELINE and not result.absent:
                result.poison_flips += workloads.flip_bits(self._store(name), _block_bytes(self._model))
        with self._engines("after flips", leave_out=BASELINE) as engines:
            self._poisoned(engines)
        self._count_differences()

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _documents(self, engines: dict[str, EngineProcess]) -> None:
        def ask(name: str, engine: EngineProcess, doc: Document) -> None:
            result = self._results[name]
            cold, device, reset = workloads.ask_document(engine, self._prompts, doc)
            result.cold_ttft_s.add([cold.ttft_s])
            result.device_ttft_s.add(answer.ttft_s for answer in device)
            result.reset_ttft_s.add([reset.ttft_s])
            result.reset_cached += reset.cached_tokens
            self._keep(name, "poisoned", [cold, device[0]])
            self._keep(name, "documents", [cold, *device, reset])

        for number, doc in enumerate(self._prompts.documents):
            self._each(engines, f"document {number + 1}", partial(ask, doc=doc))

    def _agents(self, engines: dict[str, EngineProcess]) -> None:
        def replay(name: str, engine: EngineProcess) -> None:
            result = self._results[name]
            profile = str(self._profiles / f"agents-{name}.pstats") if self._profiles else ""
            run = workloads.replay_agents(engine, self._prompts, profile)
            result.agents_mean_ttft_s.add([statistics.fmean(run.ttft_s)])
            result.agents_p95_ttft_s.add([percentile(run.ttft_s, 0.95)])
            result.agents_total_s.add([run.wall_s])
            result.agents_cpu_s.add([run.cpu_s])
            result.agents_cached += sum(answer.cached_tokens for answer in run.answers)
            result.agents_tokens += sum(answer.prompt_tokens for answer in run.answers)
            self._keep(name, "agents", sorted(run.answers, key=lambda answer: (answer.session, answer.turn)))

        self._each(engines, "agent sessions", replay)

    def _unique(self, engines: dict[str, EngineProcess]) -> None:
        work = self._prompts.work
        for number in range(work.unique_batches):
            batch = self._prompts.unique_batch(f"{self._number} {number}")
            runs: dict[str, Run] = {}

            def answer(name: str, engine: EngineProcess, batch: Any = batch, runs: dict[str, Run] = runs) -> None:
                runs[name] = engine.run(batch, max_tokens=work.answer_tokens, in_flight=len(batch))

            self._each(engines, f"unique prompts {number + 1}", answer)
            plain = runs.pop(BASELINE)
            for name, run in runs.items():
                self._results[name].unique_ratio.add([plain.wall_s / run.wall_s])
                self._results[name].unique_cpu_ratio.add([plain.cpu_s / run.cpu_s])

    def _fresh(self, engines: dict[str, EngineProcess]) -> None:
        def ask(name: str, engine: EngineProcess, doc: Document) -> None:
            answer = workloads.ask_one(engine, self._prompts, doc, workloads.FRESH)
            self._results[name].fresh_ttft_s.add([answer.ttft_s])
            self._results[name].fresh_cached += answer.cached_tokens
            self._keep(name, "fresh", [answer])

        for number, doc in enumerate(self._prompts.documents):
            self._each(engines, f"document {number + 1}", partial(ask, doc=doc))

    def _poisoned(self, engines: dict[str, EngineProcess]) -> None:
        def ask(name: str, engine: EngineProcess) -> None:
            found = [
                workloads.ask_one(engine, self._prompts, doc, question)
                for doc in self._prompts.documents
                for question in workloads.POISONED
            ]
            result = self._results[name]
            result.poison_asked += len(found)
            result.poison_cached += sum(answer.cached_tokens for answer in found)
            result.poison_wrong += workloads.count_different(found, self._answers[BASELINE]["poisoned"])

        self._each(engines, "questions", ask)

    # --- engines and turns -------------------------------------------------------------------------------------------

    @contextmanager
    def _engines(self, part: str, leave_out: str = "") -> Iterator[dict[str, EngineProcess]]:
        """Start an engine for every contender that is not absent, warmed up; close them when the block ends."""
        self._part = part
        engines: dict[str, EngineProcess] = {}

        def start(name: str) -> None:
            known, result = contender(name), self._results[name]
            setup = known.setup(known.interpreter(self._say), self._model, self._llm, self._store(name), ROOM)
            engines[name] = EngineProcess(setup, self._folder / f"{name}.log")
            result.start_s.add([engines[name].start_s])
            workloads.warm_up(engines[name], self._prompts)

        try:
            for name, result in self._results.items():
                if not result.absent and name != leave_out:
                    self._say(f"{result.title} starts")
                    self._guarded(name, engines, partial(start, name))
                    self._progress.done()
            yield engines
            for name, engine in list(engines.items()):
                self._guarded(name, engines, engine.close)
        finally:
            for engine in engines.values():
                engine.kill()

    def _each(self, engines: dict[str, EngineProcess], what: str, action: Callable[[str, EngineProcess], None]) -> None:
        """Let every engine do the same, another one first each time."""
        names = list(engines)
        first = self._turn % len(names)
        self._turn += 1
        for name in names[first:] + names[:first]:
            self._say(f"{what}, {self._results[name].title}")
            self._results[name].load.add([load()])
            self._guarded(name, engines, partial(action, name, engines[name]))
            self._progress.done()

    def _guarded(self, name: str, engines: dict[str, EngineProcess], action: Callable[[], None]) -> None:
        """Do something with a contender; one that fails is absent from here on. Without the baseline nothing counts."""
        try:
            action()
        except (Absent, EngineFailure) as error:
            if name in engines:
                engines.pop(name).kill()
            if name == BASELINE:
                raise
            self._results[name].absent = str(error)

    def _keep(self, name: str, part: str, answers: list[Answer]) -> None:
        self._answers[name].setdefault(part, []).extend(answers)

    def _count_differences(self) -> None:
        for name, parts in self._answers.items():
            result = self._results[name]
            if name == BASELINE or result.absent:
                continue
            for part in ("documents", "agents", "fresh"):
                result.compared += len(parts[part])
                result.different += workloads.count_different(parts[part], self._answers[BASELINE][part])

    def _store(self, name: str) -> Path:
        return self._folder / f"store-{name}"

    def _say(self, what: str) -> None:
        self._progress.say(f"round {self._number + 1}, {self._part}: {what}")


def _block_bytes(model: Path) -> int:
    """Bytes of one block of a full-attention model in float32, all layers."""
    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4 * BLOCK_TOKENS)


def compare(chosen: list[Contender], work: Work, rounds: int, profiles: Path | None) -> dict[str, Result]:
    """Run all rounds, each on other prompts and on empty stores."""
    results = {known.name: Result(known.title) for known in chosen}
    turns = 3 + 2 * work.documents + 1 + work.unique_batches  # three starts, two passes over the documents, …
    with steps(rounds * len(chosen) * (turns + 1) - 2 * rounds) as progress:
        progress.say("preparing the model")
        for number in range(rounds):
            with scratch_folder("peers") as folder:
                Round(number, work, results, folder, progress, profiles).run()
    return results


def aims(results: dict[str, Result]) -> dict[str, bool | None]:
    """kvtier against its aims; None where what is needed was not measured."""
    ours, native = results.get("kvtier"), results.get("native")
    if ours is None or ours.absent:
        return {}

    def not_above(name: str) -> bool | None:
        if native is None or native.absent:
            return None
        mine, theirs = getattr(ours, name), getattr(native, name)
        return bool(mine.median <= theirs.median)

    return {
        "TTFT after a device reset not above native's": not_above("reset_ttft_s"),
        "TTFT in a fresh process not above native's": not_above("fresh_ttft_s"),
        "agent replay total not above native's": not_above("agents_total_s"),
        "unique prompts at 0.97 of plain vLLM or more": ours.unique_ratio.median >= 0.97,
        "no wrong answer after the flips": ours.poison_wrong == 0,
        "answers those of plain vLLM": ours.different == 0,
    }


def table(results: dict[str, Result]) -> Table:
    found = Table(title="SmolLM2-135M float32 on the CPU; TTFT in seconds, median and range", show_lines=True)
    found.add_column("")
    for heading in ("cold", "device hit", "after reset", "fresh process"):
        found.add_column(heading, justify="right")
    found.add_column("agents: mean / p95 / total", justify="right")
    found.add_column("unique, of plain", justify="right")
    found.add_column("wrong after flips", justify="right")
    found.add_column("other answers", justify="right")
    found.add_column("load", justify="right")
    for name, result in results.items():
        if result.absent:
            found.add_row(result.title, f"absent: {result.absent.splitlines()[0]}")
            continue
        agents = (result.agents_mean_ttft_s, result.agents_p95_ttft_s, result.agents_total_s)
        plain = name == BASELINE
        found.add_row(
            result.title,
            result.cold_ttft_s.text(2),
            result.device_ttft_s.text(3),
            result.reset_ttft_s.text(3),
            result.fresh_ttft_s.text(3),
            " / ".join(f"{part.median:.2f}" for part in agents),
            "1" if plain else f"{result.unique_ratio.text(3)}\ncpu {result.unique_cpu_ratio.text(3)}",
            "–" if plain else _poison_text(result),
            "–" if plain else f"{result.different} of {result.compared}",
            f"{result.load.median:.1f}",
        )
    return found


def _poison_text(result: Result) -> str:
    served = "" if result.poison_cached else "\n(nothing was served)"
    return f"{result.poison_wrong} of {result.poison_asked}{served}"


def main() -> None:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [contender.name for contender in CONTENDERS if contender.name != BASELINE]
    parser.add_argument("--rounds", type=int, default=1, help="passes over all contenders, each on other prompts")
    parser.add_argument("--only", default="", help=f"contenders beside plain vLLM, by comma: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work: shows that everything runs")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write cProfile statistics of the agent replay")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"unknown contender {unknown[0]!r}; known are {', '.join(names)}")
    chosen = [contender for contender in CONTENDERS if contender.name == BASELINE or contender.name in wanted]
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    work = _QUICK if options.quick else Work()
    results = compare(chosen, work, options.rounds, options.profile.absolute() if options.profile else None)
    if options.json:
        summary = {
            "work": asdict(work),
            "rounds": options.rounds,
            "contenders": {name: result.as_json() for name, result in results.items()},
            "aims": aims(results),
        }
        json.dump(summary, sys.stdout, indent=1)
        print()
        return
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(table(results))
    for aim, met in aims(results).items():
        console.print(f"{'not measured' if met is None else 'met' if met else 'NOT MET'}: {aim}")


if __name__ == "__main__":
    main()
