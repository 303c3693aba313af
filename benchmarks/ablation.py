"""What each part of the forecast brings: the same replay with one part switched off at a time.

    python -m benchmarks.ablation [TRACE] [--capacity 512,2048] [--seed 1,2,3] [--only NAME,...] [--hours 24]

One JSON object per (variant, capacity, seed) on stdout as it is measured, then the table of docs/forecast.md: block hit
rate in percent, mean over seeds, and the difference to the full policy in points with its standard error over seeds
(traces with real timestamps have one arrival order only, and so no error). "lru" and "belady" give the scale.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable

from kvtier.place.guard import Guard
from kvtier.place.lru import LeafFirstLRU
from kvtier.place.policy import EvictionPolicy, TierView, Victim
from kvtier.place.worth import WorthPolicy
from kvtier.predict.features import FeatureSet
from kvtier.predict.forecast import ForecastOptions
from kvtier.sim.replay import ReplayResult, replay
from kvtier.sim.sources import open_source
from kvtier.sim.traces import TraceRequest

HORIZON_S = 120.0  # for ranking by P(reuse within it); of the order of the eviction age on these traces


class NoBypass(WorthPolicy):
    """May not evict the tail just inserted unless there is nothing else."""

    _newest = -1

    def on_finish(self, path, context, outcome, now):  # type: ignore[no-untyped-def]
        super().on_finish(path, context, outcome, now)
        self._newest = path[-1].id if path else -1

    def victims(self, rows: int, now: float) -> list[Victim]:
        subject = int(self.forecast.sessions.owner[self._newest])
        self.forecast.subjects.running[subject] = True
        named = super().victims(rows, now)
        self.forecast.subjects.running[subject] = False
        return named


def forecasting(
    options: ForecastOptions | None = None, *, guarded: bool = False, bypass: bool = True
) -> Callable[[TierView], EvictionPolicy]:
    """A factory of policy "kvtier" with parts switched off. Makes and feeds its own forecast."""

    def make(view: TierView) -> EvictionPolicy:
        policy = (WorthPolicy if bypass else NoBypass)(view, guarded=False)
        if options is not None:
            policy.forecast.options = options
        if guarded:
            policy.guard = Guard(view, policy.forecast, policy._recency, 0)
        return policy

    return make


def knowing(**features: bool) -> Callable[[TierView], EvictionPolicy]:
    """With other knowledge than by default."""
    return forecasting(ForecastOptions(features=FeatureSet(**features)))


VARIANTS: dict[str, Callable[[TierView], EvictionPolicy]] = {
    "lru": LeafFirstLRU,
    "kvtier": forecasting(guarded=True),
    "no guard": forecasting(),
    "no age": forecasting(ForecastOptions(age=False)),
    "P(reuse within 2 min) instead of the index": forecasting(ForecastOptions(horizon_s=HORIZON_S)),
    "no bypass": forecasting(bypass=False),
    "no stop reason": knowing(stop=False),
    "no lengths": knowing(lengths=False),
    "no gaps": knowing(gaps=False),
    "no turn, session age": knowing(turns=False),
    "with sharing": knowing(sharing=True),
    "with roles": knowing(roles=True),
    "no tools": knowing(tools=False),
}


def measure(name: str, requests: list[TraceRequest], capacity: int) -> tuple[ReplayResult, float]:
    """One replay, and its CPU seconds."""
    begin_s = time.process_time()
    result = replay(requests, VARIANTS[name], capacity)
    return result, time.process_time() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "trace",
        nargs="?",
        default="workload:agent?sessions=200&hours=2",
        help="a trace file, or workload:KIND?parameters",
    )
    parser.add_argument("--capacity", default="512,2048")
    parser.add_argument("--seed", default="1,2,3")
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--hours", type=float, default=math.inf, help="replay only what arrives in the first hours")
    options = parser.parse_args()
    capacities = [int(text) for text in options.capacity.split(",")]
    seeds = [int(text) for text in options.seed.split(",")]
    names = [name for name in VARIANTS if f",{name}," in f",{options.only},"]
    trace = open_source(options.trace)
    hits: dict[tuple[str, int], list[float]] = {}
    for seed in seeds:
        requests = [r for r in trace.requests(seed) if r.arrival_s < 3600.0 * options.hours]
        for name in names:
            for capacity in capacities:
                result, cpu_s = measure(name, requests, capacity)
                hits.setdefault((name, capacity), []).append(100.0 * result.hit_rate)
                row = {"variant": name, "capacity_blocks": capacity, "seed": seed, "hit_rate": result.hit_rate}
                print(json.dumps({**row, "cpu_s": round(cpu_s, 2)}), flush=True)
    print_table(hits, names, capacities)


def print_table(hits: dict[tuple[str, int], list[float]], names: list[str], capacities: list[int]) -> None:
    """Mean hit rates, and differences to the policy without guard (with it, for the guard itself)."""
    out = sys.stdout
    out.write("| variant | " + " | ".join(f"{c:,}" for c in capacities) + " |\n|---|" + "---|" * len(capacities) + "\n")
    for name in names:
        cells = []
        for capacity in capacities:
            mine, base = hits[name, capacity], hits.get(("no guard", capacity))
            cell = f"{statistics.mean(mine):.2f}"
            if base is not None and name != "no guard":
                deltas = [a - b for a, b in zip(mine, base, strict=True)]
                cell += f" ({statistics.mean(deltas):+.2f}"
                cell += f" ± {statistics.stdev(deltas) / len(deltas) ** 0.5:.2f})" if len(deltas) > 1 else ")"
            cells.append(cell)
        out.write(f"| {name} | " + " | ".join(cells) + " |\n")


if __name__ == "__main__":
    main()
