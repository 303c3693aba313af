"""Attention to a part of the prefix: Quest, InfiniGen, an oracle, sinks + recent. Research references, lossy.

Each gives, per layer and KV head, the prefix tokens a query attends to; the rest is as if it were not there. No engine
of ours does this: kvtier stores and restores whole prefixes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvtier.errors import ConfigError
from kvtier.reference.prefix_model import Attention, PrefixModel, attention_scores
from kvtier.reference.quality import Comparison, Passage, compare
from kvtier.reference.scorers import sinks_and_recent

DENSE_LAYERS = 2  # Quest and InfiniGen leave the first layers alone
QUEST_PAGE_TOKENS = 16
PARTIAL_RATIO = 0.2

# (layer, queries [1, Hq, n, D], prefix keys [1, H, T, D]) -> scores [H, n, T]; the highest are attended to
Selector = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class Selection(NamedTuple):
    """How a selector did: the share of true prefix attention it kept, and the continuation against the full cache."""

    recall: float
    comparison: Comparison


def evaluate(model: PrefixModel, passage: Passage, selector: Selector, budget: float) -> Selection:
    """Continue a passage attending to `budget` of the prefix (0 to 1) per layer, KV head and query."""
    if not 0 < budget <= 1:
        raise ConfigError(f"a budget of {budget} of the prefix; it must lie in (0, 1]")
    kept: list[float] = []
    attend = selective_attention(selector, budget, kept)
    begin = getattr(selector, "begin", None)
    if begin is not None:
        begin(passage)
    test = model.log_probabilities(passage.following, passage.kv, attend)
    return Selection(sum(kept) / max(1, len(kept)), compare(passage, test))


def selective_attention(selector: Selector, budget: float, kept: list[float]) -> Attention:
    """An attention rule that keeps the selector's best tokens; appends the mass it kept, layer by layer."""

    def attend(
        layer: int,
        queries: torch.Tensor,
        old_k: torch.Tensor,
        old_v: torch.Tensor,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
    ) -> torch.Tensor:
        n, past = queries.shape[2], old_k.shape[2]
        keys, values = torch.cat([old_k, new_k], dim=2), torch.cat([old_v, new_v], dim=2)
        scores = attention_scores(queries, keys)
        seen = torch.ones(n, past + n, dtype=torch.bool).tril(past)
        scores = scores.masked_fill(~seen, -torch.inf)
        if layer >= DENSE_LAYERS:
            rank = selector(layer, queries, old_k)
            chosen = rank.topk(max(1, int(budget * past)), dim=-1).indices
            mask = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, chosen, True)
            weights = torch.softmax(scores, dim=-1)[..., :past].mean(dim=2)[0]
            mass = weights.sum(dim=-1)
            kept.append(float(((weights * mask).sum(dim=-1) / mass.clamp(min=1e-9)).mean()))
            scores[..., :past] = scores[..., :past].masked_fill(~mask[None, :, None], -torch.inf)
        else:
            selector(layer, queries, old_k)
        mixed = torch.softmax(scores, dim=-1) @ values[:, :, None]
        return mixed.flatten(1, 2)

    return attend


def oracle(layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The true weights, mean over the group: the most any selector can keep."""
    return torch.softmax(attention_scores(queries, keys)[0], dim=-1).mean(dim=1)


def recent(layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Four sinks and the newest tokens, whatever the query."""
    return sinks_and_recent(keys.shape[2]).expand(keys.shape[1], queries.shape[2], -1)


def quest(page_tokens: int = QUEST_PAGE_TOKENS) -> Selector:
    """Quest (arXiv:2406.10774): whole pages, by an upper bound of the score from the page's extreme keys."""

    def select(layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        heads, tokens, dim = keys.shape[1:]
        pages = -(-tokens // page_tokens)
        padded = torch.cat([keys[0], keys[0][:, -1:].expand(-1, pages * page_tokens - tokens, -1)], dim=1)
        paged = padded.view(heads, pages, page_tokens, dim)
        low, high = paged.amin(dim=2), paged.amax(dim=2)
        grouped = queries.reshape(heads, -1, queries.shape[2], dim)
        up, down = grouped.clamp(min=0), grouped.clamp(max=0)
        bound = torch.einsum("hgnd,hpd->hgnp", up, high) + torch.einsum("hgnd,hpd->hgnp", down, low)
        return bound.amax(dim=1).repeat_interleave(page_tokens, dim=-1)[..., :tokens]

    return select


class InfiniGen:
    """InfiniGen (OSDI'24): at layer l - 1 guess layer l's scores from l - 1's input and a part of l's query weights.

    The part is the columns of largest query mass, after an orthogonal turn per head that gathers the mass in few
    columns (the skew, from an SVD of rotated queries; the turn is applied after the rotary embedding, so it is exact).
    There is no miss path: what is not guessed is not attended to. Scores of a KV head are the mean over its
    group. `ratio` is the share of columns; `skew` and `speculate` switch the two ideas off.
    """

    def __init__(
        self,
        model: PrefixModel,
        calibration: Passage,
        ratio: float = PARTIAL_RATIO,
        *,
        skew: bool = True,
        speculate: bool = True,
    ) -> None:
        """Turns and columns come from the queries of `calibration`, a passage of another text."""
        self._model = model
        self._speculate = speculate
        self._turns: list[torch.Tensor] = []
        self._columns: list[torch.Tensor] = []
        self.begin(calibration)
        width = max(1, int(ratio * model.head_dim))
        for layer, hidden in enumerate(self._inputs):
            normed = model.model.model.layers[layer].input_layernorm(hidden)
            queries = self._queries(layer, normed).flatten(1, 2)
            turn = torch.eye(model.head_dim).expand(model.heads, -1, -1)
            if skew:
                turn = torch.linalg.svd(queries, full_matrices=False)[2].transpose(1, 2)
            self._turns.append(turn)
            self._columns.append((queries @ turn).abs().sum(dim=1).topk(width, dim=-1).indices)

    def begin(self, passage: Passage) -> None:
        """Collect each layer's input over a passage by one exact pass: what the next layer is guessed from. An engine
        has them as it goes."""
        self._inputs: list[torch.Tensor] = []
        self._model.run(passage.following, passage.kv, inputs=self._inputs)
        positions = torch.arange(passage.kv.shape[3], passage.kv.shape[3] + len(passage.following))[None]
        self._tables = self._model.model.model.rotary_emb(self._inputs[0], positions)

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Guessed scores [heads, n, tokens] of `layer`."""
        if self._speculate and layer > 0:
            normed = self._model.model.model.layers[layer].input_layernorm(self._inputs[layer - 1])
            grouped = self._queries(layer, normed)
        else:
            grouped = queries.reshape(keys.shape[1], -1, queries.shape[2], keys.shape[3])
        turn, columns = self._turns[layer], self._columns[layer]
        index = columns[:, None, :]
        some_keys = (keys[0] @ turn).gather(2, index.expand(-1, keys.shape[2], -1))
        turned = grouped @ turn[:, None]
        some_queries = turned.gather(3, index[:, None].expand(-1, turned.shape[1], turned.shape[2], -1))
        return torch.einsum("hgnc,htc->hgnt", some_queries, some_keys).mean(dim=1)

    def _queries(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """Rotated queries [heads, group, n, d] of the passage."""
        queries = self._model.project(layer, normed, *self._tables)[0]
        return queries.reshape(self._model.heads, -1, normed.shape[1], self._model.head_dim)


class SpeculationPool:
    """InfiniGen's host pool of a limited number of tokens: the victim is by "fifo", "lru" or "counter" (its default),
    never one of the most recent half."""

    def __init__(self, capacity: int, policy: str = "counter") -> None:
        if policy not in ("fifo", "lru", "counter") or capacity < 2:
            raise ConfigError(f"a pool of {capacity} tokens under {policy!r}")
        self._capacity = capacity
        self._policy = policy
        self._clock = 0
        self._entries: dict[int, list[int]] = {}  # token -> [arrived, last used, uses]

    def add(self, token: int) -> int | None:
        """Take a token in; the token that had to leave, if any."""
        self._clock += 1
        victim = self._victim() if len(self._entries) >= self._capacity else None
        if victim is not None:
            del self._entries[victim]
        self._entries[token] = [self._clock, self._clock, 0]
        return victim

    def use(self, tokens: list[int]) -> None:
        """Note that tokens were fetched. Those not in the pool are ignored."""
        self._clock += 1
        for token in tokens:
            entry = self._entries.get(token)
            if entry is not None:
                entry[1], entry[2] = self._clock, entry[2] + 1

    def __contains__(self, token: int) -> bool:
        return token in self._entries

    def _victim(self) -> int:
        by_age = sorted(self._entries, key=lambda token: self._entries[token][0])
        eligible = by_age[: max(1, len(by_age) // 2)]
        field = {"fifo": 0, "lru": 1, "counter": 2}[self._policy]
        return min(eligible, key=lambda token: (self._entries[token][field], self._entries[token][0]))
