"""Algorithms as rows of one table: what each needs, and how it makes targets of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.trainer.advantages import gae, grpo, whiten
from agentrl.trainer.batch import Batch, Targets, mini_batch_of
from agentrl.trainer.kl import ESTIMATORS

Estimate = Callable[[Batch, AlgorithmConfig, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(batch, config, token penalties (B, T), values (B, T)) -> advantages and returns, (B, T)."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table."""

    name: str
    critic: bool
    """Whether it learns and needs a critic's values."""
    estimate: Estimate

    def targets(
        self,
        batch: Batch,
        config: AlgorithmConfig,
        old_logprobs: Tensor | None,
        values: Tensor | None,
        reference_logprobs: Tensor | None,
    ) -> Targets:
        """All that the loss needs of a batch.

        Args:
            batch: the step's rollouts.
            config: the section `algorithm`.
            old_logprobs: (B, T) at the start of the step; wanted for a KL in the reward, and where
                the step takes several mini-batches.
            values: (B, T) at the start of the step, for an algorithm with a critic.
            reference_logprobs: (B, T), wanted where a KL coefficient is above 0.
        """
        mask = batch.action_mask
        penalty = torch.zeros_like(batch.token_rewards)
        if config.kl_reward_coef:
            assert old_logprobs is not None and reference_logprobs is not None
            estimate = ESTIMATORS[config.kl_type]
            kl = estimate(old_logprobs[mask], reference_logprobs[mask])
            penalty[mask] = config.kl_reward_coef * kl
        advantages, returns = self.estimate(batch, config, penalty, values)
        return Targets(
            advantages=advantages,
            weights=token_mean(batch, config.mini_batch_size),
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs if config.kl_loss_coef else None,
            returns=returns,
            values=values,
        )


def token_mean(batch: Batch, mini_batch_size: int) -> Tensor:
    """(B, T) weights with which every token of a mini-batch counts alike: 1 / its chosen tokens."""
    mask = batch.action_mask
    mini_batch = mini_batch_of(len(batch.rewards), mini_batch_size)[batch.rollout]
    tokens = torch.zeros(int(mini_batch.max()) + 1).index_add(0, mini_batch, mask.sum(1).float())
    return mask / tokens.clamp(min=1)[mini_batch][:, None]


def _group_relative(
    batch: Batch, config: AlgorithmConfig, penalty: Tensor, values: Tensor | None
) -> tuple[Tensor, None]:
    """One advantage per rollout, the same at all its tokens.

    A KL in the reward is summed over the rollout's tokens and taken off its reward before the
    group's baseline, as it would be were it a grader's doing.
    """
    rewards = batch.rewards.index_add(0, batch.rollout, penalty.sum(1), alpha=-1)
    train = batch.train
    advantages = torch.zeros_like(rewards)
    advantages[train] = grpo(rewards[train], batch.group[train], config.norm_adv_by_std)
    return torch.where(batch.action_mask, advantages[batch.rollout][:, None], 0.0), None


def _critic_based(
    batch: Batch, config: AlgorithmConfig, penalty: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor]:
    """GAE over each rollout's chosen tokens in the order of its turns, whitened over the batch.

    Every rollout here was scored, so its last token ends it: nothing is bootstrapped.
    """
    assert values is not None
    mask, ended = batch.action_mask, torch.zeros_like(batch.rewards)
    advantages, returns = gae(
        batch.token_rewards - penalty,
        values,
        mask,
        batch.rollout,
        batch.turn,
        config.gamma,
        config.lam,
        bootstrap=ended,
    )
    return whiten(advantages, mask), returns


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm("grpo", critic=False, estimate=_group_relative),
    "ppo": Algorithm("ppo", critic=True, estimate=_critic_based),
}
"""By their name in `algorithm.name`."""
