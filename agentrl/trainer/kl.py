"""Estimators of KL(policy || reference) from single tokens (joschu.net/blog/kl-approx.html).

A good estimate of the value need not have a good gradient. In expectation over tokens drawn from
the policy itself, the gradient of each, used as a loss, is:

    k1    0: it pulls nowhere, it only adds noise
    k2    the gradient of KL(policy || reference), exactly
    k3    the gradient of KL(reference || policy): close to k2's while the two are close

Subtracted from the reward (`algorithm.kl_reward_coef`), where no gradient flows through the
estimate, it is the value that counts: k1 and k3 are unbiased, and k1 there optimises
KL(policy || reference) exactly.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from agentrl.trainer.losses import LOG_RATIO_LIMIT


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(pi/ref). Value: unbiased, may be negative. As a loss: expected gradient 0."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(pi/ref)^2 / 2. Value: biased, low variance. As a loss: the gradient of KL(pi || ref)."""
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi). Value: unbiased, >= 0. As a loss: the gradient of KL(ref || pi)."""
    log_ratio = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By their name in `algorithm.kl_type`."""
