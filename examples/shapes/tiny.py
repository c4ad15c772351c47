"""Write a tiny model that reads images, with random weights: 1.3 million, a token for each byte.

    python examples/shapes/tiny.py models/tiny-vision

It has the classes, the positions and the chat format of Qwen2.5-VL, and learns to count shapes from
nothing (README.md). It knows no language.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.testing import byte_tokenizer

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""  # noqa: E501
PATCH = 14


def write(folder: str, seed: int) -> None:
    """Write the model, its tokenizer and its image processor."""
    tokenizer: Any = deepcopy(byte_tokenizer())
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(TOKENS))
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            **sizes,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "fullatt_block_indexes": [0, 1, 2],
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    unit = 2 * PATCH
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": unit**2, "longest_edge": 64 * unit**2},
    ).save_pretrained(folder)


def main() -> None:
    """Write the model to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
