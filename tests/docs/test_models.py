"""The tables of docs/models.md: which architectures the trainer accepts, and how."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.models_page import PAGE, with_table

from agentrl.errors import ConfigError
from agentrl.trainer.packing import Mode
from agentrl.trainer.policy import Policy

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "original_max_position_embeddings": 64,
    },
}


def model(name: str, **keys: object) -> transformers.PreTrainedModel:
    """A small model with random weights. A text config belongs to the class without "Text"."""
    config = getattr(transformers, f"{name}Config")(**TINY | keys)
    torch.manual_seed(0)
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()


PADDED, ALONE = Mode.PADDED, Mode.ALONE


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text", "Glm4")),
        *(
            (name, {})
            for name in ("Phi3", "Olmo3", "Exaone4", "SmolLM3", "Gemma2", "Phi", "Cohere")
        ),
        *((name, EXPERTS) for name in ("Qwen3Moe", "GptOss")),
        ("Cohere2", {}),
        ("Granite", {"logits_scaling": 8.0}),
        ("DeepseekV3", DEEPSEEK),
    ],
)
def test_rows_of_these_are_packed(name, keys):
    assert Policy(model(name, **keys), temperature=1.0).packed_model.mode is Mode.PACKED


@pytest.mark.parametrize(
    ("name", "keys", "mode"),
    [
        ("NemotronH", {}, PADDED),
        ("Jamba", EXPERTS, PADDED),
        ("GraniteMoeHybrid", {}, PADDED),
        ("Qwen3_5Text", {}, PADDED),
        ("Qwen3Next", EXPERTS, PADDED),
        ("MiniMax", EXPERTS, PADDED),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, PADDED),
        ("Phimoe", EXPERTS | {"sliding_window": 16}, PADDED),
        ("Phi3", LONGROPE, ALONE),
    ],
)
def test_rows_of_these_are_not_packed_on_a_cpu(name, keys, mode):
    assert Policy(model(name, **keys), temperature=1.0).packed_model.mode is mode


def test_these_are_refused():
    with pytest.raises(ConfigError, match="cannot be trained here"):
        Policy(model("Doge"), temperature=1.0)


def test_the_table_of_architectures_is_up_to_date():
    page = PAGE.read_text("utf-8")
    assert with_table(page) == page, "make models"
