"""Which prefix tokens matter: the scorers of the literature, as their code computes them. Research only, lossy if used.

All work on attention of the last `window` prefix queries over the prefix, [heads, tokens], higher is kept longer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvtier.reference.prefix_model import PrefixModel, attention_scores

WINDOW = 64
POOL = 5


def prefix_queries(model: PrefixModel, ids: torch.Tensor, prefix: torch.Tensor, window: int = WINDOW) -> torch.Tensor:
    """Rotated queries [layers, query heads, window, d] of the last tokens of a prefix, computed exactly."""
    inputs: list[torch.Tensor] = []
    tail, past = ids[-window:], prefix[:, :, :, : len(ids) - window]
    model.run(tail, past, inputs=inputs, logits=False)
    start = len(ids) - window
    cosine, sine = model.model.model.rotary_emb(inputs[0], torch.arange(start, len(ids))[None])
    found = []
    for layer, hidden in enumerate(inputs):
        normed = model.model.model.layers[layer].input_layernorm(hidden)
        found.append(model.project(layer, normed, cosine, sine)[0][0])
    return torch.stack(found)


def window_weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Causal attention weights [heads, group, window, tokens] of the last queries of one layer over its prefix keys."""
    scores = attention_scores(queries[None], keys[None])[0]
    window, tokens = scores.shape[-2:]
    seen = torch.ones(window, tokens, dtype=torch.bool).tril(tokens - window)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)


def snapkv(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """SnapKV (arXiv:2404.14469): mean weight over the window, pooled over 5 tokens, mean over the group; the window
    itself ranks first."""
    weights = window_weights(queries, keys)
    window = weights.shape[2]
    mean = F.avg_pool1d(weights.mean(dim=2), POOL, stride=1, padding=POOL // 2, count_include_pad=False).mean(dim=1)
    mean[:, -window:] = mean.max() + 1
    return mean


def h2o(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """H2O (arXiv:2306.14048) over the window: the weight a token received, over how many queries could see it."""
    weights = window_weights(queries, keys)
    window, tokens = weights.shape[2:]
    could_see = torch.clamp(tokens - torch.arange(tokens), max=window).clamp(min=1)
    return weights.sum(dim=2).mean(dim=1) / could_see


def probe_heads(queries: torch.Tensor, keys: torch.Tensor, heads: int = 1) -> torch.Tensor:
    """IMPRESS's form (FAST'25): the weights of the first KV heads alone, [tokens]; they stand for all heads."""
    group = queries.shape[0] // keys.shape[0]
    return window_weights(queries[: heads * group], keys[:heads]).mean(dim=(0, 1, 2))


def sinks_and_recent(tokens: int, sinks: int = 4) -> torch.Tensor:
    """The first tokens, then the newest: what every scorer has to beat, [tokens]."""
    score = torch.arange(tokens, dtype=torch.float32)
    score[:sinks] = tokens + 1
    return score
