"""Model types whose reading has been checked: against the tensors transformers builds, or against published figures.

Only decides whether a report carries the note that the type is new to kvtier. Never decides a size.
"""

from __future__ import annotations

_CHECKED = """
    afmoe apertus arcee aria_text axk2 bamba bart bert biogpt bitnet blenderbot blenderbot-small bloom chatglm
    codegen cohere cohere2 cohere2_moe cpmant ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama
    doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3
    gemma3n gemma4 gemma4_unified glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax jais2 jamba jetmoe kimi_k2
    kimi_k25 kimi_k3 kimi_linear laguna lfm2 lfm2_moe llama llama4 longcat_flash mamba mamba2 marian mbart
    mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl ministral ministral3 mistral mistral3
    mixtral mllama modernbert-decoder moshi mpt mt5 mvp nanochat nemotron nemotron-nas nemotron_h olmo olmo2
    olmo3 olmo_hybrid olmoe opt paligemma pegasus persimmon phi phi3 phimoe plbart prophetnet qwen qwen2
    qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    recurrent_gemma RefinedWeb RefinedWebModel seed_oss smollm3 solar_open stablelm starcoder2 t5 trocr umt5
    vaultgemma voxtral whisper xglm youtu zamba2
"""
CHECKED_TYPES = frozenset(_CHECKED.split())
