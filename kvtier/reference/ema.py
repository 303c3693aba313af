"""Head-granular importance by exponential moving average, as the main paper describes it, and its traps.

I[l][h] <- (1 - a) I[l][h] + a s, with s the attention mass the head's keys receive from the last queries. Two things
go wrong with it. Decaying scores in a heap are stale: an entry keeps the score of its last touch while all others
decay, so the top is not the minimum; `EmaOrder` uses a key whose order never changes between touches. And the mass of
a head sums to one, so it measures how far a head looks, not how fragile it is (docs/codecs.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError
from kvtier.reference.prefix_model import PrefixModel, attention_scores
from kvtier.reference.quality import Passage

ALPHA = 0.05
_WINDOW = 64
_SINKS = 4


class EmaOrder:
    """Victims by least decayed score, exact at any time, in O(log n) a touch.

    A score decays by (1 - alpha) every second (or step): S(t) = S_touch * (1 - alpha)^(t - t_touch). Comparing two
    scores at any later time gives the same answer as comparing ln S_touch - t_touch * ln(1 - alpha): a key that is
    fixed at the touch. Ties go to the item touched first.
    """

    def __init__(self, alpha: float = ALPHA) -> None:
        if not 0 < alpha < 1:
            raise ConfigError(f"alpha is {alpha}; it must lie between 0 and 1")
        self.alpha = alpha
        self._rate = -math.log1p(-alpha)
        self._scores: dict[Hashable, tuple[float, float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._touches = 0

    def touch(self, item: Hashable, mass: float, now: float) -> None:
        """Blend `mass` (≥ 0) into the item's decayed score."""
        score = self.score(item, now) * (1 - self.alpha) + self.alpha * mass if item in self._scores else mass
        self._touches += 1
        self._scores[item] = (score, now, self._touches)
        key = math.log(score) + now * self._rate if score > 0 else -math.inf
        heapq.heappush(self._heap, (key, self._touches, item))

    def score(self, item: Hashable, now: float) -> float:
        """The item's score decayed to `now`. Raises KeyError if it was never touched."""
        score, at, _ = self._scores[item]
        return score * math.exp(-self._rate * (now - at))

    def victim(self) -> Hashable:
        """Remove and return the item of least score. Raises IndexError if there is none."""
        while True:
            _, touch, item = heapq.heappop(self._heap)
            if item in self._scores and self._scores[item][2] == touch:
                del self._scores[item]
                return item

    def __len__(self) -> int:
        return len(self._scores)


def attention_mass(model: PrefixModel, passage: Passage, alpha: float = ALPHA) -> npt.NDArray[np.float64]:
    """EMA [layers, heads] over windows of 64 queries of the mass on keys that are neither sinks nor in the window.

    A latent (MLA) has one head, so one column a layer.
    """
    tokens = passage.kv.shape[3]
    mass = np.zeros((model.layers, model.heads))
    inputs: list[torch.Tensor] = []
    model.run(passage.following, passage.kv, inputs=inputs)
    n = len(passage.following)
    cosine, sine = model.model.model.rotary_emb(inputs[0], torch.arange(tokens, tokens + n)[None])
    for layer in range(model.layers):
        block = model.model.model.layers[layer]
        queries, keys, _ = model.project(layer, block.input_layernorm(inputs[layer]), cosine, sine)
        every = torch.cat([passage.kv[layer, 0][None], keys], dim=2)
        scores = attention_scores(queries, every)
        hidden_future = torch.ones(n, tokens + n, dtype=torch.bool).tril(tokens)
        weights = torch.softmax(scores.masked_fill(~hidden_future, -torch.inf), dim=-1)
        for start in range(0, n, _WINDOW):
            window = weights[0, :, :, start : start + _WINDOW, _SINKS : max(_SINKS, tokens + start - _WINDOW)]
            seen = window.sum(dim=-1).mean(dim=(1, 2)).double().numpy()
            mass[layer] = seen if start == 0 else (1 - alpha) * mass[layer] + alpha * seen
    return mass
