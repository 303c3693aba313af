"""Tiny random models that vLLM really runs, made on the spot from a seed.

Their weights are random, so what they say is nonsense, but it depends on every token they read: weights are drawn with
a standard deviation well above the usual 0.02 and the output head is not tied to the embedding, because a small tied
model repeats one token whatever it is asked, and comparing such outputs proves nothing (`test_models.py` checks this).
The tokenizer is one token per byte, so a prompt of n ASCII characters has n tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.testing.prepared import prepared_folder

SEED = 20_260_101
BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCAB_SIZE = 320  # 256 bytes and the special tokens, rounded up to a multiple of 64
MAX_POSITIONS = 4_096

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": BYTE_TOKENS,
    "eos_token_id": BYTE_TOKENS + 1,
    "pad_token_id": BYTE_TOKENS + 2,
}


def tiny_llama(root: Path | None = None) -> Path:
    """Full attention, grouped queries: 4 layers, 2 KV heads of 32. One KV-cache group, block size a multiple of 32."""
    return _prepared("tiny-llama", _llama, root)


def tiny_mistral(root: Path | None = None) -> Path:
    """Every layer slides over 64 tokens: one sliding-window group and no full-attention group."""
    return _prepared("tiny-mistral", _mistral, root)


def tiny_gemma(root: Path | None = None) -> Path:
    """Hybrid: (sliding 64, sliding 64, full) twice, so three KV-cache groups share the device pool."""
    return _prepared("tiny-gemma", _gemma, root)


def tiny_mla(root: Path | None = None) -> Path:
    """DeepSeek multi-head latent attention; vLLM's CPU kernel takes a latent of 512 + 64 and blocks of 16 only."""
    return _prepared("tiny-mla", _mla, root)


ALL_MODELS: dict[str, Callable[..., Path]] = {
    "tiny-llama": tiny_llama,
    "tiny-mistral": tiny_mistral,
    "tiny-gemma": tiny_gemma,
    "tiny-mla": tiny_mla,
}


def prompt_tokens(seed: int, length: int) -> list[int]:
    """Return `length` reproducible byte tokens; prompts of different seeds share no prefix worth a block."""
    stream = hashlib.shake_128(f"prompt {seed}".encode()).digest(length)
    return list(stream)


def _prepared(name: str, make: Callable[[], Any], root: Path | None) -> Path:
    import transformers

    recipe = [inspect.getsource(make), inspect.getsource(_save), SEED, _COMMON, transformers.__version__]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    return prepared_folder(f"{name}-{digest}", lambda folder: _save(make, folder), root)


def _save(make: Callable[[], Any], folder: Path) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make()
    model.to(torch.float32).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return tokenizer


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=4))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_COMMON, num_hidden_layers=4, sliding_window=64))


def _gemma() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=64,
        query_pre_attn_scalar=32,
    )
    return Gemma3ForCausalLM(config)


def _mla() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shape = {key: value for key, value in _COMMON.items() if key not in ("head_dim", "num_key_value_heads")}
    layers = 2
    config = DeepseekV3Config(
        **shape,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        first_k_dense_replace=layers,  # no layer routes to experts: they say nothing about the KV cache
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        # As DeepSeek ships it. Plain RoPE would take vLLM 0.32's CPU kernel, which reads the token stride of the
        # [tokens, heads, dim] queries from the wrong axis: the answers would depend on the batch.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_POSITIONS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return DeepseekV3ForCausalLM(config)
