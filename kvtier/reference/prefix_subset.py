"""Prefixes that are not kept whole: important tokens precise and the rest coarse, and truncation. References, lossy.

`mixed_precision` is the form in which importance-aware prefixes (IMPRESS, FAST'25) would fit a block cache: every token
stays, a share of them in more bits. On real KV it loses to the same bytes spent evenly (docs/codecs.md), so kvtier
does not offer it. `truncate` is AttentionStore's (ATC'24) overflow rule with decoupled positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvtier.errors import ConfigError
from kvtier.reference.prefix_model import PrefixModel


class MixedPrefix(NamedTuple):
    """A prefix with two precisions, and what it takes: codes, scales and the index of the precise tokens."""

    kv: torch.Tensor
    bits_per_element: float


def mixed_precision(
    fine: torch.Tensor, coarse: torch.Tensor, scores: torch.Tensor, share: float, fine_bits: float, coarse_bits: float
) -> MixedPrefix:
    """Take the `share` of highest `scores` ([layers, heads or 1, tokens]) from `fine`, the rest from `coarse`.

    `fine` and `coarse` are the same prefix after two codecs of `fine_bits` and `coarse_bits` an element; the index
    costs one bit a token and score row, spread over its elements.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"a share of {share} of the tokens; it must lie in [0, 1]")
    layers, _, heads, tokens, dim = fine.shape
    n = round(share * tokens)
    chosen = torch.zeros(layers, scores.shape[1], tokens, dtype=torch.bool)
    if n:
        chosen.scatter_(2, scores.topk(n, dim=-1).indices, True)
    mask = chosen.expand(layers, heads, tokens)[:, None, :, :, None]
    index_bits = 1 / (2 * dim * heads / scores.shape[1])
    bits = share * fine_bits + (1 - share) * coarse_bits + index_bits
    return MixedPrefix(torch.where(mask, fine, coarse), bits)


def jaccard_of_heads(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Mean pairwise Jaccard index of the heads' important sets, by layer: IMPRESS lets the probe heads speak for all
    only where this is high. `scores` is [layers, heads, tokens]."""
    layers, heads, tokens = scores.shape
    chosen = torch.zeros(layers, heads, tokens, dtype=torch.bool)
    chosen.scatter_(2, scores.topk(max(1, round(share * tokens)), dim=-1).indices, True)
    pairs = []
    for a in range(heads):
        for b in range(a + 1, heads):
            both = (chosen[:, a] & chosen[:, b]).sum(dim=1).float()
            pairs.append(both / (chosen[:, a] | chosen[:, b]).sum(dim=1).float())
    return torch.stack(pairs).mean(dim=0) if pairs else torch.ones(layers)


def probe_threshold(share: float) -> float:
    """The Jaccard index from which IMPRESS trusts its probe heads: (j)^0.6, j the index of two random sets."""
    return float((share / (2 - share)) ** 0.6)


def reordered(kv: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """IMPRESS's layout: tokens of a prefix by falling importance ([tokens] scores), and the order to undo it with.

    Loading the head of this layout loads the important tokens in few large reads.
    """
    order = scores.argsort(descending=True, stable=True)
    return kv[:, :, :, order], order


def probe_keys(kv: torch.Tensor, heads: int = 1) -> torch.Tensor:
    """The sidecar IMPRESS keeps beside a prefix: the keys of the first KV heads, [layers, heads, tokens, d]."""
    return kv[:, 0, :heads].clone()


class Truncated(NamedTuple):
    """What is left of a prefix, and the position of the next token."""

    kv: torch.Tensor
    next_position: int


def truncate(model: PrefixModel, kv: torch.Tensor, dropped: int, *, sinks: int = 4, turn: bool = True) -> Truncated:
    """Drop `dropped` tokens after the first `sinks`, and turn the keys that stay to their new positions.

    Turning is exact to float32; what is lost is the dropped text, and without sinks much more. `turn=False` keeps the
    old rotation under new positions, which is the mistake decoupled positions avoid.
    """
    tokens = kv.shape[3]
    if not 0 <= sinks <= sinks + dropped <= tokens:
        raise ConfigError(f"cannot drop {dropped} tokens after {sinks} of {tokens}")
    head, tail = kv[:, :, :, :sinks], kv[:, :, :, sinks + dropped :].clone()
    if turn:
        tail[:, 0] = model.turn(tail[:, 0], -dropped)
    kept = torch.cat([head, tail], dim=3)
    return Truncated(kept, kept.shape[3])
