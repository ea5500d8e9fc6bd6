"""Tiny configurations of further model families, by ``model_type``, for contract tests of models found by structure.

The families of :mod:`edit_hooks.contract.tiny_models` are those on which the tests run every editor. On these the
tests run the self-check and an editor; docs/_data/families.yaml has the results.
"""

from __future__ import annotations

from typing import Any

NUM_LAYERS = 3

_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
_PLAIN = {name: value for name, value in _DECODER.items() if name != "head_dim"}
_GPT = {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 128}
_FFN = {"ffn_dim": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_CONVOLUTION = {"layer_types": ["conv", "full_attention", "full_attention"]}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_DEEPSEEK_EXPERTS = {**_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_STATE = {"hidden_size": 32, "num_hidden_layers": NUM_LAYERS, "state_size": 8}
_GEMMA4 = {
    **_DECODER,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 8,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    # dense decoders
    "apertus": _PLAIN,
    "arcee": _PLAIN,
    "biogpt": {**_PLAIN, "num_key_value_heads": 4},
    "bitnet": _PLAIN,
    "bloom": {"hidden_size": 32, "n_layer": NUM_LAYERS, "n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": {**_PLAIN, "logit_scale": 0.25},
    "cohere2": {**_DECODER, **_SLIDING, "logit_scale": 0.25},
    "cwm": _DECODER,
    "diffllama": _PLAIN,
    "doge": _PLAIN,
    "ernie4_5": _DECODER,
    "exaone": _PLAIN,
    "exaone4": {**_PLAIN, **_SLIDING},
    "falcon": {"hidden_size": 32, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4},
    "gemma": _DECODER,
    "gemma3": {
        "text_config": {**_DECODER, **_SLIDING, "query_pre_attn_scalar": 8},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {"text_config": {**_GEMMA4, "pad_token_id": 0}},
    "gemma4_text": _GEMMA4,
    "glm": _DECODER,
    "glm4": _DECODER,
    "gpt-sw3": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": NUM_LAYERS,
        "num_heads": 4,
        "attention_types": [[["global"], NUM_LAYERS]],
        "max_position_embeddings": 128,
    },
    "granite": {
        **_PLAIN,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "helium": _DECODER,
    "hunyuan_v1_dense": _DECODER,
    "hyperclovax": {**_PLAIN, "residual_multiplier": 0.5},
    "internlm3": _DECODER,
    "iquestcoder": _DECODER,
    "jais2": _PLAIN,
    "minicpm3": {**_PLAIN, **_LATENT},
    "ministral": {**_DECODER, **_SLIDING},
    "ministral3": _DECODER,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": NUM_LAYERS, "max_seq_len": 128},
    "nanochat": _PLAIN,
    "nemotron": _PLAIN,
    "olmo": _PLAIN,
    "olmo3": {**_PLAIN, **_SLIDING},
    "openai-gpt": _GPT,
    "opt": {**_FFN, "hidden_size": 32, "num_hidden_layers": NUM_LAYERS, "word_embed_proj_dim": 32},
    "persimmon": {**_PLAIN, "num_key_value_heads": 4},
    "phi": _PLAIN,
    "seed_oss": _DECODER,
    "smollm3": _PLAIN,
    "stablelm": _PLAIN,
    "starcoder2": _PLAIN,
    "vaultgemma": _DECODER,
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": NUM_LAYERS, "attention_heads": 4},
    "youtu": {**_PLAIN, **_LATENT},
    # mixtures of experts
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": NUM_LAYERS,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {**_PLAIN, **_LATENT, **_DEEPSEEK_EXPERTS},
    "deepseek_v3": {**_PLAIN, **_LATENT, **_DEEPSEEK_EXPERTS},
    "ernie4_5_moe": {**_PLAIN, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "glm4_moe": {**_DECODER, **_DEEPSEEK_EXPERTS},
    "gpt_oss": {**_DECODER, **_LOCAL_EXPERTS, **_SLIDING},
    "granitemoe": {**_PLAIN, **_LOCAL_EXPERTS, "residual_multiplier": 0.22},
    "granitemoeshared": {**_PLAIN, **_LOCAL_EXPERTS, "shared_intermediate_size": 24, "residual_multiplier": 0.22},
    "hunyuan_v1_moe": {**_DECODER, "num_experts": 4, "moe_topk": 2},
    "llama4_text": {**_DECODER, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1},
    "minimax": {**_PLAIN, **_LOCAL_EXPERTS},
    "mixtral": {**_PLAIN, **_LOCAL_EXPERTS},
    "olmoe": {**_PLAIN, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**_PLAIN, **_LOCAL_EXPERTS},
    "qwen2_moe": {**_PLAIN, **_SHARED_EXPERT},
    "qwen3_moe": {**_DECODER, **_EXPERTS},
    # hybrids of attention and other mixers
    "bamba": {**_PLAIN, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_PLAIN, **_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_PLAIN,
        **_LOCAL_EXPERTS,
        **_MAMBA,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "attention"],
    },
    "jamba": {
        **_PLAIN,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    "kimi_linear": {
        **_PLAIN,
        **_LATENT,
        **_DEEPSEEK_EXPERTS,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_attn_config": {"head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4},
    },
    "lfm2": {**_PLAIN, **_CONVOLUTION, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_PLAIN, **_CONVOLUTION, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": _PLAIN,
    "nemotron_h": {
        **_PLAIN,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "mlp", "attention"],
    },
    "olmo_hybrid": {**_PLAIN, **_LINEAR},
    "qwen3_5": {"text_config": {**_DECODER, **_LINEAR}},
    "qwen3_5_moe_text": {**_DECODER, **_LINEAR, **_SHARED_EXPERT},
    "qwen3_5_text": {**_DECODER, **_LINEAR},
    "qwen3_next": {**_DECODER, **_LINEAR, **_SHARED_EXPERT},
    "qwen4_exp_text": {**_DECODER, **_LINEAR, **_EXPERTS, "layer_types": ["linear_attention"] * NUM_LAYERS},
    "recurrent_gemma": {
        **_DECODER,
        "lru_width": 32,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    # no attention
    "falcon_mamba": _STATE,
    "mamba": _STATE,
    "mamba2": {**_STATE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": NUM_LAYERS, "attention_hidden_size": 32, "context_length": 128},
}
