"""What stays on the device: vLLM's own order of eviction against kvtier's, on streams of agents and passers-by.

    python -m benchmarks.hbm [--seeds 1,2,3] [--requests 300] [--agents 4,6,8] [--blocks 41] [--live] [--cost]

Each stream (tests/e2e/agent_stream.py) is served twice, with `hbm_policy` "engine" and "kvtier". Without `--live`
vLLM's real KVCacheManager and block pool run with kvtier's real manager and no model, one request at a time; with it, a
real engine on the CPU with a small model answers every request, and the answers of both runs are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.rig.settings import scratch_folder
from kvtier.testing.scenario import run_scenario
from tests.e2e import scenarios_device
from tests.e2e.agent_stream import AgentStream
from tests.e2e.models import tiny_llama
from tests.e2e.scheduler_without_model import SchedulerWithoutModel

ORDERS = ("engine", "kvtier")


def without_model(seed: int, requests: int, agents: int, blocks: int, order: str) -> dict[str, Any]:
    """Device hits of one stream in the real block pool."""
    engine = SchedulerWithoutModel(blocks, order)
    stream, answers = AgentStream(seed, requests, agents), random.Random(seed)
    prompt_tokens = hits = 0
    for at_s, prompt in stream:
        answer = [answers.randrange(256) for _ in range(8)]
        hits += engine.serve(at_s, prompt, answer)
        prompt_tokens += len(prompt)
        stream.answer(answer)
    engine.close()
    return {"prompt_tokens": prompt_tokens, "hit_tokens": hits, "moved": engine.moved, "off": engine.off}


def live(seed: int, requests: int, agents: int, order: str, folder: Path) -> dict[str, Any]:
    """The same in a real engine."""
    arguments = {"model": str(tiny_llama()), "seed": seed, "requests": requests, "hbm_policy": order, "agents": agents}
    result = run_scenario(scenarios_device.agent_stream, work_folder=folder, arguments=arguments, timeout_s=600)
    hits = int(result["metrics"].get("kvtier_tokens_total{source=hbm}", 0))
    return {**{k: result[k] for k in ("prompt_tokens", "moved", "off", "answers")}, "hit_tokens": hits}


def cost(blocks: int = 12_001, requests: int = 150) -> dict[str, float]:
    """Seconds of the engine's thread that view and steering take a step, in a large pool full of long prompts."""
    engine, draw, steps = SchedulerWithoutModel(blocks, "kvtier"), random.Random(0), list[float]()
    keep_up = engine.device._keep_up

    def timed() -> None:
        began = time.thread_time()
        keep_up()
        steps.append(time.thread_time() - began)

    engine.device._keep_up = timed  # type: ignore[method-assign]
    for i in range(requests):
        engine.serve(5.0 * i, [draw.randrange(256) for _ in range(32 * draw.randrange(50, 500))], [1] * 8)
    engine.close()
    p50_s, p99_s = (float(np.percentile(steps, q)) for q in (50, 99))
    return {"steps": len(steps), "p50_s": p50_s, "p99_s": p99_s, "max_s": max(steps), "moved": engine.moved}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--agents", default="4,6,8")
    parser.add_argument("--blocks", type=int, default=41, help="device blocks; live engines have 41")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--cost", action="store_true", help="only what a step costs in a pool of 12,000 blocks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.cost:
        sys.stdout.write(json.dumps(cost()) + "\n")
        return 0
    table = Table("agents", "seed", "prompt tokens", "engine's order", "kvtier's order", "difference", "answers")
    worse = 0
    with scratch_folder("hbm") as folder:
        for agents in map(int, options.agents.split(",")):
            for seed in map(int, options.seeds.split(",")):
                found = {
                    order: live(seed, options.requests, agents, order, folder)
                    if options.live
                    else without_model(seed, options.requests, agents, options.blocks, order)
                    for order in ORDERS
                }
                engine, kvtier = (found[order] for order in ORDERS)
                same = engine.pop("answers", None) == kvtier.pop("answers", None)
                row = {"agents": agents, "seed": seed, "requests": options.requests, "same_answers": same, **found}
                if options.json:
                    sys.stdout.write(json.dumps(row) + "\n")
                gain = kvtier["hit_tokens"] - engine["hit_tokens"]
                worse += gain < 0 or not same
                table.add_row(
                    str(agents),
                    str(seed),
                    f"{engine['prompt_tokens']:,}",
                    f"{engine['hit_tokens']:,}",
                    f"{kvtier['hit_tokens']:,}",
                    f"{gain:+,}",
                    ("same" if same else "DIFFER") if options.live else "–",
                )
    if not options.json:
        Console().print(table)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
