"""What each part of placement across tiers brings: a serving node replayed with one part switched at a time.

    python -m benchmarks.placement TRACE [--hardware A25,A6] [--load 1.5] [--seed 1,2,3] [--hours 8] [--only NAME,...]

One JSON object per (variant, hardware, seed) on stdout as it is measured, then the table of docs/simulator.md: mean and
median time to the first token as ratios to the native-style cache on the same requests, and what separates the mean's
ratio from the default's; means over seeds and their standard errors. `--sizes` replays caches of 0.1 to 2 times the
working set instead, against no cache at all.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time

import msgspec
import numpy as np

from kvtier.sim.node.experiment import Setting, serve
from kvtier.sim.node.hardware import Hardware, load_hardware
from kvtier.sim.node.hints import Announcer
from kvtier.sim.node.variants import VARIANTS, Variant
from kvtier.sim.sources import open_source
from kvtier.sim.traces import TraceRequest, unique_blocks

KVTIER = VARIANTS["kvtier"]
DEFAULT = "kvtier (the default)"
HINTED = VARIANTS["kvtier+hints"]
POOR_HINTS = Announcer(missing=0.3, false_share=0.2, mistimed=0.5)
WORKING_SET_SHARES = (0.1, 0.25, 0.5, 1.0, 2.0)


def but(base: Variant = KVTIER, **changes: object) -> Variant:
    """A variant with parts changed."""
    return msgspec.structs.replace(base, **changes)


PARTS: dict[str, tuple[Variant, Announcer]] = {
    name: (variant, announcer)
    for name, variant, announcer in (
        ("native", VARIANTS["native"], Announcer()),
        (DEFAULT, KVTIER, Announcer()),
        ("no gate", but(gate="none"), Announcer()),
        ("latency gate", but(gate="latency"), Announcer()),
        ("gate without the links' price", but(price_links=False), Announcer()),
        ("no overlap", but(overlap=False), Announcer()),
        ("no gate, no overlap", but(gate="none", overlap=False), Announcer()),
        ("no look-ahead", but(look_ahead=False), Announcer()),
        ("LRU in HBM", but(hbm="lru"), Announcer()),
        ("LRU in DRAM", but(dram="lru"), Announcer()),
        ("LRU in both", but(hbm="lru", dram="lru"), Announcer()),
        ("worth with guard on NVMe too", but(nvme="kvtier"), Announcer()),
        ("write admission by value", but(admit_by_value=True), Announcer()),
        ("speculative promotion", but(promote=True), Announcer()),
        ("hints of 3 s", HINTED, Announcer()),
        ("hints of 3 s, no conservative mode", but(HINTED, conservative=False), Announcer()),
        ("hints of 3 s, LRU in both", but(HINTED, hbm="lru", dram="lru"), Announcer()),
        ("hints; 30 % missing, 20 % false, ±50 % mistimed", HINTED, POOR_HINTS),
    )
}


def measure(
    requests: list[TraceRequest],
    hardware: Hardware,
    part: tuple[Variant, Announcer],
    seed: int,
    setting: Setting,
    drawn: bool,
) -> dict[str, float]:
    """One run's figures."""
    begin_s = time.process_time()
    setting = msgspec.structs.replace(setting, announcer=part[1])
    node, score = serve(requests, hardware, part[0], seed, setting, drawn_starts=drawn)
    ttft_s = np.array(score.ttft_s)
    return {
        "mean_s": float(ttft_s.mean()),
        "p50_s": float(np.median(ttft_s)),
        "gpu_s": node.gpu.busy_s,
        "stalled_share": node.gpu.stalled_s / node.gpu.busy_s,
        "miss": score.blocks["miss"] / sum(score.blocks.values()),
        "nvme_written_bytes": sum(node.nvme_write.moved_bytes),
        "h2d_bytes": sum(node.h2d.moved_bytes),
        "used_share": node.speculation.used_share or 0.0,
        "cpu_s": round(time.process_time() - begin_s, 1),
    }


def print_table(figures: dict[tuple[str, str], list[dict[str, float]]], names: list[str], points: list[str]) -> None:
    """Ratios to native on the same seed, and what separates the mean's from the default's, with standard errors."""
    out = sys.stdout
    columns = [f"{point} {column}" for point in points for column in ("mean", "to the default", "p50")]
    out.write("| variant | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns) + "\n")
    for name in names:
        cells = []
        for point in points:
            means = ratios(figures, name, point, "mean_s")
            default = ratios(figures, DEFAULT, point, "mean_s") if DEFAULT in names and name != DEFAULT else []
            differences = [mine - its for mine, its in zip(means, default, strict=False)]
            p50 = ratios(figures, name, point, "p50_s")
            cells += [with_error(means), with_error(differences, "+") if differences else "", with_error(p50)]
        out.write(f"| {name} | " + " | ".join(cells) + " |\n")


def ratios(figures: dict[tuple[str, str], list[dict[str, float]]], name: str, point: str, field: str) -> list[float]:
    """To native, seed by seed."""
    runs = zip(figures[name, point], figures["native", point], strict=True)
    return [mine[field] / native[field] for mine, native in runs]


def with_error(values: list[float], sign: str = "") -> str:
    """A mean and its standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{error}"


def ablate(options: argparse.Namespace) -> None:
    """The table of parts."""
    names = [
        name
        for name in PARTS
        if name == "native" or not options.only or any(name.startswith(o) for o in options.only.split(","))
    ]
    points = [load_hardware(name) for name in options.hardware.split(",")]
    trace, setting = open_source(options.trace), Setting(load=options.load)
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in (int(text) for text in options.seed.split(",")):
        requests = first_hours(trace.requests(seed), options.hours)
        for point in points:
            for name in names:
                found = measure(requests, point, PARTS[name], seed, setting, trace.seeded)
                figures.setdefault((name, point.name), []).append(found)
                print(json.dumps({"variant": name, "hardware": point.name, "seed": seed, **found}), flush=True)
    print_table(figures, names, [point.name for point in points])


def first_hours(requests: list[TraceRequest], hours: float) -> list[TraceRequest]:
    """What arrives in the first hours of a trace, as recorded."""
    return [r for r in requests if r.arrival_s - requests[0].arrival_s < 3600.0 * hours]


def undersized(options: argparse.Namespace) -> None:
    """Caches smaller than the working set, and one twice as large: what is left of no cache's time to first token.
    The sizes are those of DRAM and NVMe together, one part to eight; HBM stays."""
    trace = open_source(options.trace)
    for seed in (int(text) for text in options.seed.split(",")):
        requests = first_hours(trace.requests(seed), options.hours)
        blocks = unique_blocks(requests)
        for point in [load_hardware(name) for name in options.hardware.split(",")]:
            for share in WORKING_SET_SHARES:
                dram = max(1, round(share * blocks / 9))
                sizes = f"hbm={point.tiers['hbm']},dram={dram},nvme={8 * dram}"
                setting = Setting(load=options.load, tiers=sizes)
                parts = {name: (VARIANTS[name], Announcer()) for name in ("engine", "native", "kvtier")}
                found = {
                    name: measure(requests, point, part, seed, setting, trace.seeded)["mean_s"]
                    for name, part in parts.items()
                }
                row = {"hardware": point.name, "seed": seed, "share": share, "sizes": sizes, **found}
                print(json.dumps({**row, "benefit": 1.0 - found["kvtier"] / found["engine"]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "trace", nargs="?", default="workload:agent?sessions=300&hours=2", help="a file or workload:KIND"
    )
    parser.add_argument("--hardware", default="A25,A6")
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--seed", default="1,2,3")
    parser.add_argument("--hours", type=float, default=math.inf, help="replay only what arrives in the first hours")
    parser.add_argument("--only", default="", help="names of variants, comma-separated")
    parser.add_argument("--sizes", action="store_true", help="undersized caches instead")
    options = parser.parse_args()
    (undersized if options.sizes else ablate)(options)


if __name__ == "__main__":
    main()
