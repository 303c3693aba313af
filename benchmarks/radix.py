"""What SGLang keeps on device and host: LRU against `--radix-eviction-policy kvtier`, on streams of agents.

    python -m benchmarks.radix [--seeds 1,2,3] [--requests 300] [--agents 4,6,8] [--live] [--json]   (make env-sglang)

Each stream (tests/e2e/agent_stream.py) is served under both policies, one request at a time, in its own time. Without
`--live` SGLang's real radix tree, pools and HiCache controller run without a model; with it, its real server with a
small one, and the answers of both runs are compared. Both run with the Python tree core, which kvtier's policy needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.settings import end_in_order, scratch_folder
from tests.e2e.agent_stream import AgentStream
from tests.e2e.models import tiny_llama
from tests.sglang.agents import POLICIES, PYTHON_CORE, radix_hits
from tests.sglang.conftest import run_in_sglang
from tests.sglang.server import ENVIRONMENT_CLOCK, SGLangServer, sglang_python

_ANSWER_TOKENS = 8


def live(folder: Path, seed: int, agents: int, options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """One stream through the real server, whose policy reads the stream's time from a file."""
    clock = folder / "clock"
    _write_whole(clock, "0")
    environment = {**PYTHON_CORE, ENVIRONMENT_CLOCK: str(clock)}
    stream, found, answers = (
        AgentStream(seed, options.requests, agents),
        dict.fromkeys(("prompt", "device", "host"), 0),
        [],
    )
    with SGLangServer(
        tiny_llama(),
        folder,
        options=("--radix-eviction-policy", policy),
        environment=environment,
        device_tokens=options.device_tokens,
        host_ratio=options.host_ratio,
    ) as server:
        for at_s, prompt in stream:
            _write_whole(clock, repr(at_s))
            answer = server.cached_tokens(prompt, _ANSWER_TOKENS)
            found["prompt"] += len(prompt)
            found["device"] += answer["device"]
            found["host"] += answer["host"]
            answers.append(answer["output"])
            stream.answer(answer["output"])
    return {"seed": seed, "policy": policy, **found, "answers": answers}


def _write_whole(path: Path, text: str) -> None:
    """So that a reader finds the former text or this one, never half of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--agents", default="4,6,8")
    parser.add_argument("--device-tokens", type=int, default=1_280)
    parser.add_argument("--host-ratio", type=float, default=1.5, help="size of host memory over the device's")
    parser.add_argument("--live", action="store_true", help="with SGLang's server and a model")
    parser.add_argument("--json", action="store_true", help="print one JSON object a pair of runs")
    options = parser.parse_args()
    end_in_order()
    if sglang_python() is None:
        print("skipped: there is no environment with SGLang; make it with `make env-sglang`")
        return 0
    seeds = [int(seed) for seed in options.seeds.split(",")]
    columns = [f"{policy}: {where}" for policy in POLICIES for where in ("device", "host")]
    table = Table("agents", "seed", "prompt tokens", *columns, "both", "answers")
    wrong = 0
    with scratch_folder("radix") as folder:
        for agents in map(int, options.agents.split(",")):
            if options.live:
                rows = [live(folder, seed, agents, options, policy) for seed in seeds for policy in POLICIES]
            else:
                rows = run_in_sglang(
                    radix_hits,
                    folder,
                    PYTHON_CORE,
                    seeds=seeds,
                    requests=options.requests,
                    agents=agents,
                    device_tokens=options.device_tokens,
                    host_ratio=options.host_ratio,
                )
            for lru, kvtier in zip(rows[::2], rows[1::2], strict=True):
                same = lru.pop("answers", None) == kvtier.pop("answers", None)
                wrong += not same
                if options.json:
                    print(json.dumps({"agents": agents, "lru": lru, "kvtier": kvtier, "same_answers": same}))
                cells = [f"{found[where]:,}" for found in (lru, kvtier) for where in ("device", "host")]
                lru_hits, kvtier_hits = (found["device"] + found["host"] for found in (lru, kvtier))
                cells.append(f"{kvtier_hits / max(1, lru_hits) - 1:+.1%}")
                answers = ("same" if same else "DIFFER") if options.live else "–"
                table.add_row(str(agents), str(lru["seed"]), f"{lru['prompt']:,}", *cells, answers)
    if not options.json:
        Console(width=110).print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
