"""Loss against bytes: the ledger as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.reference.ledger import LedgerRow

_LEAST_KL = 1e-6


def plot_ledger(rows: Sequence[LedgerRow], path: Path) -> None:
    """Draw KL (logarithmic) over bits an element, with intervals, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for source in dict.fromkeys(row.map for row in rows):
        mine = [row for row in rows if row.map == source and row.kl_mean > _LEAST_KL]
        bits, kl = [row.bits_per_element for row in mine], [row.kl_mean for row in mine]
        spread = [
            [max(0.0, row.kl_mean - row.kl_ci[0]) for row in mine],
            [max(0.0, row.kl_ci[1] - row.kl_mean) for row in mine],
        ]
        axes.errorbar(bits, kl, yerr=spread, fmt="o", capsize=2, label=source or "no map")
        for row in mine:
            axes.annotate(row.codec, (row.bits_per_element, row.kl_mean), textcoords="offset points", xytext=(4, 4))
    axes.set(yscale="log", xlabel="bits per element (bfloat16: 16)", ylabel="KL to the unencoded cache, nats per token")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
