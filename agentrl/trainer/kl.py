"""KL(policy || reference) from single tokens, and its weight in the reward.

The estimators are John Schulman's (joschu.net/blog/kl-approx.html). A good estimate of the value
need not have a good gradient: what is optimised depends on the place it is put in. In expectation
over what the policy itself samples:

    k1 in the loss      nothing: its gradient is 0, it only adds noise
    k2 in the loss      KL(policy || reference) of each token, the states before it held fixed
    k3 in the loss      KL(reference || policy) of each token, the states before it held fixed
    k1 in the reward    KL(policy || reference) of the whole sequence, where a token answers for
                        its own and all that come after it (reward-to-go); where it answers for its
                        own alone, the same as k2 in the loss
    k2, k3 in the reward    no KL: only their values estimate one, k3's without bias

"States held fixed" means that a token pays for how far it is from the reference itself, and not for
leading to where the two are further apart: only k1 in the reward counts that. The KL of the whole
rollout in place of the reward-to-go serves as well: what came before a token changes nothing in
expectation. GAE gives the reward-to-go at gamma = lam = 1.

Tokens that another policy sampled (an engine's arithmetic, an earlier mini-batch) give these
gradients when each is weighted by policy / sampler, the weight without a gradient: in the loss the
token's own ratio is exact for its state, and the whole row's for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.errors import RunStopped
from agentrl.trainer.losses import LOG_RATIO_LIMIT


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(pi/ref). Unbiased, may be negative.

    In the loss its expected gradient is 0. In the reward, with reward-to-go, it optimises the
    sequence's KL(pi || ref): the only one of the three that does.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(pi/ref)^2 / 2. Biased, of low variance.

    In the loss it optimises each token's KL(pi || ref), with the states before it held fixed. In
    the reward it optimises no KL.
    """
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi). Unbiased, never negative.

    In the loss it optimises each token's KL(ref || pi), the other direction, with the states before
    it held fixed: close to k2 while the two policies are. In the reward it optimises no KL.
    """
    log_ratio = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By their name in `algorithm.kl_type`."""

MOST_ERROR = 0.2
"""However far the KL is from its target, the weight moves as if it were so far, in shares of it."""


class KLController:
    """The weight of the KL in the reward: fixed, or steered so that the KL stays at a target.

    Steered as in arXiv:1909.08593, section 2.2: too much KL makes the weight grow, too little makes
    it shrink, by a fifth at most in `kl_horizon` rollouts.
    """

    def __init__(self, config: AlgorithmConfig):
        """Begin at `kl_reward_coef`.

        Args:
            config: the section `algorithm`; with `kl_target` 0 the weight is fixed.
        """
        self.coef = config.kl_reward_coef
        self.target = config.kl_target
        self.horizon = config.kl_horizon

    def update(self, kl: float, rollouts: int) -> None:
        """Steer for the next step.

        Args:
            kl: of the step, in nats a rollout: the sum over a rollout's chosen tokens, averaged
                over rollouts. The sum is what the paper steers by; it grows with their length.
            rollouts: how many that were.

        Raises:
            RunStopped: a KL that is no finite number: the reference or the policy is broken.
        """
        if not math.isfinite(kl):
            raise RunStopped(f"the KL to the reference is {kl}: one of the two models is broken")
        if self.target:
            error = min(max(kl / self.target - 1, -MOST_ERROR), MOST_ERROR)
            self.coef *= 1 + error * rollouts / self.horizon

    @property
    def state(self) -> float:
        """All that `load` needs to go on from here."""
        return self.coef

    def load(self, state: float) -> None:
        """Go on from what `state` was; a fixed weight stays the config's."""
        if self.target:
            self.coef = state
