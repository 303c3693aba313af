"""A picture of a grid of node replays: times to the first token, by hardware and variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.sim.node.experiment import NodeRow
from kvtier.sim.plot import require_matplotlib

_FIGURES = ("ttft_p50_s", "ttft_mean_s", "ttft_p95_s")


def plot_ttft(rows: Sequence[NodeRow], path: Path) -> None:
    """Write a PNG with one panel a (trace, hardware): p50, mean and p95 by variant, mean over seeds and their range.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.trace, row.hardware) for row in rows))
    figure = Figure(figsize=(7.5, 3.6 * len(panels)), layout="constrained")
    for n, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, n)
        here = [row for row in rows if (row.trace, row.hardware) == panel]
        variants = list(dict.fromkeys(row.variant for row in here))
        width = 0.8 / len(variants)
        for v, variant in enumerate(variants):
            runs = [[getattr(row, figure_) for row in here if row.variant == variant] for figure_ in _FIGURES]
            means = [sum(run) / len(run) for run in runs]
            spread = [[m - min(run) for m, run in zip(means, runs, strict=True)]]
            spread.append([max(run) - m for m, run in zip(means, runs, strict=True)])
            at = [x + (v - (len(variants) - 1) / 2) * width for x in range(len(_FIGURES))]
            axes.bar(at, means, width, yerr=spread, capsize=2, label=variant)
        axes.set_xticks(range(len(_FIGURES)), ["p50", "mean", "p95"])
        axes.set(title=f"{panel[0]} on {panel[1]}", ylabel="time to first token (s)", yscale="log")
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write the plot {path}: {error.strerror or error}") from error
