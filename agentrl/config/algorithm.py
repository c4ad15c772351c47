"""How rewards become a loss, and the algorithms of the field as rows of one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from agentrl.config.section import Section, key

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"adv_estimator": "gae", "whiten_advantages": True},
    "dr_grpo": {"norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "dapo": {"clip_high": 0.28, "filter_groups": True},
    "gspo": {
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "rloo": {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"},
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus", "whiten_advantages": True},
    "reinforce_plus_plus_baseline": {
        "adv_estimator": "reinforce_plus_plus_baseline",
        "whiten_advantages": True,
    },
    "remax": {"adv_estimator": "remax", "loss_agg_mode": "seq-mean-token-sum"},
    "turn_rloo": {"adv_estimator": "turn_rloo", "loss_agg_mode": "seq-mean-token-sum"},
}
"""What each name sets of the section `algorithm`; keys that are given win."""


class AlgorithmConfig(Section):
    """How rewards become a loss. `name` sets the other keys' defaults."""

    name: Literal[
        "grpo", "ppo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "remax", "turn_rloo",
    ] = "grpo"  # fmt: skip
    """a row of the table in docs/algorithms.md; the other keys override it"""
    adv_estimator: str = "grpo"
    """what a token is worth: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline,
    remax, turn_rloo, or one that a file registers"""
    policy_loss: str = "vanilla"
    """what is descended: vanilla (PPO's clip), gspo, cispo, or one that a file registers"""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
    ] = "token-mean"  # fmt: skip
    """how the losses of tokens become one; a sequence is a rollout, however many rows it has"""
    loss_scale: int = key(0, ge=0)
    """what seq-mean-token-sum-norm divides by, in tokens; 0: rollout.max_trajectory_tokens"""
    gamma: float = key(1.0, ge=0, le=1)
    """discount of later rewards"""
    lam: float = key(1.0, ge=0, le=1)
    """GAE's lambda"""
    norm_adv_by_std: bool = True
    """divide a group's advantages by their standard deviation"""
    whiten_advantages: bool = False
    """shift and scale the advantages of a batch's tokens to mean 0 and variance 1"""
    whiten_rewards: bool = False
    """scale the rewards of a batch's tokens, a KL in them included, to variance 1"""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """estimator of the KL to the reference; in the reward only k1, which is then the default"""
    kl_loss_coef: float = key(0.0, ge=0)
    """weight of that KL in the loss; 0: off"""
    kl_reward_coef: float = key(0.0, ge=0)
    """weight of that KL in the reward; 0: off"""
    kl_target: float = key(0.0, ge=0)
    """the KL that the weight in the reward is steered to, in nats a rollout; 0: it is fixed"""
    kl_horizon: int = key(10_000, ge=1)
    """rollouts in which that weight changes by a fifth at most"""
    entropy_coef: float = key(0.0, ge=0)
    """weight of the entropy bonus; 0: off"""
    clip_low: float = key(0.2, gt=0, le=1)
    """the ratio is clipped at 1 - clip_low"""
    clip_high: float = key(0.2, gt=0)
    """the ratio is clipped at 1 + clip_high"""
    dual_clip: float = key(0.0, allowed="0, or a number > 1", ge=0)
    """with a negative advantage the ratio counts at most so much; 0: off"""
    value_clip: float = key(0.5, ge=0)
    """the critic may move by so much in a step; 0: as far as it likes"""
    critic_warmup: int = key(0, ge=0)
    """steps at the start in which only the critic learns"""
    filter_groups: bool = False
    """groups whose advantages are all 0 are replaced by those of rows further on, played in the
    same step"""
    max_gen_batches: int = key(4, ge=1)
    """with filter_groups: play at most so many times; then train on what there is"""
    tis_cap: float = key(2.0, allowed="0, or a number >= 1", ge=0)
    """cap of the weights that make up for engine and trainer computing different probabilities; 0:
    no weights"""
    tis_level: Literal["token", "sequence"] = "token"
    """token: each has a weight of its own; sequence: all of a row have the product of theirs"""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """truncate: a weight beyond the cap is the cap; mask: one beyond it or below its reciprocal is
    0"""
    ppo_epochs: int = key(1, ge=1)
    """passes over a batch"""
    mini_batch_size: int = key(0, ge=0)
    """rollouts an optimizer step; 0: the whole batch"""

    @model_validator(mode="before")
    @classmethod
    def _row_of_the_table(cls, given: Any) -> Any:
        """Below what is given lies what the algorithm's name sets."""
        if not isinstance(given, Mapping):
            return given
        row = ALGORITHMS.get(str(given.get("name", "grpo")), {})
        only_paid = given.get("kl_reward_coef") and not given.get("kl_loss_coef")
        paid = {"kl_type": "k1"} if only_paid else {}
        return {**row, **paid, **given}

    @property
    def critic(self) -> bool:
        """Whether a critic learns."""
        return self.adv_estimator == "gae"

    @property
    def alone(self) -> int:
        """Steps at the start in which the critic learns alone."""
        return self.critic_warmup if self.critic else 0

    @field_validator("tis_cap", "dual_clip")
    @classmethod
    def _off_or_from_1(cls, bound: float, info: ValidationInfo) -> float:
        if 0 < bound < 1 or (bound == 1 and info.field_name == "dual_clip"):
            raise ValueError
        return bound
