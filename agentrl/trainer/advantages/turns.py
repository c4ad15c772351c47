"""Advantages of turns: what a rollout earned from a turn on, against others at the same turn."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.registry import advantage_estimator
from agentrl.trainer.advantages.groups import minus_others_mean
from agentrl.trainer.batch import Batch


@advantage_estimator("turn_rloo")
def turn_rloo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Reward-to-go minus the mean of the group's other rollouts at the same turn index.

    RLOO (arXiv:2402.14740) turn by turn: all tokens of a turn have the advantage of what was earned
    in it and after it, so that no turn answers for what an earlier one earned. A rollout that had
    ended before a turn counts there with a reward-to-go of 0, for that is what it earned from then
    on; to leave it out and to give the last one standing the advantage 0 biases the gradient.

    The baseline knows nothing of the rollout that it is for, so the expected gradient is the true
    one: with `seq-mean-token-sum`, on policy. It is no longer with division by a standard
    deviation, whitening, a mean over tokens, or clipping that takes effect. A turn is what the
    policy took between two observations, in the order in which they were taken (`Batch.turn`).
    """
    mask, train = batch.action_mask, batch.train
    to_go = rewards_to_go(batch, token_rewards)
    advantages = torch.zeros_like(to_go)
    advantages[train] = minus_others_mean(to_go[train], batch.group[train])
    row, column = mask.nonzero(as_tuple=True)
    found = torch.zeros_like(token_rewards)
    found[row, column] = advantages[batch.rollout[row], _turn(batch, mask)].to(found.dtype)
    return found, None


def rewards_to_go(batch: Batch, token_rewards: Tensor) -> Tensor:
    """What each rollout earned in a turn and all that follow.

    Args:
        batch: the step's rollouts.
        token_rewards: (B, T).

    Returns:
        (R, K) float64, K being the most turns of a rollout; 0 where it had ended.
    """
    mask = batch.response_mask
    owner = batch.rollout[mask.nonzero(as_tuple=True)[0]]
    turn = _turn(batch, mask)
    turns = int(turn.max()) + 1 if len(turn) else 0
    earned = torch.zeros(len(batch.rewards) * turns, dtype=torch.float64)
    earned.index_add_(0, owner * turns + turn, token_rewards[mask].double())
    return earned.view(len(batch.rewards), turns).flip(1).cumsum(1).flip(1)


def _turn(batch: Batch, mask: Tensor) -> Tensor:
    """(N,) the turn of each token in the mask; all in the first where a rollout names none."""
    return batch.turn[mask].clamp(min=0)
