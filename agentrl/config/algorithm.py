"""The algorithm, which turns rewards into a loss. The known algorithms are rows of one table."""

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
    "sapo": {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "dppo": {
        "policy_loss": "dppo",
        "clip_low": 0.15,
        "clip_high": 0.15,
        "norm_adv_by_std": False,
        "loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "maxrl": {"adv_estimator": "maxrl", "loss_agg_mode": "seq-mean-token-sum"},
    "rloo": {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"},
    "reinforce_plus_plus": {"adv_estimator": "reinforce_plus_plus", "whiten_advantages": True},
    "reinforce_plus_plus_baseline": {
        "adv_estimator": "reinforce_plus_plus_baseline",
        "whiten_advantages": True,
    },
    "remax": {"adv_estimator": "remax", "loss_agg_mode": "seq-mean-token-sum"},
    "turn_rloo": {"adv_estimator": "turn_rloo", "loss_agg_mode": "seq-mean-token-sum"},
    "opd": {"adv_estimator": "opd"},
}
"""The defaults that each name sets in the section `algorithm`; explicit keys override them."""


class AlgorithmConfig(Section):
    """The algorithm, which turns rewards into a loss. `name` sets the other keys' defaults."""

    name: Literal[
        "grpo", "ppo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "maxrl", "rloo",
        "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "turn_rloo", "opd",
    ] = "grpo"  # fmt: skip
    """The algorithm (docs/algorithms.md). It sets the defaults of the other keys."""
    adv_estimator: str = "grpo"
    """The advantage estimator: gae, grpo, maxrl, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, turn_rloo, opd, or a registered one."""
    policy_loss: str = "vanilla"
    """The policy loss: vanilla (PPO's), gspo, cispo, sapo, dppo, or a registered one."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
    ] = "token-mean"  # fmt: skip
    """How the losses of tokens are aggregated. A sequence is a rollout."""
    loss_scale: int = key(0, ge=0)
    """The divisor of seq-mean-token-sum-norm, in tokens. 0: rollout.max_trajectory_tokens."""
    gamma: float = key(1.0, ge=0, le=1)
    """Discount factor."""
    lam: float = key(1.0, ge=0, le=1)
    """GAE's lambda."""
    norm_adv_by_std: bool = True
    """Divide a group's advantages by their standard deviation."""
    whiten_advantages: bool = False
    """Normalize a batch's advantages to mean 0 and variance 1."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence to the reference policy. In the reward it is k1."""
    kl_loss_coef: float = key(0.0, ge=0)
    """Weight of the KL divergence in the loss. 0: off."""
    kl_reward_coef: float = key(0.0, ge=0)
    """Weight of the KL divergence in the reward. 0: off."""
    kl_target: float = key(0.0, ge=0)
    """Target of the KL divergence in nats per rollout, to which algorithm.kl_reward_coef is
    adapted. 0: off."""
    kl_horizon: int = key(10_000, ge=1)
    """With kl_target: the rollouts in which algorithm.kl_reward_coef changes by at most a fifth."""
    entropy_coef: float = key(0.0, ge=0)
    """Weight of the entropy bonus. 0: off."""
    clip_low: float = key(0.2, gt=0, le=1)
    """The importance ratio is clipped at 1 - clip_low. dppo: a token may lose this probability."""
    clip_high: float = key(0.2, gt=0)
    """The importance ratio is clipped at 1 + clip_high. dppo: a token may gain this probability."""
    dual_clip: float = key(0.0, allowed="0, or a number > 1", ge=0)
    """Upper bound of the importance ratio for tokens with a negative advantage (dppo: for all
    tokens). 0: off."""
    tau_pos: float = key(1.0, gt=0)
    """With sapo: the temperature of the gate for tokens with a positive advantage."""
    tau_neg: float = key(1.05, gt=0)
    """With sapo: the temperature of the gate for all other tokens."""
    value_clip: float = key(0.5, ge=0)
    """Maximum change of a value in one step. 0: no limit."""
    critic_warmup: int = key(0, ge=0)
    """Steps at the start in which only the critic is trained."""
    filter_groups: bool = False
    """Replace groups whose advantages are all 0 by groups of further rows (DAPO)."""
    max_gen_batches: int = key(4, ge=1)
    """With filter_groups: the most batches to play for one step, which then trains on the groups
    that it has."""
    tis_cap: float = key(2.0, allowed="0, or a number >= 1", ge=0)
    """Cap of the importance weights that correct for the engine's logprobs. 0: no weights."""
    tis_level: Literal["token", "sequence"] = "token"
    """token: a weight for each token. sequence: the product of a row's weights for all its tokens.
    """
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """truncate: a weight above the cap becomes the cap. mask: a weight above the cap or below
    tis_low becomes 0."""
    tis_low: float = key(0.0, ge=0, le=1)
    """With tis_mode=mask: the smallest weight that is kept. 0: 1 / tis_cap."""
    reject_band: list[float] = key([], allowed="[], or [low, high] with 0 < low < 1 < high")
    """Rows whose geometric mean of the ratios of trainer to engine is outside of this band are not
    trained on. []: all are."""
    ppo_epochs: int = key(1, ge=1)
    """Passes over each batch."""
    mini_batch_size: int = key(0, ge=0)
    """Rollouts per optimizer step. 0: the whole batch."""

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults_of_name(cls, keys: Any) -> Any:
        """Add the defaults that the algorithm's name sets to the explicit keys."""
        if not isinstance(keys, Mapping):
            return keys
        defaults = ALGORITHMS.get(str(keys.get("name", "grpo")), {})
        if keys.get("kl_reward_coef") and not keys.get("kl_loss_coef"):
            defaults = {**defaults, "kl_type": "k1"}
        return {**defaults, **keys}

    @property
    def weighs_tokens(self) -> bool:
        """True if tokens have weights that depend on the engine's logprobs."""
        return bool(self.tis_cap or self.reject_band)

    @property
    def critic(self) -> bool:
        """True if a critic is trained."""
        return self.adv_estimator == "gae"

    @property
    def critic_only_steps(self) -> int:
        """The number of steps at the start in which only the critic is trained."""
        return self.critic_warmup if self.critic else 0

    @field_validator("reject_band")
    @classmethod
    def _check_band(cls, band: list[float]) -> list[float]:
        if band and not (len(band) == 2 and 0 < band[0] < 1 < band[1]):
            raise ValueError
        return band

    @field_validator("tis_cap", "dual_clip")
    @classmethod
    def _check_bound(cls, bound: float, info: ValidationInfo) -> float:
        if 0 < bound < 1 or (bound == 1 and info.field_name == "dual_clip"):
            raise ValueError
        return bound
