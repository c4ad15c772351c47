"""Advantages: how much better than expected. Pure functions of tensors (legend: `batch.py`).

An estimator is registered by name (`agentrl.advantage_estimator`) and chosen by
`algorithm.adv_estimator`:

    f(batch, token_rewards, values, config) -> (advantages, returns)

- batch: the step's rollouts. What they earned, `rewards` (R,) and `token_rewards` (B, T), is net of
  the KL penalty and scaled where the config says so.
- token_rewards: (B, T), those of the batch: what each chosen token earned, 0 elsewhere.
- values: (B, T) of the state before each chosen token; None where no critic learns.
- config: the section `algorithm`.
- advantages: (B, T), in the dtype of the rewards; what stands outside `batch.action_mask` is never
  read.
- returns: (B, T) the critic should learn, or None.

The steps of the decision process are the tokens that the policy chose. What stands between them was
observed: here no estimator reads it, so that no number and no content of such tokens changes a bit
of an advantage. Sums are taken in the order of the chosen tokens for that reason: a sum over a
padded row rounds as its width has it.

Baselines count rollouts, never rows, and only those that survived and train.
"""

from agentrl.trainer.advantages.groups import (
    grpo,
    minus_mean,
    minus_others_mean,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from agentrl.trainer.advantages.returns import gae, generalized_advantages, reinforce_plus_plus
from agentrl.trainer.advantages.scale import unit_variance, whiten
from agentrl.trainer.advantages.turns import rewards_to_go, turn_rloo
from agentrl.trainer.batch import dead_groups

__all__ = [
    "dead_groups",
    "gae",
    "generalized_advantages",
    "grpo",
    "minus_mean",
    "minus_others_mean",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rewards_to_go",
    "rloo",
    "turn_rloo",
    "unit_variance",
    "whiten",
]
