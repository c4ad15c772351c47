"""Losses and weights of tokens, as pure functions.

A policy loss gets the tokens that the policy chose, laid out as rows, and nothing else:

    f(logprobs, old_logprobs, advantages, mask, config) -> (loss, counts)

The tensors have shape (b, A): A is the largest number of chosen tokens of a row, and `mask` is True
where there is a token. Values elsewhere, even NaN, must affect neither the loss nor a gradient. A
row is one segment: the whole rollout, unless its history was edited.

- logprobs: of the chosen tokens, now; the only input with a gradient.
- old_logprobs: the trainer's at the start of the step.
- advantages: of the chosen tokens; they may differ within a row.
- config: the section `algorithm`.
- loss: of each token, 0 where there is none. It is not aggregated; `Targets.weights` do that.
- counts: metric -> (b, A), reported as its mean over tokens. If `pg_clipfrac` is a bool tensor, the
  run also stores for each token in how many passes it was clipped (`clipped_tokens`).

A policy loss is not called for an empty micro-batch, which a rank runs to stay in step with the
others.

`gspo` uses the whole row. All others are elementwise: the loss of a token depends on that token
alone.

On the first pass, where both logprobs are equal, the gradient of all of them is that of the plain
policy gradient: minus the advantage, for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.errors import UserCodeError, is_own_error
from agentrl.registry import policy_loss, policy_losses

Loss = tuple[Tensor, dict[str, Tensor]]

LOG_RATIO_LIMIT = 20.0
"""Larger log-ratios mean that the two policies do not belong together; their exp() would overflow.
"""


def ratio(log_ratios: Tensor) -> Tensor:
    """Return the exp of log-ratios of any shape, clamped so that it stays finite."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@policy_loss("vanilla")
def vanilla(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """Return PPO's clipped surrogate (arXiv:1707.06347, equation 7), negated; elementwise.

    The clip has two limits, as in DAPO (arXiv:2503.14476): `clip_low` and `clip_high`. `dual_clip`
    adds a limit for negative advantages (arXiv:1912.09729). Without `dual_clip` their ratio is
    unbounded, and a token that has become many times more likely could outweigh all others.

    Returns:
        The losses, and counts: `pg_clipfrac`, the share of tokens without a gradient because of the
            clip, and with `dual_clip` also `pg_clipfrac_lower`, that of the other clip.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    return _clipped_surrogate(ratio(logprobs - old_logprobs), advantages, config)


@policy_loss("gspo")
def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """Return GSPO's surrogate (arXiv:2507.18071): one ratio for the whole row; not elementwise.

    The ratio of a row is exp of the mean log-ratio of its chosen tokens (equation 7). It is clipped
    as a whole: either all tokens of a row with one advantage have a gradient or none has. The
    useful clip limits are about a thousand times smaller than PPO's. Each token has the value of
    this ratio and the gradient of its own logprob (GSPO-token, equations 13 and 14), so the tokens
    of a row may have different advantages. With one advantage per row, one row per rollout and
    seq-mean-token-mean, loss and gradient are those of equation 5. `dual_clip` bounds this ratio as
    it bounds PPO's.

    Returns:
        The losses, and the counts of `vanilla`.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    mean = (logprobs - old_logprobs).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return _clipped_surrogate(ratio(mean.detach()) * _ones(logprobs), advantages, config)


@policy_loss("cispo")
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """Return CISPO's loss (arXiv:2506.13585, equations 4, 5): a clipped weight; elementwise.

    It is REINFORCE's loss with a weight: -w A log pi, where w is the ratio, clipped to
    [1 - clip_low, 1 + clip_high] and without a gradient. A clipped token still trains, with a
    bounded weight. With `clip_low` 1 there is no lower bound, as in the paper's runs. Only the
    gradient of this loss has a meaning; its value has none.

    Returns:
        The losses, and counts: `pg_clipfrac`, the share of tokens with a clipped weight.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    unclipped = ratio(logprobs - old_logprobs).detach()
    weight = unclipped.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * advantages * logprobs, {"pg_clipfrac": weight != unclipped}


@policy_loss("sapo")
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """Return SAPO's loss (arXiv:2511.20347, equations 5 and 6): a soft gate; elementwise.

    The loss is -A f(r), where f(r) = sigmoid(tau (r - 1)) * 4 / tau. `tau_pos` is the temperature
    of a positive advantage, `tau_neg` that of all others. The gate's slope is 1 at r = 1 and
    decreases smoothly in both directions, so no token is clipped.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    tau = torch.full_like(advantages, config.tau_neg)
    tau = tau.masked_fill(advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio(logprobs - old_logprobs) - 1)) * 4 / tau
    return -gate * advantages, {}


@policy_loss("dppo")
def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """Return DPPO's loss with the binary total variation (arXiv:2602.04879); elementwise.

    The loss is -r A, without a gradient for a token whose probability has moved too far in the
    direction of its advantage: by more than `clip_high` upwards, by more than `clip_low` downwards.
    The paper compares with the policy that sampled the token, this loss with the policy at the
    start of the step, as verl's `dppo_tv` does: the engine is corrected for separately. `dual_clip`
    is an upper bound of r for all tokens.

    Returns:
        The losses, and counts: `pg_clipfrac`, the share of tokens without a gradient, and with
            `dual_clip` also `pg_clipfrac_lower`, that of the other tokens whose r is bounded.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    moved = (logprobs.exp() - old_logprobs.exp()).detach()
    is_far = torch.where(advantages > 0, moved > config.clip_high, moved < -config.clip_low)
    weight, counts = ratio(logprobs - old_logprobs).detach(), {"pg_clipfrac": is_far}
    if config.dual_clip:
        counts["pg_clipfrac_lower"] = ~is_far & (weight > config.dual_clip)
        weight = weight.clamp(max=config.dual_clip)
    return torch.where(is_far, 0.0, -weight * advantages * _ones(logprobs)), counts


def _zero_unmasked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with 0 outside of the mask. A product would keep NaN: 0 * NaN is NaN."""
    return tuple(torch.where(mask, x, 0.0) for x in tensors)


def _ones(logprobs: Tensor) -> Tensor:
    """Return 1 for each token, with the gradient of its logprob."""
    return (logprobs - logprobs.detach()).exp()


def _clipped_surrogate(ratios: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Loss:
    """Return PPO's loss and counts for ratios (b, A) of any kind."""
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss, counts = torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped}
    if config.dual_clip:
        limit = -advantages * config.dual_clip
        is_limited = (advantages < 0) & (loss > limit)
        loss, counts["pg_clipfrac_lower"] = torch.where(is_limited, limit, loss), is_limited
    return loss, counts


RESERVED = ("tokens", "loss", "entropy", "ppo_kl", "pg_loss", "kl_loss", "grad_norm", "lr")
"""Metrics that the learner computes itself."""


def token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """Return the losses and counts of the policy loss that `config.policy_loss` names; all (b, A).

    Raises:
        RegistryError: there is no such loss.
        UserCodeError: the loss raised, or returned something else than a policy loss must return.
    """
    name = config.policy_loss
    function = policy_losses.get(name)
    if not mask.numel():
        # This rank has no rows. The result has a gradient, since the ranks sum theirs. A user's
        # function need not support micro-batches without tokens.
        return 0.0 * logprobs, {}
    try:
        returned = function(logprobs, old_logprobs, advantages, mask, config)
    except Exception as e:
        if is_own_error(e) or name in policy_losses.shipped:
            raise
        raise UserCodeError.of(f"the policy loss {name!r}", e) from e

    def refuse(wrong: str) -> UserCodeError:
        return UserCodeError(
            f"the policy loss {name!r} returned {wrong}. It must return (loss, counts): a loss for"
            f" each token, not aggregated, (b, A), here {tuple(mask.shape)}; and a mapping from"
            " names of metrics to (b, A), {} for none"
        )

    if not isinstance(returned, tuple) or len(returned) != 2:
        raise refuse(f"{describe_value(returned)} instead of a pair")
    loss, counts = returned
    if not isinstance(loss, Tensor) or loss.shape != mask.shape:
        raise refuse(f"{describe_value(loss)} for the loss")
    if not isinstance(counts, Mapping):
        raise refuse(f"{describe_value(counts)} for the counts")
    for metric, count in counts.items():
        if metric in RESERVED:
            raise refuse(f"a count named {metric!r}, which is a metric of the learner")
        if not isinstance(count, Tensor) or count.shape != mask.shape:
            raise refuse(f"{describe_value(count)} for the count {metric!r}")
    is_only_term = not (config.kl_loss_coef or config.entropy_coef)
    if is_only_term and logprobs.requires_grad and not loss.requires_grad:
        raise refuse("a loss that does not depend on `logprobs`, so it has no gradient")
    return loss, dict(counts)


def clipped_tokens(counts: Mapping[str, Tensor]) -> Tensor | None:
    """Return whether each token was clipped, (b, A) bool; None if the loss does not report it.

    A token was clipped if the count `pg_clipfrac` or `pg_clipfrac_lower` is True there. Counts that
    are not bool may be shares of a row or a micro-batch, so they say nothing about a token.

    Args:
        counts: those that `token_losses` returned.
    """
    flags = [counts[name] for name in ("pg_clipfrac", "pg_clipfrac_lower") if name in counts]
    if "pg_clipfrac" not in counts or any(flag.dtype != torch.bool for flag in flags):
        return None
    return torch.stack(flags).any(0)


def describe_value(thing: object) -> str:
    """Describe a returned value for a message: `a tensor of shape (2, 3)`, `a tuple of 3`."""
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    size = f" of {len(thing)}" if isinstance(thing, tuple | list) else ""
    return f"a {type(thing).__name__}{size}" if thing is not None else "None"


# --- importance weights: engine against trainer --------------------------------------------------


def importance_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"],
) -> Tensor:
    """Return the ratio of the trainer's to the engine's probability of the sampled tokens.

    Args:
        old_logprobs: (b, A) the trainer's, at the start of the step.
        rollout_logprobs: (b, A) the engine's.
        mask: (b, A) bool, True for chosen tokens.
        level: token: each token has its own ratio. sequence: all tokens of a row have the product
            of their ratios. Over several turns only the latter is exact.

    Returns:
        (b, A) without a gradient; 1 outside of the mask.
    """
    gaps = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if level == "sequence":
        gaps = torch.where(mask, gaps.sum(1, keepdim=True), 0.0)
    return ratio(gaps)


def importance_weights(
    ratios: Tensor, cap: float, mode: Literal["truncate", "mask"], low: float = 0.0
) -> Tensor:
    """Return the factors of the policy loss that correct for sampling by the engine.

    Without a cap the expected gradient is that of the trainer's own policy. The cap accepts some
    bias for less variance. It bounds the ratio itself, not its logarithm. The denominators of the
    loss do not change: a masked token counts as a token with gradient 0, so the other tokens do not
    weigh more. These factors do not include the change of the policy within the step, which the
    policy loss handles.

    Args:
        ratios: from `importance_ratios`.
        cap: at least 1.
        mode: truncate: a ratio above the cap becomes the cap. mask: a ratio above the cap or below
            `low` becomes 0, all others stay (IcePop, arXiv:2510.18855).
        low: at most 1; 0: the reciprocal of the cap.
    """
    if mode == "mask":
        return torch.where((ratios > cap) | (ratios < (low or 1 / cap)), 0.0, ratios)
    return ratios.clamp(max=cap)


def rejected_rows(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, band: Sequence[float]
) -> Tensor:
    """Return the rows on which engine and trainer differ too much, (b,) bool.

    The geometric mean of the ratios of such a row's tokens is outside of the band (verl's
    `seq_mean_k1`). Unlike the product of the ratios it does not depend on the row's length. A row
    without tokens is not rejected.

    Args:
        old_logprobs: (b, A) the trainer's, at the start of the step.
        rollout_logprobs: (b, A) the engine's.
        mask: (b, A) bool, True for chosen tokens.
        band: the smallest and the largest geometric mean that is accepted.
    """
    # float64: a float32 sum depends on the width of the padded rows, and so would the decision.
    gaps = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach().double().sum(1)
    means = ratio(gaps / mask.sum(1).clamp(min=1))
    return (means < band[0]) | (means > band[1])


def engine_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Return the factors of the policy loss that depend on the engine's logprobs, (b, A).

    They are the `importance_weights` (1 without `tis_cap`), and 0 for the tokens of
    `rejected_rows`. The denominators of the loss do not change.
    """
    weights = torch.ones_like(old_logprobs)
    if config.tis_cap:
        ratios = importance_ratios(old_logprobs, rollout_logprobs, mask, config.tis_level)
        weights = importance_weights(ratios, config.tis_cap, config.tis_mode, config.tis_low)
    if config.reject_band:
        rejected = rejected_rows(old_logprobs, rollout_logprobs, mask, config.reject_band)
        weights = torch.where(rejected[:, None], 0.0, weights)
    return weights


# --- KL(policy || reference) of single tokens ----------------------------------------------------


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return log(pi/ref). It is unbiased and may be negative.

    In the loss its expected gradient is 0. In the reward, with reward-to-go, it optimises the KL(pi
    || ref) of the sequence; k2 and k3 do not.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return log(pi/ref)^2 / 2. It is biased and has a low variance.

    In the loss it optimises the KL(pi || ref) of each token, with the preceding states held fixed.
    In the reward it optimises no KL.
    """
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return ref/pi - 1 - log(ref/pi). It is unbiased and never negative.

    In the loss it optimises the KL(ref || pi) of each token, the other direction, with the
    preceding states held fixed; it is close to k2 while the two policies are close. In the reward
    it optimises no KL.
    """
    log_ratio = (reference_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL estimators by their name in `algorithm.kl_type`.

They are John Schulman's (joschu.net/blog/kl-approx.html). A good estimate of the value need not
have a good gradient: what is optimised depends on where the estimate is used. In expectation over
samples of the policy itself:

    k1 in the loss      nothing: its gradient is 0, it only adds noise
    k2 in the loss      KL(policy || reference) of each token, the preceding states held fixed
    k3 in the loss      KL(reference || policy) of each token, the preceding states held fixed
    k1 in the reward    KL(policy || reference) of the whole sequence, if a token's return contains
                        its own penalty and all later ones (reward-to-go); if it contains its own
                        alone, the same as k2 in the loss
    k2, k3 in the reward    no KL: only their values estimate one, k3's without bias

"States held fixed" means that a token pays for its own distance from the reference, and not for
leading to states with a larger distance; only k1 in the reward counts that. The KL of the whole
rollout works as well as the reward-to-go: the terms before a token change nothing in expectation.
GAE gives the reward-to-go at gamma = lam = 1.

Tokens that another policy sampled (because of the engine's arithmetic, or an earlier mini-batch)
give these gradients if each is weighted by policy / sampler, a weight without a gradient. In the
loss the token's own ratio is exact for its state, and the ratio of the whole row is exact for all
states."""


# --- the critic ----------------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of the critic; elementwise, for chosen tokens in any shape.

    Args:
        values: the critic's current values; the only input with a gradient.
        old_values: the critic's values at the start of the step.
        returns: the targets.
        clip: the largest useful change of a value in a step: the larger of the unclipped and the
            clipped error counts (OpenAI baselines, PPO2). 0: no limit.

    Returns:
        The loss of each token, and a bool for each token, True if its loss is clipped.
    """
    unclipped = (values - returns).square()
    if not clip:
        return 0.5 * unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped
