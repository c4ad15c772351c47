"""Losses per token: pure functions, elementwise, of tensors of one shape, usually (N,).

They are not aggregated here: `Targets.weights` does that. They take chosen tokens only, so what
stands at other positions, were it NaN, cannot reach a loss or a gradient.
"""

from __future__ import annotations

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


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """How much likelier each token is to the trainer than to the engine that sampled it, capped.

    Multiplies the policy loss, so that tokens drawn from a slightly different policy count for what
    they are; capped on the ratio itself, never on its logarithm, and carrying no gradient.
    """
    return ratio(old_logprobs, rollout_logprobs).clamp(max=cap).detach()


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
