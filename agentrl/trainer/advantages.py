"""Advantages: how much better than expected. Pure functions of tensors (legend: `batch.py`)."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(rewards: Tensor, group: Tensor, norm_by_std: bool) -> Tensor:
    """Group-relative advantages: reward minus its group's mean (arXiv:2402.03300, section 4.1).

    A group whose rewards are all equal, a group of one among them, gives exactly 0: nothing can be
    learned from it, and a mean that rounds must not say otherwise.

    Args:
        rewards: (R,), of the rollouts that survived and train.
        group: (R,) int64.
        norm_by_std: divide by the group's standard deviation (unbiased, + 1e-6).

    Returns:
        (R,) advantages.
    """
    if not len(rewards):
        return rewards
    groups = int(group.max()) + 1
    wide = rewards.double()
    count = torch.bincount(group, minlength=groups).double()
    mean = wide.new_zeros(groups).index_add(0, group, wide) / count.clamp(min=1)
    advantages = wide - mean[group]
    if norm_by_std:
        squares = wide.new_zeros(groups).index_add(0, group, advantages.square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std[group] + 1e-6)
    low = rewards.new_zeros(groups).scatter_reduce(0, group, rewards, "amin", include_self=False)
    high = rewards.new_zeros(groups).scatter_reduce(0, group, rewards, "amax", include_self=False)
    return torch.where((low == high)[group], 0.0, advantages).to(rewards.dtype)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    rollout: Tensor,
    turn: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv:1506.02438) over the tokens the policy chose.

    The tokens in `mask`, across all rows of a rollout, are the steps of the decision process, in
    the order of their turns and, within a turn, of their places: so in time, whatever rows they
    stand in. The observations between two of them belong to the environment, take no time and are
    not read: any number of them, whatever values stand there, changes no bit of the result.

    Args:
        token_rewards: (B, T), each earned by choosing the token.
        values: (B, T), of the state before the token.
        mask: (B, T) bool.
        rollout: (B,) int64.
        turn: (B, T) int64, when each token was sampled: which of its rollout's turns did. Tokens
            of equal turns follow each other by row and column.
        gamma: discount per chosen token.
        lam: 0 is one-step temporal differences, 1 the whole return.
        bootstrap: (R,), the value of the state after a rollout's last token: 0 where it ended. A
            rollout that ran out of a budget and was scored has ended, too.

    Returns:
        advantages and returns, (B, T) each, 0 outside the mask.
    """
    row, column = mask.nonzero(as_tuple=True)
    order = turn[row, column].argsort(stable=True)
    order = order[rollout[row[order]].argsort(stable=True)]  # by rollout, then turn, then place
    row, column = row[order], column[order]
    owner = rollout[row]
    steps = torch.bincount(owner, minlength=len(bootstrap))
    first = steps.cumsum(0) - steps
    at = (owner, torch.arange(len(row), device=row.device) - first[owner])

    length = int(steps.max()) if len(row) else 0
    reward = token_rewards.new_zeros(len(bootstrap), length)
    reward[at] = token_rewards[row, column]
    # One column more: what comes after the last step. Past a rollout's end all is 0.
    value = values.new_zeros(len(bootstrap), length + 1)
    value[at] = values[row, column]
    value[torch.arange(len(bootstrap), device=row.device), steps] = bootstrap.to(value.dtype)
    running = torch.arange(length, device=row.device) < steps[:, None]

    advantage = torch.zeros_like(reward)
    carry = reward.new_zeros(len(bootstrap))
    for t in reversed(range(length)):
        delta = reward[:, t] + gamma * value[:, t + 1] - value[:, t]
        carry = torch.where(running[:, t], delta + gamma * lam * carry, 0.0)
        advantage[:, t] = carry

    advantages = torch.zeros_like(values)
    advantages[row, column] = advantage[at]
    returns = torch.zeros_like(values)
    returns[row, column] = advantage[at] + value[at]
    return advantages, returns


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the masked entries to mean 0 and (unbiased) variance 1; 0 elsewhere.

    One entry alone becomes 0, and equal entries do: there is no spread to scale by.

    Args:
        x: any shape; what stands outside the mask is not read.
        mask: bool, the same shape.
    """
    chosen = x[mask]
    if not len(chosen):
        return torch.zeros_like(x)
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / max(1, len(chosen) - 1)
    return torch.zeros_like(x).masked_scatter(mask, centred * (variance + 1e-8).rsqrt())
