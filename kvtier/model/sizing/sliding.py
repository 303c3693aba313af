"""Sliding-window attention: the last `window` tokens, whatever the length of the sequence."""

from __future__ import annotations

from typing import ClassVar

from kvtier.model.sizing.cache import CacheSpec, HeadsCache
from kvtier.model.sizing.fields import MAX_HEADS, MAX_TOKENS, Fields
from kvtier.model.sizing.heads import head_dims, kv_heads

WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention")
OVERRIDES = ("swa_num_key_value_heads", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim",
             "attention_other_setting")  # fmt: skip


class SlidingWindow(HeadsCache, frozen=True):
    """K and V of the last `window` tokens, the current one included."""

    kind: ClassVar[str] = "sliding"
    window: int

    def held_tokens(self, tokens: int) -> int:
        return min(tokens, self.window)

    def peak_blocks(self, tokens: int, block_tokens: int) -> int:
        """A window that does not start at a block boundary touches one block more; blocks are freed whole."""
        return min(-(-tokens // block_tokens), -(-(self.window - 1) // block_tokens) + 1)


def read(fields: Fields, index: int) -> tuple[CacheSpec, ...]:
    """A sliding-window layer; its heads may differ from those of the full layers (MiMo, Step)."""
    window = fields.count(*WINDOW, at_most=MAX_TOKENS)
    fields.excuse(("swa_num_attention_heads", "num_sliding_attention_heads"))  # query heads
    heads = fields.maybe_count("swa_num_key_value_heads", at_most=MAX_HEADS)
    if heads is None:
        heads = _step_heads(fields) or kv_heads(fields, index)
    key_dim, value_dim = head_dims(fields)
    own_dim = fields.maybe_count("swa_head_dim")
    if own_dim is not None:
        key_dim, value_dim = own_dim, own_dim if fields.value("v_head_dim") is None else value_dim
    return (
        SlidingWindow(
            heads=heads, key_dim=key_dim, value_dim=fields.maybe_count("swa_v_head_dim") or value_dim, window=window
        ),
    )


def _step_heads(fields: Fields) -> int | None:
    """Step 3.5 describes its sliding layers in a section of their own."""
    if not fields.active("attention_other_setting"):
        return None
    other = fields.section("attention_other_setting")
    other.excuse(("attention_type", "num_attention_heads", "head_dim", "true_head_dim"))
    return other.maybe_count("num_attention_groups", "num_key_value_heads", at_most=MAX_HEADS)
