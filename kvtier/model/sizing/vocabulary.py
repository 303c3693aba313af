"""Telling a field that may change the size of the cache from one that cannot.

The rule that keeps the ledger honest: an active field that nobody has read, whose name speaks of attention, windows,
state or layers and does not belong to something known to be harmless, means that the model was not understood.
"""

from __future__ import annotations

import re

from kvtier.model.sizing.fields import Fields, says_something

# A field that contains one of these words describes something that keeps nothing for a sequence: regularisation, norms,
# scaling, initialisation, experts, embeddings, other modalities, kernels, and how training or generation is run.
_HARMLESS = re.compile(
    r"(^|_)(dropout|pdrop|layerdrop|bias|eps|epsilon|norm|norms|layernorm|layernorms|ln|initializer|init|std|scale|scales|"
    r"scaling|multiplier|multipliers|softcap|softcapping|temperature|theta|yarn|dtype|fp32|act|activation|loss|coef|alpha|"
    r"beta|expert|experts|moe|router|routed|routing|mlp|ffn|vocab|embed|embd|embedding|embeddings|emb|tokenizer|quant|"
    r"quantization|quantize|pruned|gradient|checkpointing|labels|summary|classifier|vision|image|images|video|audio|speech|"
    r"vit|projector|mm|multimodal|patch|pixel|talker|encoder|kernels|impl|implementation|flash|sdpa|fused|efficient|clip|"
    r"gate|gated|gating|proj|projection|logits|softmax|parallel|tp|plan|ngram|deepstack|lm|entropy|freeze)($|_)"
)

# The words that speak of what is kept for a sequence, or of how layers differ from each other.
_HINT = re.compile(
    r"(^|_)(attn|attention|head|heads|headdim|kv|key|keys|value|values|window|windows|sliding|swa|local|global|chunk|chunked|"
    r"chunks|strided|dilated|block|blocks|sparse|sparsity|dsa|nsa|moba|index|indexer|kpool|compress|compressed|compressor|"
    r"compression|latent|lora|mla|rank|cla|share|shared|sharing|reuse|yoco|cross|memory|mem|mems|cache|mamba|mamba2|ssm|"
    r"state|states|recurrent|recurrence|rnn|lstm|xlstm|mlstm|slstm|gru|lru|rwkv|wkv|conv|convs|conv1d|shortconv|linear|"
    r"delta|deltanet|gdn|kda|lightning|retention|retnet|hyena|gla|gsa|hgrn|ttt|titans|performer|lsh|hybrid|layer|layers|"
    r"pattern|period|interval|freq|every|cycles|loop|loops|recur|cca|hashes|landmark|sink|sinks)($|_)"
)

# Names the two patterns would misjudge, with what they really are.
_HARMLESS_NAMES_TEXT = """
    use_cache keys_to_ignore_at_inference context_window
    cache_implementation chunk_size_feed_forward chunk_size mamba_chunk_size block_size
    block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of block_dim block_ff_dim
    block_use_swiglu block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init
    hidden_size_per_layer_input first_k_dense_replace num_dense_layers decoder_sparse_step
    apply_residual_connection_post_layernorm do_layer_norm_before tie_encoder_decoder add_cross_attention
    cross_attention_hidden_size mamba_dt_rank mamba_dt_min mamba_dt_max mamba_dt_limit mamba_dt_init_floor
    mamba_use_mlp num_mem_blocks adapter_rank num_adapter_layers use_shared_attention_adapter use_mem_rope
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attn_res_block_size linear_lower_bound
    linear_a_log_max linear_a_log_min linear_allow_neg_eigval linear_dt_max linear_dt_min gate_lower_bound
    use_full_rank_gate shared_intermediate_size share_expert_dim share_q_dim rope_local_base_freq laurel_rank
    activation_sparsity_pattern mla_use_nope mla_use_output_gate q_lora_rank o_lora_rank
    indexer_rope_interleave index_n_heads index_topk index_share_for_mtp_iteration
    relative_attention_num_buckets relative_attention_max_distance num_attention_heads_per_layer
    num_encoder_attention_heads share_input_output_embed share_encoder_decoder_embeddings keep_window_size
    hc_lowrank no_rope_layers no_rope_layer_interval head_type num_shared_head_layers time_step_rank
    rescale_every global_block_size local_radius num_sparse_decoder_layers use_logn_attn use_cache_kernel
    pad_key_length dual_chunk_attention_config share_input_output_layers full_attn_mod query_pre_attn_scalar
    num_sliding_attention_heads attention_method use_head_wise_attn_gate shared_head skip_layers
    num_layers_in_parallel_attn num_ln_in_parallel_attn cache_config tie_word_embeddings attention_value_scale
    kv_cache_scheme kv_cache_dtype
"""
_HARMLESS_NAMES = frozenset(_HARMLESS_NAMES_TEXT.split())


def unexplained(fields: Fields) -> list[str]:
    """Names of the fields, in order, that nobody read although they may change what is cached."""
    return [name for name, found in fields.unread() if says_something(found) and _is_hint(name.rsplit(".", 1)[-1])]


def _is_hint(key: str) -> bool:
    lowered = key.lower().lstrip("_")
    if lowered in _HARMLESS_NAMES or _HARMLESS.search(lowered):
        return False
    return _HINT.search(lowered) is not None
