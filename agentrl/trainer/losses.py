"""Losses per token: pure functions, elementwise, of tensors of one shape, usually (N,).

They are not aggregated here: `Targets.weights` does that. They take chosen tokens only, so what
stands at other positions, were it NaN, cannot reach a loss or a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond it mean a broken pair of policies; exp() of them would only overflow."""


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi(a|s) / pi_old(a|s) for each chosen token."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7), negated; two clips as in DAPO.

    Args:
        logprobs: of the chosen tokens, now; the only input with a gradient.
        old_logprobs: the same at the start of the step.
        advantages: of the chosen tokens.
        clip_low: no gain from pushing the ratio below 1 - clip_low.
        clip_high: no gain from pushing it above 1 + clip_high.

    Returns:
        the loss of each token, and whether (bool) its ratio is clipped.
    """
    r = ratio(logprobs, old_logprobs)
    free = -advantages * r
    clipped = -advantages * r.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, clipped), clipped > free


def importance_ratios(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor | None = None
) -> Tensor:
    """How much likelier what was sampled is to the trainer than to the engine that sampled it.

    Args:
        old_logprobs: (N,) the trainer's, at the start of the step.
        rollout_logprobs: (N,) the engine's.
        mask: (b, T) bool with N True, where the tokens stand in their rows: then all tokens of a
            row have the ratio of the whole row, the product of theirs. None: each has its own.

    Returns:
        (N,) without a gradient.
    """
    gaps = (old_logprobs - rollout_logprobs).detach()
    if mask is not None:
        # Laid out as rows, and not added by index: that has no fixed order on a GPU.
        mask = mask.to(gaps.device)
        rows = gaps.new_zeros(mask.shape).masked_scatter(mask, gaps)
        gaps = rows.sum(1, keepdim=True).expand(mask.shape)[mask]
    return gaps.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(ratios: Tensor, cap: float, mode: Literal["truncate", "mask"]) -> Tensor:
    """What multiplies the policy loss, so that each token counts for what the trainer holds of it.

    Uncapped they make the expected gradient that of the trainer's own policy, whoever sampled;
    the cap trades some of that for less variance. It is on the ratio itself, never on its
    logarithm. The loss's denominators stay as they are: a masked token counts as one that taught
    nothing, so that what remains weighs no more than it did.

    Args:
        ratios: of `importance_ratios`.
        cap: at least 1.
        mode: truncate: a ratio beyond the cap becomes the cap. mask: one beyond it or below its
            reciprocal becomes 0, all others stay.
    """
    if mode == "mask":
        return torch.where((ratios > cap) | (ratios < 1 / cap), 0.0, ratios)
    return ratios.clamp(max=cap)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the critic, which may move by at most `clip` in a step.

    Args:
        values: the critic's, now; the only input with a gradient.
        old_values: the critic's at the start of the step.
        returns: what it should say.
        clip: the larger of the free and the clipped error counts (OpenAI baselines, PPO2).

    Returns:
        the loss of each token, and whether (bool) it is clipped.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free
