"""Advantages of whole rollouts, against others of the same prompt: the same at all their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.registry import advantage_estimator
from agentrl.trainer.batch import Batch


@advantage_estimator("grpo")
def grpo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """GRPO (arXiv:2402.03300, section 4.1.2): reward minus its group's mean, over its std.

    Without `norm_adv_by_std` it is Dr. GRPO's (arXiv:2503.20783), whose gradient in expectation is
    (n - 1) / n of the true one with `seq-mean-token-sum`: the mean holds the rollout's own reward.
    """
    rewards, group, train = batch.rewards, batch.group, batch.train
    return spread(batch, minus_mean(rewards[train], group[train], config.norm_adv_by_std)), None


@advantage_estimator("rloo")
def rloo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """RLOO (arXiv:2402.14740): reward minus the mean of the group's *other* rewards.

    Its gradient is unbiased with `seq-mean-token-sum`, on policy.
    """
    train = batch.train
    return spread(batch, minus_others_mean(batch.rewards[train], batch.group[train])), None


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """REINFORCE++ with a baseline (arXiv:2501.03262): reward minus its group's mean.

    What divides is the spread of the whole batch, not the group's: `whiten_advantages`, which the
    row of that name sets.
    """
    train = batch.train
    return spread(batch, minus_mean(batch.rewards[train], batch.group[train])), None


@advantage_estimator("remax")
def remax(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """ReMax (arXiv:2310.10505): reward minus that of the prompt's greedy rollout.

    Raises:
        ConfigError: the batch has no rewards of greedy rollouts.
    """
    if batch.baseline is None:
        raise ConfigError(
            "algorithm.adv_estimator=remax compares with a greedy rollout of each prompt, but none"
            " was played"
        )
    return spread(batch, (batch.rewards - batch.baseline)[batch.train]), None


def minus_mean(rewards: Tensor, group: Tensor, by_std: bool = False) -> Tensor:
    """Each reward minus the mean of its group.

    A group whose rewards are all equal, a group of one among them, gives exactly 0: nothing can be
    learned from it, and a mean that rounds must not say otherwise.

    Args:
        rewards: (R, ...), compared along the first dimension, of rollouts that survived and train.
        group: (R,) int64.
        by_std: divide by the group's standard deviation (unbiased, + 1e-6).

    Returns:
        (R, ...), in the dtype of the rewards.
    """
    advantages, count = _deviations(rewards, group)
    if by_std:
        squares = _sums(advantages.square(), group)
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std[group] + 1e-6)
    return advantages.to(rewards.dtype)


def minus_others_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """Each reward minus the mean of the *others* of its group, which its own does not move.

    Such a baseline leaves the expected gradient as it is. Equal rewards give exactly 0, and so does
    a group of one: it has nothing to compare with.

    Args:
        rewards: (R, ...), compared along the first dimension, of rollouts that survived and train.
        group: (R,) int64.

    Returns:
        (R, ...), in the dtype of the rewards.
    """
    advantages, count = _deviations(rewards, group)
    others = count / (count - 1).clamp(min=1)
    return (advantages * others[group]).to(rewards.dtype)


def _deviations(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(R, ...) float64 minus the mean, exactly 0 where a group's are equal; (G, 1...) its size."""
    flat = [-1] + [1] * (rewards.dim() - 1)
    count = torch.bincount(group).double().view(flat)
    wide = rewards.double()
    mean = _sums(wide, group) / count.clamp(min=1)
    index = group.view(flat).expand_as(wide)
    low = torch.zeros_like(mean).scatter_reduce(0, index, wide, "amin", include_self=False)
    high = torch.zeros_like(mean).scatter_reduce(0, index, wide, "amax", include_self=False)
    return torch.where((low == high)[group], 0.0, wide - mean[group]), count


def _sums(x: Tensor, group: Tensor) -> Tensor:
    """(G, ...) sums of (R, ...) over each group."""
    groups = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros(groups, *x.shape[1:]).index_add(0, group, x)


def spread(batch: Batch, advantages: Tensor) -> Tensor:
    """(B, T): to all tokens of a rollout what it has, to those that do not train 0.

    Args:
        batch: the step's rollouts.
        advantages: of those that train, in their order.
    """
    of_rollout = advantages.new_zeros(len(batch.rewards))
    of_rollout[batch.train] = advantages
    return torch.where(batch.action_mask, of_rollout[batch.rollout][:, None], 0.0)
