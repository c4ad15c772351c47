"""Rows with images for tests of engines, and what transformers says of them."""

from __future__ import annotations

import copy
import io
from array import array
from pathlib import Path

import numpy as np
import torch
from PIL import Image as PIL
from support.vision import vision_tokenizer

from agentrl.images import Image, ImageRule, RowImage, load_processor, prepare

TOKENIZER = vision_tokenizer()
START, END, PAD = TOKENIZER.convert_tokens_to_ids(
    ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
)


def picture(rule: ImageRule, width: int, height: int, seed: int) -> RowImage:
    """Return random pixels, `width` x `height` tokens."""
    size = height * rule.unit, width * rule.unit, 3
    pixels = np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)
    return prepare(Image.of(PIL.fromarray(pixels)), rule)


def row_of(*parts: str | RowImage) -> array[int]:
    """Return the tokens of texts and images."""
    ids = array("i")
    for part in parts:
        if isinstance(part, str):
            ids.extend(TOKENIZER.encode(part, add_special_tokens=False))
        else:
            ids.extend([START, *[PAD] * part.tokens, END])
    return ids


class Reference:
    """The model's own forward pass over whole rows, in float64, with its own positions."""

    def __init__(self, model, folder: Path):
        self.model, self._processor = copy.deepcopy(model).double(), load_processor(folder)

    @torch.no_grad()
    def logprobs(self, row, images=()) -> np.ndarray:
        """Return the logprob of each token of a row; 0 for the first and for images'."""
        row = torch.tensor([list(row)])
        ids = row[:, :-1]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            pictures = [PIL.open(io.BytesIO(image.data)) for image in images]
            inputs |= dict(self._processor(images=pictures, return_tensors="pt"))
            inputs["pixel_values"] = inputs["pixel_values"].double()
            inputs["mm_token_type_ids"] = (ids == PAD).int()
        logits = self.model(**inputs).logits[0]
        found = logits.log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0].numpy()
        found[:-1][ids[0, 1:] == PAD] = 0
        return np.concatenate([[0.0], found])
