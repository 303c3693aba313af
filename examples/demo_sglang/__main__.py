"""Serve a real model through SGLang with kvtier as the storage level of HiCache: `make demo-sglang`.

Questions about a long document are answered from nothing, from device memory, from host memory after the device was
filled with something else, from kvtier after both were flushed, and from kvtier by a new server over the same folder.
The answers must be the same to the token, and all but the last part of each prompt must come from where it should; the
exit status is 1 if that is not what happened. Without a GPU, SGLang runs through the plug-in in tests/sglang/cpu.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.demo_sglang.run import LEVELS, TITLES, Outcome, run_demo
from kvtier.testing.prepared import cache_root
from tests.sglang.server import ServerError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--questions", type=int, default=3, choices=range(1, 6), help="how many prompts (default 3)")
    parser.add_argument("--model", type=Path, help="use the model in this Hugging Face folder")
    options = parser.parse_args()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # no server outlives its demo
    root = cache_root() / "demo"  # not /tmp: that may lie in memory, and the nvme tier belongs on a disk
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            outcome = run_demo(Path(folder), options.questions, options.model, console)
    except ServerError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    if options.json:
        print(json.dumps(outcome.as_json()))
    else:
        _print_table(outcome, Console(width=100))
    for shortcoming in outcome.shortcomings():
        console.print(f"demo: {shortcoming}", style="bold red")
    return 1 if outcome.shortcomings() else 0


def _print_table(outcome: Outcome, console: Console) -> None:
    table = Table(
        title=f"{outcome.model}, float32, on this CPU: {outcome.questions} prompts of {outcome.prompt_tokens:,} tokens",
        caption="TTFT: median time to the first token. Cached: prompt tokens that came from that level.",
    )
    for heading in ("level", "TTFT", "of cold", "cached", "same output"):
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for level in LEVELS:
        ttft_s = outcome.ttft_s(level)
        table.add_row(
            TITLES[level],
            f"{ttft_s * 1000:,.0f} ms",
            "1" if level == "cold" else f"1/{outcome.ttft_s('cold') / ttft_s:.1f}",
            "" if level == "cold" else f"{outcome.cached_tokens(level):,}",
            "reference" if level == "cold" else "yes" if outcome.same_outputs(level) else "NO",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
