"""The ledger: what a sequence costs, in three figures that are never mixed.

* logical: the payload. Every number that must be kept, once, without scales, rounding or replicas.
* physical: what an allocator sets aside for one whole copy: scales, whole blocks, alignment.
* per rank: the physical bytes on the fullest rank, replicas included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvtier.errors import ConfigError
from kvtier.model.sizing.cache import CacheSpec
from kvtier.model.sizing.deployment import Deployment, pipeline_stages
from kvtier.model.sizing.recurrent import RecurrentState
from kvtier.model.sizing.spec import ModelSpec

_MOST_TOKENS = 1 << 50
_MAX_SEQ_LEN = 1 << 40


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvtier size` prints for one model. Bytes are integers; the last two budgets are None without a budget.

    `bytes_per_token` is what a token adds once bounded layers are full (or, when every layer is bounded, until then);
    `bytes_per_block` is one block in every layer that stores tokens. Both are whole copies with scales.
    `bytes_per_sequence` is `seq_len` tokens and the states, before blocks are rounded.
    """

    model: str
    attention: str
    layers: int
    bytes_per_token: int
    bytes_per_token_per_rank: int
    bytes_per_sequence: int
    bytes_per_block: int
    state_bytes_per_sequence: int
    max_tokens: int | None
    max_batch: int | None
    logical_bytes: int
    physical_bytes: int
    per_rank_bytes: int
    notes: tuple[str, ...]


class Ledger:
    """Bytes of one model under one deployment, as functions of tokens. Immutable in use; safe to share."""

    def __init__(self, spec: ModelSpec, deployment: Deployment, with_mtp: bool = False) -> None:
        self.spec = spec
        self.deployment = deployment
        self._caches = [cache for layer in spec.all_layers(with_mtp) for cache in layer.caches]
        stages = pipeline_stages(spec.layers, deployment.pp)
        if with_mtp:
            stages[-1] = stages[-1] + spec.mtp
        self._stages = [[cache for layer in stage for cache in layer.caches] for stage in stages]
        self._bounded = bool(self._caches) and not any(cache.grows for cache in self._caches)

    # --- per token and per block

    def bytes_per_token(self) -> int:
        """Bytes, scales included, that one more token adds to a whole copy (see `ModelSize`)."""
        return self._token_bytes(self._caches, tp=1)

    def bytes_per_token_per_rank(self) -> int:
        """The same on the fullest rank."""
        return max(self._token_bytes(stage, self.deployment.attention_tp) for stage in self._stages)

    def bytes_per_block(self) -> int:
        """One block of tokens in every layer that stores tokens (not an encoder's): a whole copy, as pages."""
        return sum(self.page_bytes(cache, tp=1) for cache in self._caches if cache.kind != "cross")

    def page_bytes(self, cache: CacheSpec, tp: int) -> int:
        """One block of one layer's cache on one of `tp` ranks."""
        rows = cache.row_bytes(self.deployment.form, tp) * self.deployment.block_tokens
        alignment = self.deployment.page_alignment
        return -(-rows // alignment) * alignment

    # --- per sequence

    def logical_bytes(self, tokens: int) -> int:
        """Payload of `tokens` tokens and the states."""
        form = self.deployment.form
        bits = sum(cache.held_tokens(tokens) * cache.payload_bits(form) for cache in self._caches)
        return -(-bits // 8) + self.state_bytes()

    def sequence_bytes(self, tokens: int) -> int:
        """One copy with scales, exactly as many tokens as must be held."""
        form = self.deployment.form
        rows = sum(cache.held_tokens(tokens) * cache.row_bytes(form, 1) for cache in self._caches)
        return rows + self.state_bytes()

    def physical_bytes(self, tokens: int) -> int:
        """One copy as an allocator holds it: whole blocks, aligned pages, states."""
        return self._allocated(self._caches, tokens, tp=1)

    def rank_bytes(self, tokens: int) -> list[int]:
        """Physical bytes on one rank of each pipeline stage (all ranks of a stage hold as much).

        Under DP-attention: on the rank that owns the sequence.
        """
        return [self._allocated(stage, tokens, self.deployment.attention_tp) for stage in self._stages]

    def all_ranks_bytes(self, tokens: int) -> int:
        """Physical bytes over every rank: `physical_bytes` exactly when nothing is replicated."""
        return sum(self.rank_bytes(tokens)) * self.deployment.attention_tp

    def per_rank_bytes(self, tokens: int) -> int:
        """Physical bytes on the fullest rank."""
        return max(self.rank_bytes(tokens))

    def state_bytes(self) -> int:
        """Recurrent states of one sequence, one copy: also what one snapshot at a block boundary costs."""
        return sum(cache.state_bytes(self.deployment.model_dtype_bytes, 1) for cache in self._caches)

    def snapshot_bytes_per_token(self, every_tokens: int) -> float:
        """State snapshots taken every so many tokens, spread over the tokens: their price in the tiers."""
        if every_tokens < 1:
            raise ConfigError(f"a snapshot interval must be at least 1 token, not {every_tokens}")
        return self.state_bytes() / every_tokens

    # --- what fits

    def max_tokens(self, rank_budget_bytes: int) -> int | None:
        """Longest sequence whose share fits on every rank; None if it can grow for ever, 0 if no token fits."""
        return _last_fitting(self.per_rank_bytes, rank_budget_bytes)

    def max_batch(self, rank_budget_bytes: int, tokens: int) -> int:
        """Sequences of `tokens` tokens that fit at once, over all owners of sequences."""
        cost = self.per_rank_bytes(tokens)
        if cost == 0:
            raise ConfigError("a model that keeps nothing for a sequence has no largest batch")
        return rank_budget_bytes // cost * self.deployment.sequence_owners

    def replication(self) -> int:
        """The most ranks that hold the same bytes."""
        return max((cache.copies(self.deployment.attention_tp) for cache in self._caches), default=1)

    def _token_bytes(self, caches: Iterable[CacheSpec], tp: int) -> int:
        form = self.deployment.form
        counted = [cache for cache in caches if cache.grows or (self._bounded and cache.kind != "cross")]
        return sum(cache.row_bytes(form, tp) for cache in counted)

    def _allocated(self, caches: Iterable[CacheSpec], tokens: int, tp: int) -> int:
        total = 0
        for cache in caches:
            total += cache.peak_blocks(tokens, self.deployment.block_tokens) * self.page_bytes(cache, tp)
            total += cache.state_bytes(self.deployment.model_dtype_bytes, tp)
        return total


def size_model(
    name: str,
    spec: ModelSpec,
    deployment: Deployment,
    *,
    seq_len: int = 32_768,
    rank_budget_bytes: int | None = None,
    with_mtp: bool = False,
) -> ModelSize:
    """Every figure of `kvtier size` for one model. `rank_budget_bytes` is the KV memory of each rank."""
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or not 1 <= seq_len <= _MAX_SEQ_LEN:
        raise ConfigError(f"seq-len must be a whole number between 1 and {_MAX_SEQ_LEN}, not {seq_len!r}")
    if rank_budget_bytes is not None and rank_budget_bytes < 1:
        raise ConfigError(f"budget must be positive, not {rank_budget_bytes}")
    ledger = Ledger(spec, deployment, with_mtp)
    budget = rank_budget_bytes
    return ModelSize(
        model=name,
        attention=spec.attention,
        layers=len(spec.layers),
        bytes_per_token=ledger.bytes_per_token(),
        bytes_per_token_per_rank=ledger.bytes_per_token_per_rank(),
        bytes_per_sequence=ledger.sequence_bytes(seq_len),
        bytes_per_block=ledger.bytes_per_block(),
        state_bytes_per_sequence=ledger.state_bytes(),
        max_tokens=None if budget is None else ledger.max_tokens(budget),
        max_batch=None if budget is None else ledger.max_batch(budget, seq_len),
        logical_bytes=ledger.logical_bytes(seq_len),
        physical_bytes=ledger.physical_bytes(seq_len),
        per_rank_bytes=ledger.per_rank_bytes(seq_len),
        notes=(*spec.notes, *_deployment_notes(ledger, seq_len)),
    )


def _deployment_notes(ledger: Ledger, seq_len: int) -> list[str]:
    spec, deployment = ledger.spec, ledger.deployment
    caches = [cache for layer in spec.layers for cache in layer.caches]
    notes = []
    windowed = [cache for cache in caches if cache.kind in ("sliding", "chunked")]
    if windowed:
        full = sum(cache.row_bytes(deployment.form, 1) for cache in caches)
        notes.append(
            f"{len(windowed)} of {len(spec.layers)} layers keep a bounded window; "
            f"until it is full a token costs {full} B"
        )
    replicas = ledger.replication()
    if replicas > 1:
        notes.append(f"up to {replicas} ranks hold the same bytes; below the GPU one copy is enough")
    if deployment.dp_attention and deployment.tp > 1:
        notes.append(
            f"DP-attention: each of {deployment.tp} ranks holds whole sequences of its own; max_batch is their sum"
        )
    state = ledger.state_bytes()
    if any(isinstance(cache, RecurrentState) for cache in caches):
        per_token = sum(cache.row_bytes(deployment.form, 1) for cache in caches if cache.grows)
        worth = f", as much as the KV of {state // per_token} tokens" if per_token else ""
        notes.append(f"a prefix hit needs a snapshot of the state at its end: {state} B each{worth}")
    packed = any(
        cache.kind == "mla" and deployment.form.latent_is_packed(getattr(cache, "sparse", False)) for cache in caches
    )
    if packed:
        notes.append("8-bit latent rows keep fp32 scales and a 16-bit rope part (656 B for 512 + 64)")
    return notes


def _last_fitting(cost: Callable[[int], int], budget: int) -> int | None:
    """The largest number of tokens whose monotone `cost` stays within `budget`."""
    if cost(1) > budget:
        return 0
    if cost(_MOST_TOKENS) <= budget:
        return None
    low, high = 1, _MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low
