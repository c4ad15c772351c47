"""Losses per token, and the weights of tokens: pure functions.

A policy loss sees the tokens that the policy chose, laid out as rows, and nothing else:

    f(logprobs, old_logprobs, advantages, mask, config) -> (loss, counts)

with tensors of shape (b, A): A is the most chosen tokens that a row has, and `mask` is True where
there is one. What stands elsewhere, were it NaN, reaches neither a loss nor a gradient. A row is
one segment: all of a rollout, unless its history was edited.

- logprobs: of the chosen tokens, now; the only input with a gradient.
- old_logprobs: the trainer's at the start of the step.
- advantages: of the chosen tokens; they may differ within a row.
- config: the section `algorithm`.
- loss: of each token, 0 where there is none. It is not aggregated here: `Targets.weights` do that.
- counts: metric -> (b, A), told as its mean over tokens.

It is not called for a micro-batch without tokens, which a rank runs to keep step with the others.

`vanilla` and `cispo` are elementwise: a token's loss depends on that token alone. `gspo` is of
whole rows: each token's loss depends on all of its row.

On the first pass, where both logprobs are the same, the gradient of all three is that of the plain
policy gradient: minus the advantage, for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig
from agentrl.errors import AgentRLError, UserCodeError
from agentrl.registry import policy_loss, policy_losses

Loss = tuple[Tensor, dict[str, Tensor]]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond it mean a broken pair of policies; exp() of them would only overflow."""


def ratio(log_ratios: Tensor) -> Tensor:
    """The exp of log-ratios, of any shape, that stays finite for broken policies."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@policy_loss("vanilla")
def vanilla(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """PPO's clipped surrogate (arXiv:1707.06347, equation 7), negated; elementwise.

    With two clips, as in DAPO (arXiv:2503.14476): `clip_low` and `clip_high`. And with
    `dual_clip` a second one for negative advantages (arXiv:1912.09729): there the first
    leaves the ratio free to grow, and a token that became many times likelier than it was would
    outweigh all others.

    Returns:
        the losses, and counts: `pg_clipfrac`, whether the clip took the token's gradient, and with
        `dual_clip` also `pg_clipfrac_lower`, whether the second one did.
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
    """GSPO (arXiv:2507.18071): the surrogate of one ratio for the whole row; not elementwise.

    A row's ratio is exp of the mean log-ratio of its chosen tokens (equation 7), and it is clipped
    as a whole: either all tokens of a row with one advantage have a gradient or none has. So clips
    are a thousandth of PPO's. Each token's ratio has that value, and the gradient of its own
    logprob (GSPO-token, equations 13 and 14), so that tokens of a row may have advantages of their
    own. With one advantage a row, one row a rollout and seq-mean-token-mean, loss and gradient are
    those of equation 5. `dual_clip` bounds this ratio as it does PPO's.

    Returns:
        the losses, and counts: as of `vanilla`.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    mean = (logprobs - old_logprobs).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    own = (logprobs - logprobs.detach()).exp()  # 1, with the gradient of the token's logprob
    return _clipped_surrogate(ratio(mean.detach()) * own, advantages, config)


@policy_loss("cispo")
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """CISPO (arXiv:2506.13585, equations 4 and 5): REINFORCE with a clipped weight; elementwise.

    The loss is -w A log pi, where w is the ratio within [1 - clip_low, 1 + clip_high] and has no
    gradient: a clipped token still teaches, only not by more. With `clip_low` 1 there is no bound
    from below, as in the paper's runs. The loss's value says nothing, its gradient does.

    Returns:
        the losses, and counts: `pg_clipfrac`, whether the token's weight was clipped.
    """
    logprobs, old_logprobs, advantages = _zero_unmasked(mask, logprobs, old_logprobs, advantages)
    free = ratio(logprobs - old_logprobs).detach()
    weight = free.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * advantages * logprobs, {"pg_clipfrac": weight != free}


def _zero_unmasked(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 off the mask. Not by a product: 0 times NaN is NaN, in gradients too."""
    return tuple(torch.where(mask, x, 0.0) for x in tensors)


def _clipped_surrogate(ratios: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Loss:
    """PPO's, of ratios (b, A) of whatever kind."""
    free = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss, counts = torch.maximum(free, clipped), {"pg_clipfrac": clipped > free}
    if config.dual_clip:
        most = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > most)
        loss, counts["pg_clipfrac_lower"] = torch.where(beyond, most, loss), beyond
    return loss, counts


RESERVED = ("tokens", "loss", "entropy", "ppo_kl", "pg_loss", "kl_loss", "grad_norm", "lr")
"""Counts that the learner makes itself."""


def token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: AlgorithmConfig,
) -> Loss:
    """What the loss that `config.policy_loss` names says of the tokens; all (b, A).

    Raises:
        RegistryError: no such loss.
        UserCodeError: it raised, or does not return what a policy loss returns.
    """
    name = config.policy_loss
    function = policy_losses.get(name)
    if not mask.numel():
        # This rank has no row left. What it returns has a gradient, since the other ranks sum
        # theirs with it; a function of the user's need not know of micro-batches without tokens.
        return 0.0 * logprobs, {}
    try:
        returned = function(logprobs, old_logprobs, advantages, mask, config)
    except Exception as e:
        if isinstance(e, AgentRLError) or name in policy_losses.shipped:
            raise
        raise UserCodeError.of(f"the policy loss {name!r}", e) from e

    def refuse(wrong: str) -> UserCodeError:
        return UserCodeError(
            f"the policy loss {name!r} returned {wrong}. It must return (loss, counts): a loss for"
            f" each token, not aggregated, (b, A), here {tuple(mask.shape)}; and a mapping from"
            " names of metrics to (b, A), {} for none"
        )

    if not isinstance(returned, tuple) or len(returned) != 2:
        raise refuse(f"{describe_value(returned)}, no pair")
    loss, counts = returned
    if not isinstance(loss, Tensor) or loss.shape != mask.shape:
        raise refuse(f"{describe_value(loss)} for the loss")
    if not isinstance(counts, Mapping):
        raise refuse(f"{describe_value(counts)} for the counts")
    for metric, count in counts.items():
        if metric in RESERVED:
            raise refuse(f"a count named {metric!r}, which is the learner's own name")
        if not isinstance(count, Tensor) or count.shape != mask.shape:
            raise refuse(f"{describe_value(count)} for the count {metric!r}")
    alone = not (config.kl_loss_coef or config.entropy_coef)
    if alone and logprobs.requires_grad and not loss.requires_grad:
        raise refuse("a loss that does not depend on `logprobs`, so that nothing can learn from it")
    return loss, dict(counts)


def describe_value(thing: object) -> str:
    """What a function returned, for messages: `a tensor of shape (2, 3)`, `a tuple of 3`."""
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    size = f" of {len(thing)}" if isinstance(thing, tuple | list) else ""
    return f"a {type(thing).__name__}{size}" if thing is not None else "None"


# --- engine against trainer ---------------------------------------------------------------------


def importance_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"],
) -> Tensor:
    """How much likelier what was sampled is to the trainer than to the engine that sampled it.

    Args:
        old_logprobs: (b, A) the trainer's, at the start of the step.
        rollout_logprobs: (b, A) the engine's.
        mask: (b, A) bool, where there is a chosen token.
        level: token: each has its own ratio. sequence: all tokens of a row have the product of
            theirs, which over several turns is the only one that is exact.

    Returns:
        (b, A) without a gradient; 1 off the mask.
    """
    gaps = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if level == "sequence":
        gaps = torch.where(mask, gaps.sum(1, keepdim=True), 0.0)
    return ratio(gaps)


def importance_weights(ratios: Tensor, cap: float, mode: Literal["truncate", "mask"]) -> Tensor:
    """What multiplies the policy loss, so that each token counts for what the trainer holds of it.

    Uncapped they make the expected gradient that of the trainer's own policy, whoever sampled;
    the cap trades some of that for less variance. It is on the ratio itself, never on its
    logarithm. The loss's denominators stay as they are: a masked token counts as one that taught
    nothing, so that what remains weighs no more than it did. The way from the trainer's policy at
    the start of the step to that of now is not in them: the policy loss has it already.

    Args:
        ratios: of `importance_ratios`.
        cap: at least 1.
        mode: truncate: a ratio beyond the cap becomes the cap. mask: one beyond it or below its
            reciprocal becomes 0, all others stay.
    """
    if mode == "mask":
        return torch.where((ratios > cap) | (ratios < 1 / cap), 0.0, ratios)
    return ratios.clamp(max=cap)


# --- KL(policy || reference) from single tokens ------------------------------------------------


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
"""By their name in `algorithm.kl_type`.

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


# --- the critic ---------------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the critic; elementwise, of chosen tokens in any shape.

    Args:
        values: the critic's, now; the only input with a gradient.
        old_values: the critic's at the start of the step.
        returns: what it should say.
        clip: it gains nothing from moving by more in a step: the larger of the free and the
            clipped error counts (OpenAI baselines, PPO2). 0: it moves as far as it likes.

    Returns:
        the loss of each token, and whether (bool) it is clipped.
    """
    free = (values - returns).square()
    if not clip:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(free, clipped), clipped > free
