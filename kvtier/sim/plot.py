"""A picture of a grid of replays: hit rate against capacity, one line a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.sim.experiment import ReplayRow


def require_plot(path: Path) -> None:
    """Raise ConfigError if a plot cannot be drawn into this file; to be asked before the work, not after."""
    require_matplotlib()
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write the plot {path}: {folder} is no folder")
    if path.is_dir():
        raise ConfigError(f"cannot write the plot {path}: it is a folder; name a file in it")


def require_matplotlib() -> None:
    """Raise ConfigError if plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'kvtier[plot]'") from error


def plot_hit_rates(rows: Sequence[ReplayRow], path: Path) -> None:
    """Write a PNG with one panel a trace; several seeds give the mean and a band from least to most.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(7.5, 4.5 * len(traces)), layout="constrained")
    for panel, trace in enumerate(traces, start=1):
        axes = figure.add_subplot(len(traces), 1, panel)
        for policy in dict.fromkeys(row.policy for row in rows):
            points: dict[int, list[float]] = {}
            for row in rows:
                if (row.trace, row.policy) == (trace, policy):
                    points.setdefault(row.capacity_blocks, []).append(100.0 * row.hit_rate)
            capacities = sorted(points)
            means = [sum(points[c]) / len(points[c]) for c in capacities]
            (line,) = axes.plot(capacities, means, marker="o", label=policy)
            low, high = [min(points[c]) for c in capacities], [max(points[c]) for c in capacities]
            axes.fill_between(capacities, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set(title=trace, xlabel="capacity (blocks)", ylabel="hit rate (% of block accesses)")
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write the plot {path}: {error.strerror or error}") from error
