"""A decoder of the Llama family whose prefix KV can be replaced: prefill, exchange the cache, continue, compare.

Runs the modules of a Hugging Face model in float32 with attention of its own, so that any layer's prefix keys and
values can be others than the model computed, and any attention rule can stand in for the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kvtier.codec.calibration import model_fingerprint
from kvtier.errors import ModelConfigError

_SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_PREFILL_TOKENS = 512

# (layer, queries [B, Hq, n, D], prefix keys and values [B, H, T, D], own keys and values [B, H, n, D]) -> [B, Hq, n, D]
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PrefixModel:
    """See the module docstring. Not thread-safe. KV is [layers, 2, heads, tokens, head_dim], keys after rotation."""

    def __init__(self, path: str | Path) -> None:
        """Load model and tokenizer from a local folder. Raises ModelConfigError for architectures not covered."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        if not (Path(path) / "config.json").is_file():
            raise ModelConfigError(f"{path}: no folder of a Hugging Face model; it must hold a config.json")
        try:
            config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelConfigError(f"{path}: {' '.join(str(error).split())[:200]}") from error
        if config.model_type not in _SUPPORTED:
            raise ModelConfigError(
                f"{path}: model_type {config.model_type!r}; the references cover {', '.join(_SUPPORTED)}"
            )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError) as error:  # weights or tokenizer missing, or damaged
            raise ModelConfigError(f"{path}: {' '.join(str(error).split())[:200]}") from error
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.layers: int = config.num_hidden_layers
        self.query_heads: int = config.num_attention_heads
        self.heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary = self.model.model.rotary_emb
        self.inverse_frequencies = tuple(float(f) for f in rotary.inv_freq)
        self.rotary_scale = float(getattr(rotary, "attention_scaling", 1.0))
        self.fingerprint = model_fingerprint(Path(path))

    def tokens(self, text: str, limit: int | None = None) -> torch.Tensor:
        """Token ids of a text, at most `limit`, as one dimension."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids if limit is None else ids[:limit], dtype=torch.long)

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """KV of a prompt, rounded to bfloat16 as an engine keeps it (but held in float32)."""
        kv = torch.empty(self.layers, 2, self.heads, len(ids), self.head_dim)
        for start in range(0, len(ids), _PREFILL_TOKENS):
            end = min(start + _PREFILL_TOKENS, len(ids))
            self.run(ids[start:end], kv[:, :, :, :start], keep=kv[:, :, :, start:end], logits=False)
        return kv.bfloat16().float()

    @torch.inference_mode()
    def log_probabilities(
        self, ids: torch.Tensor, prefix: torch.Tensor, attend: Attention | None = None, first: int | None = None
    ) -> torch.Tensor:
        """Log-probabilities [n, vocabulary] after each of `ids`, which follow `prefix`.

        `first` is the position of ids[0] if it is not the length of the prefix (as after truncation).
        """
        hidden = self.run(ids, prefix, attend=attend, first=first)
        return torch.log_softmax(self.model.lm_head(hidden[0]), dim=-1)

    def run(
        self,
        ids: torch.Tensor | None,
        prefix: torch.Tensor,
        *,
        hidden: torch.Tensor | None = None,
        start_layer: int = 0,
        attend: Attention | None = None,
        keep: torch.Tensor | None = None,
        inputs: list[torch.Tensor] | None = None,
        first: int | None = None,
        logits: bool = True,
        override: tuple[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, n, hidden] of new tokens after the last norm (or the last layer, without `logits`).

        Starts at `start_layer` from `hidden` where given. `override` = (layer, KV [B, 2, heads, T, d]) replaces one
        layer's prefix by a batch of variants. `keep` receives the new tokens' KV; `inputs` each layer's input.
        """
        core = self.model.model
        if hidden is None:
            assert ids is not None
            hidden = core.embed_tokens(ids[None])
        assert hidden is not None
        n = hidden.shape[1]
        past = prefix.shape[3]
        begin = past if first is None else first
        positions = torch.arange(begin, begin + n)[None]
        cosine, sine = core.rotary_emb(hidden, positions)
        for layer in range(start_layer, self.layers):
            if inputs is not None:
                inputs.append(hidden)
            block = core.layers[layer]
            queries, keys, values = self.project(layer, block.input_layernorm(hidden), cosine, sine)
            if keep is not None:
                keep[layer, 0], keep[layer, 1] = keys[0], values[0]
            old = override[1] if override is not None and override[0] == layer else prefix[layer][None]
            if len(old) != len(queries):
                if len(queries) == 1:
                    hidden = hidden.expand(len(old), -1, -1)
                    queries, keys, values = (x.expand(len(old), -1, -1, -1) for x in (queries, keys, values))
                else:
                    old = old.expand(len(queries), -1, -1, -1, -1)
            mixed = (attend or exact_attention)(layer, queries, old[:, 0], old[:, 1], keys, values)
            hidden = hidden + block.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        last: torch.Tensor = core.norm(hidden) if logits else hidden
        return last

    def project(
        self, layer: int, normed: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys and the values of a layer, [B, heads, n, head_dim]."""
        attention = self.model.model.layers[layer].self_attn
        batch, n, _ = normed.shape
        queries = attention.q_proj(normed).view(batch, n, self.query_heads, self.head_dim)
        keys = attention.k_proj(normed).view(batch, n, self.heads, self.head_dim)
        values = attention.v_proj(normed).view(batch, n, self.heads, self.head_dim).transpose(1, 2)
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
        return rotate(queries, cosine, sine), rotate(keys, cosine, sine), values

    def turn(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Rotated keys [..., d] moved by `shift` positions: R(shift) applied to keys already rotated."""
        angle = shift * torch.tensor(self.inverse_frequencies, dtype=torch.float64)
        cosine, sine = torch.cos(angle).float(), torch.sin(angle).float()
        return rotate(keys, torch.cat([cosine, cosine]), torch.cat([sine, sine]))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over channel halves."""
    half = x.shape[-1] // 2
    cosine, sine = (t[:, None] if t.dim() == 3 else t for t in (cosine, sine))
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sine


def exact_attention(
    layer: int,
    queries: torch.Tensor,
    old_k: torch.Tensor,
    old_v: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
) -> torch.Tensor:
    """Every query sees the whole prefix and the new tokens up to itself."""
    n, past = queries.shape[2], old_k.shape[2]
    keys, values = torch.cat([old_k, new_k], dim=2), torch.cat([old_v, new_v], dim=2)
    mask = torch.ones(n, past + n, dtype=torch.bool).tril(past)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def attention_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scaled dot products [B, H, group, n, T] of grouped queries with their KV head's keys."""
    batch, heads_q, n, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], heads_q // keys.shape[1], n, dim)
    return torch.einsum("bhgnd,bhtd->bhgnt", grouped, keys) / math.sqrt(dim)
