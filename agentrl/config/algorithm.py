"""How rewards become a loss, and the algorithms of the field as rows of one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator, model_validator

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
    ] = key(
        "grpo", "a row of the table in docs/algorithms.md; the other keys override it"
    )  # fmt: skip
    adv_estimator: str = key(
        "grpo",
        "what a token is worth: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline,"
        " remax, turn_rloo, or one that a file registers",
    )
    policy_loss: str = key(
        "vanilla",
        "what is descended: vanilla (PPO's clip), gspo, cispo, or one that a file registers",
    )
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
    ] = key(
        "token-mean",
        "how the losses of tokens become one; a sequence is a rollout, however many rows it has",
    )  # fmt: skip
    loss_scale: int = key(
        0,
        "what seq-mean-token-sum-norm divides by, in tokens; 0: rollout.max_trajectory_tokens",
        ge=0,
    )
    gamma: float = key(1.0, "discount of later rewards", ge=0, le=1)
    lam: float = key(1.0, "GAE's lambda", ge=0, le=1)
    norm_adv_by_std: bool = key(True, "divide a group's advantages by their standard deviation")
    whiten_advantages: bool = key(
        False, "shift and scale the advantages of a batch's tokens to mean 0 and variance 1"
    )
    whiten_rewards: bool = key(
        False, "scale the rewards of a batch's tokens, a KL in them included, to variance 1"
    )
    kl_type: Literal["k1", "k2", "k3"] = key(
        "k3",
        "estimator of the KL to the reference; in the reward only k1, which is then the default",
    )
    kl_loss_coef: float = key(0.0, "weight of that KL in the loss; 0: off", ge=0)
    kl_reward_coef: float = key(0.0, "weight of that KL in the reward; 0: off", ge=0)
    kl_target: float = key(
        0.0,
        "the KL that the weight in the reward is steered to, in nats a rollout; 0: it is fixed",
        ge=0,
    )
    kl_horizon: int = key(10_000, "rollouts in which that weight changes by a fifth at most", ge=1)
    entropy_coef: float = key(0.0, "weight of the entropy bonus; 0: off", ge=0)
    clip_low: float = key(0.2, "the ratio is clipped at 1 - clip_low", gt=0, le=1)
    clip_high: float = key(0.2, "the ratio is clipped at 1 + clip_high", gt=0)
    dual_clip: float = key(
        0.0,
        "with a negative advantage the ratio counts at most so much; 0: off",
        allowed="0, or a number > 1",
        ge=0,
    )
    value_clip: float = key(
        0.5, "the critic may move by so much in a step; 0: as far as it likes", ge=0
    )
    critic_warmup: int = key(0, "steps at the start in which only the critic learns", ge=0)
    filter_groups: bool = key(
        False,
        "groups whose advantages are all 0 are replaced by those of rows further on, played in the"
        " same step",
    )
    max_gen_batches: int = key(
        4, "with filter_groups: play at most so many times; then train on what there is", ge=1
    )
    tis_cap: float = key(
        2.0,
        "cap of the weights that make up for engine and trainer computing different"
        " probabilities; 0: no weights",
        allowed="0, or a number >= 1",
        ge=0,
    )
    tis_level: Literal["token", "sequence"] = key(
        "token",
        "token: each has a weight of its own; sequence: all of a row have the product of theirs",
    )
    tis_mode: Literal["truncate", "mask"] = key(
        "truncate",
        "truncate: a weight beyond the cap is the cap; mask: one beyond it or below its reciprocal"
        " is 0",
    )
    ppo_epochs: int = key(1, "passes over a batch", ge=1)
    mini_batch_size: int = key(0, "rollouts an optimizer step; 0: the whole batch", ge=0)

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

    @field_validator("tis_cap")
    @classmethod
    def _no_shrinking(cls, cap: float) -> float:
        if 0 < cap < 1:
            raise ValueError
        return cap

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, bound: float) -> float:
        if 0 < bound <= 1:
            raise ValueError
        return bound
