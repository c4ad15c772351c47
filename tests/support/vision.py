"""Tiny models with random weights that read images: real classes, byte tokens, own template."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.testing.tokenizer import byte_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

TEMPLATE = r"""
{%- macro write(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- write(messages[0].content) + '\n\n' }}{% endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nCall a function with\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + write(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + write(message.content) + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + write(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + write(message.content) + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
"""Like the template of Qwen3-VL: messages of users and results of tools may have images."""


def vision_tokenizer() -> Any:
    """Return `byte_tokenizer` with the tokens of images (263 to 266) and `TEMPLATE`."""
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.add_tokens(list(VISION_TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def vision_config(family: str = "qwen2_5_vl") -> Any:
    """Return the config of a tiny model: 2 layers of 64, 2 layers for images."""
    tokenizer = vision_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS}
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 64, "mlp_ratio": 2}
    else:
        vision |= {"intermediate_size": 128, "out_hidden_size": 64}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl":
        text |= {"head_dim": 16, "rope_parameters": rope | {"mrope_interleaved": True}}
        vision |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def vision_model(family: str = "qwen2_5_vl", seed: int = 0) -> PreTrainedModel:
    """Return a model whose answers depend on its images: weights three times as large as usual."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(vision_config(family)).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(3)
    return model


def write_vision_model(folder: Path, family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Write a model folder: weights, tokenizer, template and image processor."""
    model = vision_model(family, seed)
    model.save_pretrained(folder)
    vision_tokenizer().save_pretrained(folder)
    patch = model.config.vision_config.patch_size
    Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2},
    ).save_pretrained(folder)
    return folder
