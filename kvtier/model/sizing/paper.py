"""Re-deriving the batch sizes of the main paper's sizing table (arXiv 2604.26968).

All eight printed values follow from one constant, 30 GB of KV memory per rank and 4,096 tokens a sequence (or any pair
with the same quotient), and one slip: the column for MHA shares the heads between the 8 ranks, the architecture-aware
column divides nothing. Beside them stands what one rank really holds when both sides follow the same parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvtier.model.sizing.deployment import Deployment
from kvtier.model.sizing.full import FullAttention
from kvtier.model.sizing.ledger import Ledger
from kvtier.model.sizing.spec import spec_from_config

TENSOR_PARALLEL = 8
RANK_BUDGET_BYTES = 30 * 10**9
SEQUENCE_TOKENS = 4096


class PaperModel(msgspec.Struct, frozen=True):
    """A row of the paper's table: the model it names, and what it prints ("14" and "15" both appear for the first)."""

    name: str
    config: str
    printed_mha: tuple[int, ...]
    printed_aware: int


PAPER_MODELS = (
    PaperModel("DeepSeek-V3", "deepseek-ai/DeepSeek-V3", (14, 15), 104),
    PaperModel("Llama-3-70B", "meta-llama/Llama-3.1-70B", (22,), 22),
    PaperModel("Mixtral-8x22B", "mistralai/Mixtral-8x22B-v0.1", (42,), 31),
    PaperModel("Qwen2.5-72B", "Qwen/Qwen2.5-72B", (22,), 22),
)


class PaperRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model: batch sizes as the paper counts them, as printed there, and as one rank of eight really holds them.

    `mha_exact` is the MHA quotient before it is rounded: 14.66 is printed as 15 in one place and as 14 in another.
    """

    model: str
    mha_exact: float
    mha_batch: int
    aware_batch: int
    printed_mha: tuple[int, ...]
    printed_aware: int
    per_rank_batch: int
    per_rank_bytes_per_token: int


def paper_rows(configs: Mapping[str, Mapping[str, object]]) -> list[PaperRow]:
    """The four rows, from the models' configs by catalogue name."""
    return [_row(model, configs[model.config]) for model in PAPER_MODELS]


def _row(model: PaperModel, config: Mapping[str, object]) -> PaperRow:
    spec = spec_from_config(config)
    tokens_bytes = RANK_BUDGET_BYTES / SEQUENCE_TOKENS
    as_mha = _mha_bytes_per_token(config, len(spec.layers)) / TENSOR_PARALLEL
    whole = Ledger(spec, Deployment()).bytes_per_token()
    rank = Ledger(spec, Deployment(tp=TENSOR_PARALLEL))
    return PaperRow(
        model=model.name,
        mha_exact=round(tokens_bytes / as_mha, 2),
        mha_batch=int(tokens_bytes // as_mha),
        aware_batch=int(tokens_bytes // whole),
        printed_mha=model.printed_mha,
        printed_aware=model.printed_aware,
        per_rank_batch=rank.max_batch(RANK_BUDGET_BYTES, SEQUENCE_TOKENS),
        per_rank_bytes_per_token=rank.bytes_per_token_per_rank(),
    )


def _mha_bytes_per_token(config: Mapping[str, object], layers: int) -> int:
    """The paper's "MHA" column: K and V of every query head, 128 wide in all four models, bf16."""
    heads, width = config["num_attention_heads"], config.get("v_head_dim") or config.get("head_dim")
    assert isinstance(heads, int)
    if width is None:
        hidden = config["hidden_size"]
        assert isinstance(hidden, int)
        width = hidden // heads
    assert isinstance(width, int)
    cache = FullAttention(heads=heads, key_dim=width, value_dim=width)
    return cache.row_bytes(Deployment().form, 1) * layers
