"""Checks of requests that every engine makes first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.errors import ConfigError, PromptTooLong, RequestRefused, UserError
from agentrl.images import RowImage
from agentrl.plural import plural


def validate_row(
    token_ids: array[int], request: str, max_length: int, vocabulary: int, *, room: int = 1
) -> np.ndarray:
    """Check the token ids of a request; return a copy as int32.

    Args:
        token_ids: the row.
        request: the request, for messages.
        max_length: the longest row of the model.
        vocabulary: the number of tokens in the vocabulary.
        room: the number of tokens that must be left for the response.

    Raises:
        PromptTooLong: there are more than `max_length - room` tokens.
        RequestRefused: there are no tokens, or a token is not in the vocabulary.
    """
    row, limit = np.array(token_ids, dtype=np.int32), max_length - room
    if not 0 < len(row) <= limit:
        kind = PromptTooLong if len(row) else RequestRefused
        raise kind(
            f"{request}: {plural(len(row), 'token')}, but the number must be 1 to {limit}"
            f" (the longest row of the model is {max_length})"
        )
    if row.min() < 0 or row.max() >= vocabulary:
        raise RequestRefused(
            f"{request}: token ids from {row.min()} to {row.max()}, but the model's vocabulary has"
            f" {vocabulary} tokens"
        )
    return row


def image_starts(row: np.ndarray, images: Sequence[RowImage], request: str) -> list[int]:
    """Return where the placeholder tokens of each image begin in a row.

    Without images, a placeholder token is a token like the others.

    Args:
        row: the row.
        images: its images, in order.
        request: the request, for messages.

    Raises:
        RequestRefused: the row has not exactly the placeholder tokens of the images.
    """
    if not images:
        return []
    at = np.flatnonzero(row == images[0].token_id)
    ends = np.cumsum([image.tokens for image in images])
    if len(at) == ends[-1]:
        bounds = [0, *ends.tolist()]
        runs = [at[begin:end] for begin, end in pairwise(bounds)]
        if all(run[-1] - run[0] == len(run) - 1 for run in runs):
            return [int(run[0]) for run in runs]
    raise RequestRefused(
        f"{request}: {plural(len(images), 'image')} with {[i.tokens for i in images]} tokens, but"
        f" the row has {plural(len(at), 'placeholder token')} ({images[0].token_id}), or they are"
        " interrupted. A row in which the policy sampled one cannot be continued"
    )


def check_sampling(sampling: Sampling, request: str) -> None:
    """Check the sampling parameters of a turn.

    Raises:
        RequestRefused: `max_tokens` is below 1, or no token is dropped that could be returned.
        UserError: `stop` is not a tuple of non-empty strings.
    """
    if sampling.max_tokens < 1:
        raise RequestRefused(f"{request}: max_tokens={sampling.max_tokens}, but must be at least 1")
    if sampling.returns_kept and not (
        sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k)
    ):
        raise RequestRefused(
            f"{request}: returns_kept needs top_p < 1 or top_k, and no greedy turn"
        )
    # Agent loops may pass anything. An empty string would end every turn; a plain string would end
    # a turn at any of its letters.
    if not isinstance(sampling.stop, tuple) or not all(
        isinstance(text, str) and text for text in sampling.stop
    ):
        raise UserError(
            f"{request}: stop={sampling.stop!r} must be a tuple of non-empty strings; () for none"
        )


def check_image_servers(config: Config) -> None:
    """Check the servers of a model that reads images. They get whole weights, in 16 or 32 bits.

    Raises:
        ConfigError: a value of `rollout` is not supported with such models.
    """
    r, path = config.rollout, config.model.path
    if r.name == "vllm":
        raise ConfigError(
            f"rollout.name=vllm: {path} reads images, and agentrl sends no images to vLLM. Set"
            " rollout.name=sglang, or local for small models"
        )
    if r.lora == "adapter" and config.model.lora_rank:
        raise ConfigError(
            f"rollout.lora=adapter: {path} reads images, and servers take LoRA of such models"
            " merged into the weights alone. Set rollout.lora=auto"
        )
    if r.is_fp8:
        raise ConfigError(
            f"rollout.quantization=fp8: {path} reads images, and its vision tower has no 8-bit"
            " weights here. Set rollout.quantization=none"
        )
