"""Writes the tables of benchmarks/models.md about rows and the local engine: `make models`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.architectures import (
    ARCHITECTURES,
    DELTA,
    EXPERTS,
    LONGROPE,
    MAMBA,
    architecture,
    make_model,
)
from support.pages import with_text_between
from transformers import PreTrainedModel

from agentrl.engine.local.decoder import CannotDecode, Decoder
from agentrl.errors import ConfigError
from agentrl.learner.modes import prove_mode

PAGE = Path(__file__).parents[2] / "benchmarks" / "models.md"
BEGIN = "<!-- table of {}: make models -->\n"
END = "<!-- end of the table of {} -->\n"

MIXED = {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"num_local_experts": 4, "num_experts": 4, **EXPERTS}
SHARED = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "head_dim": 8, "sliding_window": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
}  # fmt: skip
FIXED = {
    "head_dim": 8, "moe_topk": 2,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
}  # fmt: skip
KINDS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "causal attention to the whole row in every layer": {
        "Llama": ("llama", {}),
        "Qwen2": ("qwen2", {}),
        "Qwen3": ("qwen3", {}),
        "Qwen3-MoE": ("qwen3_moe", MOE),
        "GLM 4": ("glm4", {"head_dim": 8}),
        "GLM-4.5": ARCHITECTURES["GLM-4.5"],
        "SmolLM3": ("smollm3", {}),
        "Phi-4": ("phi3", {}),
        "Mistral without a window": ("mistral", {"sliding_window": None}),
        "Qwen3 with a window that no layer has": (
            "qwen3", {"sliding_window": 4096, "layer_types": ["full_attention"] * 4},
        ),
    },
    "multi-head latent attention": {"DeepSeek-V3": ARCHITECTURES["DeepSeek-V3"]},
    "sparse attention": {
        # With few heads, most scores are 0, and which of equal ones are the largest depends on the
        # length of the row.
        "DeepSeek-V3.2": (
            "deepseek_v32",
            ARCHITECTURES["DeepSeek-V3"][1]
            | {"index_topk": 2048, "index_n_heads": 8, "index_head_dim": 16},
        ),
    },
    "a sliding window of the attention layer": {
        "Mistral": ("mistral", {"sliding_window": 4096}),
        "Phi-3": ("phi3", {"sliding_window": 4096}),
        "Qwen2": ("qwen2", {"use_sliding_window": True, **MIXED}),
        "Qwen2-MoE": (
            "qwen2_moe",
            {"use_sliding_window": True, **MIXED, **MOE, "shared_expert_intermediate_size": 16},
        ),
        "Qwen3": ("qwen3", {"use_sliding_window": True, **MIXED}),
        "Gemma 3": ("gemma3_text", {"head_dim": 8, **MIXED}),
        "OLMo 3": ("olmo3", MIXED),
        "EXAONE 4": ("exaone4", MIXED),
        "Cohere2": ("cohere2", {"head_dim": 8, **MIXED}),
    },
    "windows that start again every n tokens": {
        "Llama 4 without `attn_temperature_tuning`": (
            "llama4_text",
            {
                "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 8192,
                "attn_temperature_tuning": False, "num_local_experts": 4,
            },
        ),
    },
    "attention sinks": {"gpt-oss": ARCHITECTURES["gpt-oss"]},
    "a soft cap of the scores in attention": {
        "Gemma 2": ("gemma2", {"head_dim": 8, **MIXED}),
        "VaultGemma": ("vaultgemma", {"head_dim": 8, **MIXED}),
    },
    "layers that share keys and values": {
        "Gemma 3n": (
            "gemma3n_text",
            SHARED | {
                "intermediate_size": [48] * 6, "laurel_rank": 4,
                "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
            },
        ),
        "Gemma 4": ("gemma4_text", SHARED | {"global_head_dim": 16}),
    },
    "rotary positions with a fixed base that the config calls `dynamic`": {
        "HunYuan V1": ("hunyuan_v1_dense", FIXED),
        "HunYuan V1 MoE": ("hunyuan_v1_moe", FIXED | MOE),
    },
    "a bias of relative positions": {
        "Inkling": (
            "inkling_text",
            MOE | {
                "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16, "n_shared_experts": 1,
                "n_routed_experts": 4,
            },
        ),
    },
    "attention with ALiBi in bfloat16": {
        "Falcon": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
    },
    "logits with a scale or a bias": {
        "Granite": ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.25}),
        "Cohere": ("cohere", {"logit_scale": 0.25}),
        "Phi-2": ("phi", {}),
    },
    "Mamba and hybrids with it": {
        "Mamba 2": ("mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
        "Nemotron-H": ARCHITECTURES["Nemotron-H"],
        "Granite 4 hybrids": ARCHITECTURES["Granite 4 hybrid"],
        "Jamba": ("jamba", {**MOE, **MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2}),
    },
    "linear attention": {
        "Qwen3.5": ARCHITECTURES["Qwen3.5"],
        "Qwen3-Next": ("qwen3_next", {**DELTA, **MOE, "shared_expert_intermediate_size": 16}),
        "MiniMax-M1": ("minimax", {"head_dim": 8, **MOE}),
    },
    "convolutions": {"LFM2": ARCHITECTURES["LFM2"]},
    "attention without transformers' attention interface": {
        "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4}),
        "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
        "StableLM": ("stablelm", {}),
    },
    "a window that only the mask implements": {
        "PhiMoE": ("phimoe", {"sliding_window": 4096, "num_local_experts": 4}),
    },
    "queries with a factor of their position": {
        "Llama 4 with `attn_temperature_tuning`": (
            "llama4_text",
            {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
        ),
    },
    "rotary positions that depend on the row length (`longrope`)": {
        "Phi-4-mini": ARCHITECTURES["Phi-4-mini"],
        "Llama with longrope": (
            "llama",
            {
                "rope_parameters": LONGROPE
                | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
                | {"original_max_position_embeddings": 24},
            },
        ),
    },
    "rotary positions that depend on the rows before (`dynamic`)": {
        "Llama with dynamic positions": (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        ),
    },
    "masks that depend on the number of later tokens": {
        "Doge": ("doge", {"keep_window_size": 4096}),
    },
}  # fmt: skip
"""Kinds of layers, and models that have them: the type of the config, and values of it."""


def tables() -> Mapping[str, Iterator[tuple[str, ...]]]:
    """Return the rows of each table by its name."""
    return {"kinds": kinds(), "models": models()}


def kinds() -> Iterator[tuple[str, ...]]:
    yield "layers", "models", "rows (on a CPU)", "`local`"
    for kind, examples in KINDS.items():
        rows = {name: rows_of(make_model(*example)) for name, example in examples.items()}
        local = {name: local_engine(make_model(*example)) for name, example in examples.items()}
        yield kind, ", ".join(examples), join(rows), join(local)


def models() -> Iterator[tuple[str, ...]]:
    yield "architecture", "class in transformers", "rows (on a CPU)", "`local`"
    for name in ARCHITECTURES:
        kind = type(architecture(name)).__name__
        yield name, f"`{kind}`", rows_of(architecture(name)), local_engine(architecture(name))


def rows_of(model: PreTrainedModel) -> str:
    """Return how the rows of a model are run."""
    try:
        return prove_mode(model)[0].value.removeprefix("rows ")
    except ConfigError:
        return "refused"


def local_engine(model: PreTrainedModel) -> str:
    """Return whether the local engine decodes a model."""
    try:
        Decoder(model)
    except CannotDecode:
        return "refused"
    return "runs"


def join(answers: Mapping[str, str]) -> str:
    """Return the answer of all models, or for each answer its models."""
    by_answer: dict[str, list[str]] = {}
    for name, answer in answers.items():
        by_answer.setdefault(answer, []).append(name)
    if len(by_answer) == 1:
        return next(iter(by_answer))
    return "; ".join(f"{answer}: {', '.join(names)}" for answer, names in by_answer.items())


def with_tables(page: str) -> str:
    for name, (head, *rows) in ((name, tuple(rows)) for name, rows in tables().items()):
        lines = [head, ("---",) * len(head), *rows]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        page = with_text_between(page, BEGIN.format(name), END.format(name), table)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
