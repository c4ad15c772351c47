"""Tiny models of many architectures, with random weights, from transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentrl.learner.packing import Mode

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
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
WINDOW = 5
"""Most rows of `random_groups` are longer."""
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 4.0, 9.0],
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Qwen3-MoE": (
        "qwen3_moe", {"head_dim": 8, "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    ),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Qwen3.5-MoE": (
        "qwen3_5_moe_text",
        {**DELTA, "num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": WINDOW, "max_position_embeddings": 131072,
        },
    ),
    "Llama 3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }}),
    "Gemma 3": ("gemma3_text", {
        # The scale of the scores is not that of the heads, as in the model of 27B.
        "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 21,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    }),
    "Mistral": ("mistral", {"sliding_window": WINDOW}),
    "Phi-4": ("phi3", {}),
    "Phi-4-mini": ("phi3", {
        "rope_parameters": LONGROPE, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
        "original_max_position_embeddings": 24,
    }),
    "OLMo 3": ("olmo3", {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "Nemotron-H": (
        "nemotron_h",
        {
            "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
            "n_groups": 2, "hybrid_override_pattern": "ME*-", "chunk_size": 8,
            "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 2.5, **EXPERTS,
        },
    ),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "Granite 4 hybrid": (
        "granitemoehybrid",
        {
            **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 16,
            "position_embedding_type": "nope", "tie_word_embeddings": True, "logits_scaling": 8.0,
            "attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        },
    ),
    "GLM-4.5": ("glm4_moe", {
        "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "attention_bias": True,
        "use_qk_norm": True, "routed_scaling_factor": 2.5, **EXPERTS,
    }),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
            "first_k_dense_replace": 1, "num_key_value_heads": 4, "rope_parameters": YARN,
            "max_position_embeddings": 163840, **EXPERTS,
        },
    ),
}  # fmt: skip
"""The type of each model's config, and the values in which it differs from `SHAPE`."""


QUICK = ("Qwen3", "Qwen3-MoE", "Qwen3.5", "gpt-oss", "Gemma 3", "Nemotron-H")
"""Six shapes that `make test` runs. The others run in `make test-all`."""
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES
]
PADDED = ("Qwen3.5", "Qwen3.5-MoE", "Nemotron-H", "LFM2", "Granite 4 hybrid")
"""The architectures whose rows are padded on a CPU. Those of Phi-4-mini are run alone, and all
others are packed."""


def make_model(kind: str, values: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return a model in float32, with weights so large that each token changes the next logits."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**SHAPE | values)
    return _with_large_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@torch.no_grad()
def _with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
        else:
            weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def mode_of(name: str) -> Mode:
    """Return how the rows of one of `ARCHITECTURES` are run on a CPU."""
    if name in PADDED:
        return Mode.PADDED
    return Mode.ALONE if name == "Phi-4-mini" else Mode.PACKED


SMALL = {
    **SHAPE, **EXPERTS, **DELTA, **MAMBA, "d_model": 32, "n_embd": 32, "dim": 32, "ffn_dim": 48,
    "d_ff": 48, "n_inner": 48, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 2,
    "decoder_layers": 4, "num_decoder_layers": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "n_positions": 512, "n_ctx": 512, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "moe_topk": 2, "moe_k": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "mamba_d_ssm": 64, "mamba_n_groups": 1, "state_size": 8, "ssm_state_size": 8, "n_groups": 1,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "time_step_rank": 4, "mamba_dt_rank": 4,
    "sliding_window": WINDOW, "embedding_size": 32, "word_embed_proj_dim": 32, "rotary_dim": 8,
    "lru_width": 32, "shared_intermediate_size": 32, "shared_expert_intermediate_size": 16,
    "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8, "attention_hidden_size": 32, "tgt_vocab_size": 64,
}  # fmt: skip
"""Small values for the keys of any config."""


def model_of_kind(kind: str) -> PreTrainedModel:
    """Return a tiny model of any kind that transformers has, as `make_model` does.

    Raises:
        Exception: `SMALL` does not fit, so the model cannot be made or does not run.
    """
    default = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    own = vars(default) | dict.fromkeys(default.attribute_map)
    values = {key: v for key, v in SMALL.items() if key in own and key != "layer_types"}
    if "kv_lora_rank" in own:
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    if own.get("sliding_window", 0) is None:
        del values["sliding_window"]
    for key in ("layer_types", "layers_block_type"):
        if isinstance(kinds := getattr(default, key, None), list):
            values[key] = (list(dict.fromkeys(kinds)) * 4)[:4]
    torch.manual_seed(0)
    model = _with_large_weights(AutoModelForCausalLM.from_config(type(default)(**values)))
    model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    return model


def architecture(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of one of `ARCHITECTURES`."""
    return make_model(*ARCHITECTURES[name], seed)
