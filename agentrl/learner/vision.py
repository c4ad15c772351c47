"""Rows with images: their pixels, and the forward pass of the whole model with them.

Pixels are made where the pass runs, from the images that travel with the batch: these take less
space, and all rows of a prompt refer to the same ones. The positions of tokens are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.learner.packing import PackedRows


def vision_tower(model: PreTrainedModel) -> nn.Module | None:
    """Return the part of a model that turns images into vectors of its text part, or None."""
    return getattr(model.base_model, "visual", None)


def freeze_vision_tower(model: PreTrainedModel) -> None:
    """Let the vision tower of a model not learn, with the layer that merges its patches.

    Raises:
        ConfigError: the model has none.
    """
    tower = vision_tower(model)
    if tower is None:
        raise ConfigError(
            f"model.freeze_vision_tower=true: {type(model).__name__} has no vision tower. Set"
            " model.freeze_vision_tower=false"
        )
    tower.requires_grad_(False)


def vision_blocks(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the blocks of the vision tower, in order; none if it does not learn."""
    tower = vision_tower(model)
    if tower is None or not any(p.requires_grad for p in tower.parameters()):
        return ()
    return list(tower.blocks)  # type: ignore[arg-type]


def states_with_images(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Return the states of all tokens of a row with images, (1, L, H)."""
    ids, is_image = packed.input_ids, packed.is_image
    assert is_image is not None and packed.images
    arguments = {key: x for key, x in packed.arguments().items() if key != "position_ids"}
    # The model takes every placeholder for a part of an image. One that the policy sampled is a
    # token like others, so only the embeddings get its id.
    is_sampled = (ids == packed.images[0].token_id) & ~is_image
    hook: Any = nullcontext()
    if is_sampled.any():
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_pre_hook(lambda _, __: (ids,))
    with hook:
        output = model.base_model(
            use_cache=False,
            mm_token_type_ids=is_image.int(),
            **arguments | {"input_ids": ids.masked_fill(is_sampled, 0), **packed.pixels},
        )
    return output.last_hidden_state


def zero_gradient(model: PreTrainedModel) -> Tensor | float:
    """Return 0 with a gradient of zeros for the vision tower, if it learns.

    Ranks sum the gradients of all weights together, so a pass without images needs them, too, if
    another rank may have some.
    """
    tower = vision_tower(model)
    if tower is None or not torch.is_grad_enabled():
        return 0.0
    return sum((0 * p.flatten()[0] for p in tower.parameters() if p.requires_grad), 0.0)
