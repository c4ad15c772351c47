"""Tiny models of many architectures, with random weights, from transformers' own classes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DELTA = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
WINDOW = 16
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Qwen3-MoE": ("qwen3_moe", {"head_dim": 8, "num_experts": 4, **EXPERTS}),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Qwen3.5-MoE": (
        "qwen3_5_moe_text",
        {**DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "Llama 3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }}),
    "Gemma 3": ("gemma3_text", {
        "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }),
    "Mistral": ("mistral", {"sliding_window": WINDOW}),
    "Phi-4": ("phi3", {"partial_rotary_factor": 0.5}),
    "OLMo 3": ("olmo3", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "Nemotron-H": (
        "nemotron_h",
        {
            "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
            "n_groups": 2, "hybrid_override_pattern": "M-*-", "chunk_size": 16,
        },
    ),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "Granite 4 hybrid": (
        "granitemoehybrid",
        {
            **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 16, "logits_scaling": 4.0,
            "position_embedding_type": "nope",
        },
    ),
    "GLM-4.5": ("glm4_moe", {
        "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, **EXPERTS,
    }),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
            "first_k_dense_replace": 1, "num_key_value_heads": 4, **EXPERTS,
        },
    ),
}  # fmt: skip
"""The type of each model's config, and the values in which it differs from `SHAPE`."""


def make_model(kind: str, values: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return a model in float32, with weights so large that each token changes the next logits."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**SHAPE | values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def architecture(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of one of `ARCHITECTURES`."""
    return make_model(*ARCHITECTURES[name], seed)
