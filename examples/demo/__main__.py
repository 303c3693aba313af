"""Serve a real model through kvtier and measure what it saves: `make demo`, or `python -m examples.demo` in its venv.

Questions about one long document are answered four times: by plain vLLM without any cache, from vLLM's device cache,
from kvtier's DRAM tier after a reset of the device cache, and from kvtier's NVMe tier by a new process for each
question. After the first time nothing but the questions' own tokens should be computed, and the answers must be the
same to the token; the exit status is 1 if that is not what happened.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from examples.demo.conversation import QUESTIONS
from examples.demo.report import print_table
from examples.demo.run import run_demo
from kvtier.testing.prepared import cache_root
from kvtier.testing.scenario import ScenarioError

_TABLE_WIDTH = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--questions", type=int, choices=range(1, len(QUESTIONS) + 1), default=len(QUESTIONS), help="ask fewer"
    )
    parser.add_argument("--model", type=Path, help="use the model in this Hugging Face folder")
    options = parser.parse_args()
    console = Console(stderr=True)
    root = cache_root() / "demo"  # not /tmp: that may lie in memory, and the NVMe tier belongs on a disk
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            result = run_demo(Path(folder), QUESTIONS[: options.questions], options.model, console)
    except ScenarioError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        print_table(result, Console(width=_TABLE_WIDTH))
    for shortcoming in result.shortcomings():
        console.print(f"demo: {shortcoming}", style="bold red")
    return 1 if result.shortcomings() else 0


if __name__ == "__main__":
    sys.exit(main())
