"""What an engine refuses before it does anything."""

from __future__ import annotations

from array import array

import numpy as np

from agentrl.engine.base import Sampling
from agentrl.errors import PromptTooLong, RequestRefused, UserError


def validate_row(
    token_ids: array[int], what: str, *, limit: int, max_length: int, vocabulary: int
) -> np.ndarray:
    """int32, a copy.

    Raises:
        PromptTooLong: more than `limit` tokens.
        RequestRefused: no tokens, or none of the vocabulary's.
    """
    row = np.array(token_ids, dtype=np.int32)
    if not 0 < len(row) <= limit:
        kind = PromptTooLong if len(row) else RequestRefused
        raise kind(
            f"{what}: {len(row)} tokens, but must be 1 to {limit}"
            f" (the model's longest row is {max_length})"
        )
    if row.min() < 0 or row.max() >= vocabulary:
        raise RequestRefused(
            f"{what}: token ids from {row.min()} to {row.max()}, but the model's vocabulary has"
            f" {vocabulary}"
        )
    return row


def check_sampling(sampling: Sampling, what: str) -> None:
    """Refuse what no turn can be sampled by.

    Raises:
        RequestRefused: no token may be sampled.
        UserError: `stop` is not a tuple of texts that hold something.
    """
    if sampling.max_tokens < 1:
        raise RequestRefused(f"{what}: max_tokens={sampling.max_tokens}, not >= 1")
    # Loops may pass anything; an empty text would end every turn, a bare one at any of its letters.
    if not isinstance(sampling.stop, tuple) or not all(
        isinstance(text, str) and text for text in sampling.stop
    ):
        raise UserError(
            f"{what}: stop={sampling.stop!r} must be a tuple of non-empty strings; () for none"
        )
