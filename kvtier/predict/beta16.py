"""The main paper's predictor, to the letter: sixteen Beta posteriors, for comparison.

One Beta(alpha, beta) for each pair of block type and transition; a hit raises alpha, an eviction raises beta, and the
reuse probability of everything in a cell is alpha / (alpha + beta). It has no notion of age, and takes an eviction for
evidence of no reuse, which makes its own decisions come true (docs/forecast.md). Unknown types and transitions have
cells of their own here, so it runs where roles are not known.
"""

from __future__ import annotations

from kvtier.model.request import BlockType, Transition

CELLS = len(BlockType) * len(Transition)


class BetaCells:
    """Posterior counts by cell, from Beta(1, 1)."""

    def __init__(self) -> None:
        self._alpha = [1.0] * CELLS
        self._beta = [1.0] * CELLS

    @staticmethod
    def cell(block_type: BlockType, transition: Transition) -> int:
        """The cell of a pair."""
        return int(block_type) * len(Transition) + int(transition)

    def hit(self, cell: int, blocks: int = 1) -> None:
        """Blocks of this cell were reused."""
        self._alpha[cell] += blocks

    def evicted(self, cell: int, blocks: int = 1) -> None:
        """Blocks of this cell were evicted."""
        self._beta[cell] += blocks

    def mean(self, cell: int) -> float:
        """P(reuse) of a cell."""
        return self._alpha[cell] / (self._alpha[cell] + self._beta[cell])
