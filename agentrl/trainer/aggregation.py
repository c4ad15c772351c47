"""How the losses of tokens become one: the weight of each, with its mini-batch's denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.trainer.batch import Batch, mini_batch_of


def loss_weights(batch: Batch, mode: str, mini_batch_size: int, scale: int) -> Tensor:
    """What each token's loss is multiplied with, so that a mini-batch's loss is a plain sum.

    A sequence is a rollout with all its rows: to edit its history makes more rows of it, but no
    more of a rollout. Denominators are those of the whole mini-batch, and count what trains; so
    nothing depends on how rows are cut into micro-batches or spread over ranks.

    - token-mean: every token alike, so long rollouts count for more (DAPO, arXiv:2503.14476).
    - seq-mean-token-sum: the sum over a rollout's tokens, mean over rollouts: the policy gradient
      itself, with which the estimators that are unbiased stay so.
    - seq-mean-token-mean: the mean over a rollout's tokens, mean over rollouts: every rollout
      alike, so the tokens of long ones count for less (GRPO, arXiv:2402.03300, equation 3).
    - seq-mean-token-sum-norm: seq-mean-token-sum divided by `scale` (Dr. GRPO, arXiv:2503.20783):
      the size of a mean without its bias, since the divisor is the same for all.

    Args:
        batch: the step's rollouts.
        mode: `algorithm.loss_agg_mode`.
        mini_batch_size: `algorithm.mini_batch_size`, in rollouts.
        scale: of seq-mean-token-sum-norm, in tokens.

    Returns:
        (B, T), in the dtype of the rewards; 0 off `batch.action_mask`.
    """
    mask, rollout, count = batch.action_mask, batch.rollout, len(batch.rewards)
    step = mini_batch_of(count, mini_batch_size)  # (R,)
    tokens = torch.zeros(count, dtype=torch.int64).index_add(0, rollout, mask.sum(1))  # (R,)
    of_step = torch.zeros_like(tokens)
    rollouts = of_step.index_add(0, step, batch.train.long())[step]  # (R,), of its mini-batch
    divisors = {
        "token-mean": of_step.index_add(0, step, tokens)[step],
        "seq-mean-token-sum": rollouts,
        "seq-mean-token-mean": rollouts * tokens,
        "seq-mean-token-sum-norm": rollouts * scale,
    }
    weights = (1.0 / divisors[mode].clamp(min=1).double()).to(batch.rewards.dtype)
    return torch.where(mask, weights[rollout][:, None], 0.0)
