"""Compute what the loss needs from a batch: advantages, and the weights of tokens.

The shapes are explained in `batch.py`. An estimator of advantages is registered by name
(`agentrl.advantage_estimator`) and chosen by `algorithm.adv_estimator`:

    f(batch, token_rewards, values, config) -> (advantages, returns)

- batch: the step's rollouts. Their `rewards` (R,) and `token_rewards` (B, T) are net of the KL
  penalty, and scaled if the config says so.
- token_rewards: (B, T), `batch.token_rewards`: the reward of each chosen token, 0 elsewhere.
- values: (B, T) of the state before each chosen token; None without a critic.
- config: the section `algorithm`.
- advantages: (B, T), in the dtype of the rewards; values outside `batch.action_mask` are never
  read.
- returns: (B, T), the targets of the critic, or None.

The steps of the decision process are the tokens that the policy chose. The tokens between them were
observed. No estimator of this file reads them, so neither their number nor their content changes a
bit of an advantage. For the same reason sums are taken in the order of the chosen tokens: the sum
over a padded row is rounded differently for every width.

Baselines count rollouts, not rows, and only rollouts that survived and train.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig, Config
from agentrl.config.teacher import TeacherConfig
from agentrl.errors import ConfigError, RunStopped, UserCodeError, is_own_error
from agentrl.learner.batch import Batch, Targets, assign_mini_batches
from agentrl.learner.losses import ESTIMATORS, describe_value
from agentrl.metrics import is_close
from agentrl.registry import advantage_estimator, advantage_estimators


def make_targets(
    batch: Batch,
    config: Config,
    old_logprobs: Tensor | None,
    values: Tensor | None,
    reference_logprobs: Tensor | None,
    *,
    kl_coef: float | None = None,
    teacher_logprobs: Tensor | None = None,
) -> Targets:
    """Compute all that the loss needs from a batch.

    The penalty of a failed call (`tools.penalties`) is subtracted last, from the advantages of the
    tokens that wrote the call, and from nothing else. It is like a reward that only these tokens
    receive (gamma 0), without a baseline. So it is not a part of the return: it discourages such
    calls even where they did no harm. Its unit is that of the advantages: standard deviations for
    GRPO and for whitened advantages. NeMo RL's `invalid_tool_call_advantage` is similar.

    Args:
        batch: the step's rollouts.
        config: the run's config.
        old_logprobs: (B, T) at the start of the step; required for a KL penalty in the reward, and
            if the step has several mini-batches.
        values: (B, T) at the start of the step, for an algorithm with a critic.
        reference_logprobs: (B, T), required if a KL coefficient is above 0.
        kl_coef: the weight of the KL penalty in the reward, if a controller adjusts it; None: the
            config's.
        teacher_logprobs: (B, T), required with a teacher, as are `old_logprobs`.

    Raises:
        RegistryError, UserCodeError, RunStopped: see `estimate`.
    """
    a, mask = config.algorithm, batch.action_mask
    penalty = None
    if a.kl_reward_coef:
        assert old_logprobs is not None and reference_logprobs is not None
        kl = ESTIMATORS[a.kl_type](old_logprobs[mask], reference_logprobs[mask])
        penalty = torch.zeros_like(batch.token_rewards)
        penalty[mask] = (a.kl_reward_coef if kl_coef is None else kl_coef) * kl.to(penalty)
    advantages, returns = _advantages(batch, a, values, penalty)
    if config.teacher.model:
        assert old_logprobs is not None and teacher_logprobs is not None
        advantages = advantages + teacher_advantages(
            old_logprobs, teacher_logprobs, mask, config.teacher
        )
    scale = a.loss_scale or config.rollout.max_trajectory_tokens
    return Targets(
        advantages=advantages,
        weights=loss_weights(batch, a.loss_agg_mode, a.mini_batch_size, scale),
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        returns=returns,
        values=values,
        teacher_logprobs=teacher_logprobs,
    )


def has_learning_signal(batch: Batch, config: AlgorithmConfig, targets: Targets) -> bool:
    """Return whether policy or critic can learn from the rewards.

    The policy can if a token has an advantage that is not exactly 0, the critic if a value differs
    from its return. Neither can if no rollout trains, or if the estimator finds all rollouts
    equally good. Then at most a KL or an entropy term moves the policy. A KL penalty in the reward
    is no learning signal. A teacher is one.

    Args:
        batch: the step's rollouts.
        config: the section `algorithm`.
        targets: the result of `make_targets` for the batch.
    """
    advantages, returns, values = targets.advantages, targets.returns, targets.values
    if config.kl_reward_coef:
        advantages, returns = _advantages(batch, config, values, None)
    teaches = advantages != 0
    if targets.teacher_logprobs is not None:
        teaches |= targets.teacher_logprobs != targets.old_logprobs
    if returns is not None and values is not None:
        teaches |= returns != values
    return bool(teaches[batch.action_mask].any())


def _advantages(
    batch: Batch, config: AlgorithmConfig, values: Tensor | None, penalty: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (B, T) advantages, whitened and net of penalties for failed calls, and returns."""
    advantages, returns = estimate(batch, config, values, penalty)
    if config.whiten_advantages:
        advantages = whiten(advantages, batch.action_mask)
    if batch.call_penalties is not None:
        advantages = advantages - batch.call_penalties
    return advantages, returns


def estimate(
    batch: Batch,
    config: AlgorithmConfig,
    values: Tensor | None = None,
    penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the estimator's advantages before whitening, and the returns for a critic.

    Args:
        batch: some rollouts.
        config: the section `algorithm`.
        values: (B, T), for an algorithm with a critic.
        penalty: (B, T), subtracted from the reward of each chosen token; 0 elsewhere. None: no
            penalty.

    Returns:
        (B, T) advantages; (B, T) returns, or None.

    Raises:
        RegistryError: there is no such estimator.
        UserCodeError: it does not return (B, T) advantages, and (B, T) returns or None.
        RunStopped: an advantage is not finite.
    """
    if penalty is not None:
        batch = _subtract_penalty(batch, penalty)
    name = config.adv_estimator
    estimator = advantage_estimators.get(name)
    try:
        returned = estimator(batch, batch.token_rewards, values, config)
    except Exception as e:
        if is_own_error(e) or name in advantage_estimators.shipped:
            raise
        raise UserCodeError.of(f"the advantage estimator {name!r}", e) from e
    shape = batch.token_rewards.shape

    def refuse(wrong: str) -> UserCodeError:
        return UserCodeError(
            f"the advantage estimator {name!r} returned {wrong}. It must return (advantages,"
            f" returns): (B, T) numbers, here {tuple(shape)}, and the targets of a critic, (B, T)"
            " or None"
        )

    if not isinstance(returned, tuple) or len(returned) != 2:
        raise refuse(f"{describe_value(returned)} instead of a pair")
    advantages, returns = returned
    if not isinstance(advantages, Tensor) or advantages.shape != shape:
        raise refuse(f"{describe_value(advantages)} for the advantages")
    if not advantages.is_floating_point():
        raise refuse(f"advantages of {advantages.dtype} instead of floating-point numbers")
    if returns is not None and (not isinstance(returns, Tensor) or returns.shape != shape):
        raise refuse(f"{describe_value(returns)} for the returns")
    if returns is None and config.critic:
        raise refuse("None for the returns, but there is a critic that learns them")
    if not advantages[batch.action_mask].isfinite().all():
        raise RunStopped(f"an advantage of the estimator {name!r} is not finite")
    return advantages, returns


def _subtract_penalty(batch: Batch, penalty: Tensor) -> Batch:
    """Subtract a penalty per token from the rewards.

    The penalty of a rollout is the sum over its tokens.
    """
    mask = batch.action_mask
    owner = batch.rollout[mask.nonzero(as_tuple=True)[0]]
    # In the order of tokens: a sum over padded rows is rounded differently for every width.
    rewards = batch.rewards.double().index_add(0, owner, penalty[mask].double(), alpha=-1)
    return replace(
        batch, rewards=rewards.to(batch.rewards.dtype), token_rewards=batch.token_rewards - penalty
    )


# --- estimators of whole rollouts: all tokens of a rollout have the same advantage ---------------


@advantage_estimator("grpo")
def grpo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return GRPO's advantages: reward minus the group's mean, divided by the group's std.

    They are defined in arXiv:2402.03300, section 4.1.2. Without `norm_adv_by_std` there is no
    division, as in Dr. GRPO (arXiv:2503.20783). With `seq-mean-token-sum` the expected gradient is
    (n - 1) / n of the true gradient: the mean contains the rollout's own reward.
    """
    rewards, group, train = batch.rewards, batch.group, batch.train
    return to_tokens(
        batch, subtract_group_mean(rewards[train], group[train], config.norm_adv_by_std)
    ), None


@advantage_estimator("maxrl")
def maxrl(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return MaxRL's advantages: (reward - the group's mean) / the group's mean.

    They are defined in arXiv:2602.02710, algorithm 1. For rewards of 0 and 1, with
    `seq-mean-token-sum`, on policy, the expected gradient of a group of n is that of the first n -
    1 terms of log p = -sum over k of (1 - p)^k / k, where p is the probability of a success. So
    rows with few successes count more than with `grpo`. A group without a success has no gradient.

    Raises:
        RunStopped: a reward is negative, so that the mean is no probability.
    """
    rewards, group, train = batch.rewards[batch.train], batch.group[batch.train], batch.train
    if ((rewards < 0) & ~is_close(rewards, 0.0)).any():
        worst = int(torch.where(train, batch.rewards, 0.0).argmin())
        raise RunStopped(
            f"episode {batch.episodes[worst]} has the reward {batch.rewards[worst]:g}:"
            " algorithm.adv_estimator=maxrl divides by the mean reward of a group, which must be a"
            " share of successes. Return rewards of 0 and 1, or use another estimator"
        )
    deviations, count = _deviations(rewards, group)
    mean = _sums(rewards.double(), group) / count.clamp(min=1)
    # A group without a success has deviations of exactly 0.
    advantages = deviations / torch.where(mean > 0, mean, 1.0)[group]
    return to_tokens(batch, advantages.to(rewards.dtype)), None


@advantage_estimator("rloo")
def rloo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return RLOO's advantages: reward minus the mean of the group's *other* rewards.

    They are defined in arXiv:2402.14740. With `seq-mean-token-sum`, on policy, the gradient is
    unbiased.
    """
    train = batch.train
    return to_tokens(batch, subtract_mean_of_others(batch.rewards[train], batch.group[train])), None


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return the advantages of REINFORCE++ with a baseline: reward minus the group's mean.

    The algorithm (arXiv:2501.03262) divides them by the standard deviation of the whole batch, not
    of the group. `whiten_advantages` does this, and the algorithm of this name sets that key.
    """
    train = batch.train
    return to_tokens(batch, subtract_group_mean(batch.rewards[train], batch.group[train])), None


@advantage_estimator("remax")
def remax(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return ReMax's advantages: reward minus the reward of the prompt's greedy rollout.

    They are defined in arXiv:2310.10505.

    Raises:
        ConfigError: the batch has no rewards of greedy rollouts.
    """
    if batch.baseline is None:
        raise ConfigError(
            "algorithm.adv_estimator=remax needs a greedy rollout of each prompt, but the batch has"
            " none"
        )
    advantages = batch.rewards - batch.baseline
    advantages = torch.where(is_close(batch.rewards, batch.baseline), 0.0, advantages)
    return to_tokens(batch, advantages[batch.train]), None


def subtract_group_mean(rewards: Tensor, group: Tensor, by_std: bool = False) -> Tensor:
    """Return each reward minus the mean of its group.

    If all rewards of a group are equal (`agentrl.metrics.is_close`), or the group has only one
    reward, the result is exactly 0: there is nothing to learn from such a group, and rounding of a
    reward or of the mean must not change that.

    Args:
        rewards: (R, ...), compared along the first dimension, of rollouts that survived and train.
        group: (R,) int64.
        by_std: divide by the group's standard deviation (unbiased, + 1e-6).

    Returns:
        (R, ...), in the dtype of the rewards.
    """
    advantages, count = _deviations(rewards, group)
    if by_std:
        squares = _sums(advantages.square(), group)
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std[group] + 1e-6)
    return advantages.to(rewards.dtype)


def subtract_mean_of_others(rewards: Tensor, group: Tensor) -> Tensor:
    """Return each reward minus the mean of the *other* rewards of its group.

    Such a baseline does not depend on the rollout's own reward and so does not change the expected
    gradient. Equal rewards give exactly 0, and so does a group of one.

    Args:
        rewards: (R, ...), compared along the first dimension, of rollouts that survived and train.
        group: (R,) int64.

    Returns:
        (R, ...), in the dtype of the rewards.
    """
    advantages, count = _deviations(rewards, group)
    others = count / (count - 1).clamp(min=1)
    return (advantages * others[group]).to(rewards.dtype)


def _deviations(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards minus their group's mean, (R, ...) float64, and the group sizes, (G, 1...).

    The deviations are exactly 0 in a group of equal rewards.
    """
    flat = [-1] + [1] * (rewards.dim() - 1)
    count = torch.bincount(group).double().view(flat)
    wide = rewards.double()
    mean = _sums(wide, group) / count.clamp(min=1)
    index = group.view(flat).expand_as(wide)
    low = torch.zeros_like(mean).scatter_reduce(0, index, wide, "amin", include_self=False)
    high = torch.zeros_like(mean).scatter_reduce(0, index, wide, "amax", include_self=False)
    return torch.where(is_close(low, high)[group], 0.0, wide - mean[group]), count


def _sums(x: Tensor, group: Tensor) -> Tensor:
    """Return the sums of (R, ...) over each group, (G, ...)."""
    groups = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros(groups, *x.shape[1:]).index_add(0, group, x)


def to_tokens(batch: Batch, advantages: Tensor) -> Tensor:
    """Return (B, T) with a rollout's advantage at all its tokens.

    Rollouts that do not train have 0.

    Args:
        batch: the step's rollouts.
        advantages: of the rollouts that train, in their order.
    """
    of_rollout = advantages.new_zeros(len(batch.rewards))
    of_rollout[batch.train] = advantages
    return torch.where(batch.action_mask, of_rollout[batch.rollout][:, None], 0.0)


# --- estimators of turns: all tokens of a turn have the same advantage ---------------------------


@advantage_estimator("turn_rloo")
def turn_rloo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return reward-to-go minus the mean of the group's other rollouts at the same turn index.

    This is RLOO (arXiv:2402.14740) turn by turn. All tokens of a turn have the same advantage. It
    contains the rewards of the turn and of later turns, so no turn is credited for the reward of an
    earlier turn. A rollout that ended before a turn has a reward-to-go of 0 there. To leave such a
    rollout out of the mean, or to give the last remaining rollout the advantage 0, would bias the
    gradient.

    The baseline does not depend on the rollout that it is subtracted from. So with
    `seq-mean-token-sum`, on policy, the expected gradient is the true gradient. Division by a
    standard deviation, whitening, a mean over tokens, and clipping that takes effect each break
    this. A turn consists of the tokens that the policy sampled between two observations, in order
    of time (`Batch.turn`).
    """
    mask, train = batch.action_mask, batch.train
    to_go = rewards_to_go(batch, token_rewards)
    advantages = torch.zeros_like(to_go)
    advantages[train] = subtract_mean_of_others(to_go[train], batch.group[train])
    row, column = mask.nonzero(as_tuple=True)
    per_token = torch.zeros_like(token_rewards)
    per_token[row, column] = advantages[batch.rollout[row], _turn(batch, mask)].to(per_token.dtype)
    return per_token, None


def rewards_to_go(batch: Batch, token_rewards: Tensor) -> Tensor:
    """Return the sum of a rollout's rewards in each turn and all later turns.

    Args:
        batch: the step's rollouts.
        token_rewards: (B, T).

    Returns:
        (R, K) float64, where K is the largest number of turns of a rollout; 0 after the end of a
        rollout.
    """
    mask = batch.response_mask
    owner = batch.rollout[mask.nonzero(as_tuple=True)[0]]
    turn = _turn(batch, mask)
    turns = int(turn.max()) + 1 if len(turn) else 0
    earned = torch.zeros(len(batch.rewards) * turns, dtype=torch.float64)
    earned.index_add_(0, owner * turns + turn, token_rewards[mask].double())
    return earned.view(len(batch.rewards), turns).flip(1).cumsum(1).flip(1)


def _turn(batch: Batch, mask: Tensor) -> Tensor:
    """Return the turn of each token in the mask, (N,). A token without a turn counts as turn 0."""
    return batch.turn[mask].clamp(min=0)


# --- estimators of tokens ------------------------------------------------------------------------


@advantage_estimator("gae")
def gae(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Return GAE (arXiv:1506.02438) over each rollout's chosen tokens, with a critic's values.

    Every rollout was scored, so the episode ends with its last token, and no value is bootstrapped.
    """
    assert values is not None, "gae needs the values of a critic"
    return generalized_advantages(
        token_rewards,
        values,
        batch.action_mask,
        batch.rollout,
        batch.turn,
        config.gamma,
        config.lam,
        bootstrap=torch.zeros_like(batch.rewards),
    )


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return REINFORCE++'s advantages: the discounted reward-to-go of each chosen token.

    The algorithm (arXiv:2501.03262) then subtracts the mean of the batch and divides by its
    standard deviation. `whiten_advantages` does this, and the algorithm of this name sets that key.
    """
    # GAE with values of 0 and lam=1 is the discounted reward-to-go.
    config = config.model_copy(update={"lam": 1.0})
    advantages, _ = gae(batch, token_rewards, torch.zeros_like(token_rewards), config)
    return advantages, None


def generalized_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    rollout: Tensor,
    turn: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates (arXiv:1506.02438) over the tokens the policy chose.

    The tokens in `mask`, across all rows of a rollout, are the steps of the decision process. They
    are ordered by turn and, within a turn, by position: this is their order in time, whatever rows
    they are in. Observations between them belong to the environment. They are not steps of the
    process and are not read: neither their number nor the values there change the result.

    Args:
        token_rewards: (B, T), the reward for choosing each token.
        values: (B, T), of the state before the token.
        mask: (B, T) bool.
        rollout: (B,) int64.
        turn: (B, T) int64: the turn of its rollout that sampled each token. Tokens of the same turn
            are ordered by row and column.
        gamma: discount per chosen token.
        lam: 0 gives one-step temporal differences, 1 the whole return.
        bootstrap: (R,), the value of the state after a rollout's last token: 0 if the rollout ended
            there. A rollout that exceeded a budget and was scored has ended, too.

    Returns:
        (B, T) advantages, in the wider dtype of rewards and values, and (B, T) returns, in the
        dtype of the values; 0 outside the mask.
    """
    row, column = mask.nonzero(as_tuple=True)
    order = turn[row, column].argsort(stable=True)
    order = order[rollout[row[order]].argsort(stable=True)]  # by rollout, then turn, then position
    row, column = row[order], column[order]
    owner = rollout[row]
    steps = torch.bincount(owner, minlength=len(bootstrap))
    first = steps.cumsum(0) - steps
    at = (owner, torch.arange(len(row), device=row.device) - first[owner])

    length = int(steps.max()) if len(row) else 0
    wide = torch.promote_types(token_rewards.dtype, values.dtype)
    reward = values.new_zeros(len(bootstrap), length, dtype=wide)
    reward[at] = token_rewards[row, column].to(wide)
    # One more column, for the state after the last step. After a rollout's end all is 0.
    value = values.new_zeros(len(bootstrap), length + 1, dtype=wide)
    value[at] = values[row, column].to(wide)
    value[torch.arange(len(bootstrap), device=row.device), steps] = bootstrap.to(wide)
    running = torch.arange(length, device=row.device) < steps[:, None]

    advantage = torch.zeros_like(reward)
    carry = reward.new_zeros(len(bootstrap))
    for t in reversed(range(length)):
        delta = reward[:, t] + gamma * value[:, t + 1] - value[:, t]
        carry = torch.where(running[:, t], delta + gamma * lam * carry, 0.0)
        advantage[:, t] = carry

    advantages = torch.zeros_like(values, dtype=wide)
    advantages[row, column] = advantage[at]
    returns = torch.zeros_like(values)
    returns[row, column] = (advantage[at] + value[at]).to(values.dtype)
    return advantages, returns


# --- the teacher ---------------------------------------------------------------------------------


@advantage_estimator("opd")
def opd(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Return 0: on-policy distillation learns from `teacher_advantages` alone, not from rewards."""
    return torch.zeros_like(token_rewards), None


def teacher_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, config: TeacherConfig
) -> Tensor:
    """Return the clipped log ratio of teacher and policy, times the weight, at each chosen token.

    The expectation of the log ratio over the policy's token is -KL(policy, teacher) at the state
    before it. So with advantages that are not clipped, on policy, the expected gradient of a token
    is that of -KL(policy, teacher), the preceding states held fixed: a token is not charged for
    leading to states where the KL is larger (a discount of 0). This is the reverse KL per token of
    Thinking Machines' "On-Policy Distillation"; GKD (arXiv:2306.13649) and MiniLLM
    (arXiv:2306.08543) have the same objective, GKD with the KL over the whole vocabulary, and
    MiniLLM with later tokens in the return.

    Args:
        old_logprobs: (B, T), of the policy at the start of the step.
        teacher_logprobs: (B, T).
        mask: (B, T) bool, the tokens of rollouts that train.
        config: the section `teacher`.

    Returns:
        (B, T) float64; 0 outside the mask.
    """
    log_ratio = teacher_logprobs[mask].double() - old_logprobs[mask].double()
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    advantages[mask] = config.weight * log_ratio.clamp(-config.clip, config.clip)
    return advantages


# --- whitening -----------------------------------------------------------------------------------


EPSILON = 1e-8
"""Added to a variance before division. Variances are computed in float64, since a rounded mean
would give equal numbers a spread."""


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the masked entries to mean 0 and (unbiased) variance 1; 0 elsewhere.

    A single entry becomes 0, and so do equal entries: they have no spread.

    Args:
        x: any shape; values outside the mask are not read.
        mask: bool, the same shape.
    """
    chosen = x[mask].double()
    white = torch.zeros_like(x)
    if not len(chosen) or chosen.min() == chosen.max():
        return white
    centred = chosen - chosen.mean()
    variance = centred.square().sum().item() / (len(centred) - 1)
    return white.masked_scatter(mask, (centred / (variance + EPSILON) ** 0.5).to(x.dtype))


# --- dead groups ---------------------------------------------------------------------------------


def dead_groups(batch: Batch, advantages: Tensor) -> Tensor:
    """Return which groups have no learning signal.

    All advantages of such a group are exactly 0, and it has no penalty for a failed call. The
    advantages must be those before whitening, which shifts a 0.

    Args:
        batch: some rollouts.
        advantages: (B, T), the advantages of these rollouts.

    Returns:
        (G,) bool, up to the last group that has a rollout. A group without one is dead, too.
    """
    teaches_token = advantages != 0
    if batch.call_penalties is not None:
        teaches_token |= batch.call_penalties > 0
    teaches = (batch.action_mask & teaches_token).any(1)
    dead = torch.ones(int(batch.group.max()) + 1, dtype=torch.bool)
    dead[batch.group[batch.rollout[teaches]]] = False
    return dead


# --- aggregation of token losses -----------------------------------------------------------------


def loss_weights(batch: Batch, mode: str, mini_batch_size: int, scale: int) -> Tensor:
    """Return the factor of each token's loss, so that the loss of a mini-batch is a plain sum.

    A sequence is a rollout with all its rows: an edited history makes more rows, but not more
    rollouts. The denominators are those of the whole mini-batch and count only what trains. So the
    weights do not depend on how rows are split into micro-batches or over ranks.

    - token-mean: all tokens have the same weight, so long rollouts count more (DAPO,
      arXiv:2503.14476).
    - seq-mean-token-sum: the sum over a rollout's tokens, mean over rollouts. This is the policy
      gradient itself: an unbiased estimator gives an unbiased gradient.
    - seq-mean-token-mean: the mean over a rollout's tokens, mean over rollouts. All rollouts have
      the same weight, so the tokens of long ones count less (GRPO, arXiv:2402.03300, equation 3).
    - seq-mean-token-sum-norm: seq-mean-token-sum divided by `scale` (Dr. GRPO, arXiv:2503.20783).
      It has the size of a mean without its bias, since the divisor is the same for all.

    Args:
        batch: the step's rollouts.
        mode: `algorithm.loss_agg_mode`.
        mini_batch_size: `algorithm.mini_batch_size`, in rollouts.
        scale: the divisor of seq-mean-token-sum-norm, in tokens.

    Returns:
        (B, T), in the dtype of the rewards; 0 outside of `batch.action_mask`.
    """
    mask, rollout, count = batch.action_mask, batch.rollout, len(batch.rewards)
    mini_batch = assign_mini_batches(count, mini_batch_size)  # (R,)
    tokens = torch.zeros(count, dtype=torch.int64).index_add(0, rollout, mask.sum(1))  # (R,)
    zeros = torch.zeros_like(tokens)
    rollouts = zeros.index_add(0, mini_batch, batch.train.long())[mini_batch]  # (R,)
    divisors = {
        "token-mean": zeros.index_add(0, mini_batch, tokens)[mini_batch],
        "seq-mean-token-sum": rollouts,
        "seq-mean-token-mean": rollouts * tokens,
        "seq-mean-token-sum-norm": rollouts * scale,
    }
    weights = (1.0 / divisors[mode].clamp(min=1).double()).to(batch.rewards.dtype)
    return torch.where(mask, weights[rollout][:, None], 0.0)


# --- the KL penalty in the reward ----------------------------------------------------------------


MAX_KL_ERROR = 0.2
"""The limit of the KL's relative error. The controller reacts to a larger error as to this one."""


class KLController:
    """The weight of the KL penalty in the reward: fixed, or adjusted to keep the KL at a target.

    It is adjusted as in arXiv:1909.08593, section 2.2: the weight grows if the KL is too large and
    shrinks if it is too small, by at most a fifth in `kl_horizon` rollouts.
    """

    def __init__(self, config: AlgorithmConfig):
        """Set the weight to its initial value, `kl_reward_coef`.

        Args:
            config: the section `algorithm`; with `kl_target` 0 the weight is fixed.
        """
        self.coef = config.kl_reward_coef
        self.target = config.kl_target
        self.horizon = config.kl_horizon

    def update(self, kl: float, rollouts: int) -> None:
        """Adjust the weight for the next step.

        Args:
            kl: the KL of the step in nats per rollout: the sum over a rollout's chosen tokens,
                averaged over rollouts. The paper uses this sum; it grows with the length of
                rollouts.
            rollouts: the number of these rollouts.

        Raises:
            RunStopped: the KL is not finite: the reference or the policy is broken.
        """
        if not math.isfinite(kl):
            raise RunStopped(f"the KL to the reference is {kl}: one of the two models is broken")
        if self.target:
            error = min(max(kl / self.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
            self.coef *= 1 + error * rollouts / self.horizon

    def load(self, coef: float) -> None:
        """Continue with the weight of a checkpoint; a fixed weight stays the config's."""
        if self.target:
            self.coef = coef


def rollout_kl(batch: Batch, logprobs: Tensor, reference_logprobs: Tensor, kl_type: str) -> float:
    """Return the KL to the reference in nats per rollout, summed over a rollout's chosen tokens.

    It is the mean over the rollouts that train; 0 if none does.

    Args:
        batch: the rollouts, with the mask of chosen tokens.
        logprobs: (B, T), of the policy.
        reference_logprobs: (B, T).
        kl_type: the estimator, as `algorithm.kl_type` names it.
    """
    mask = batch.action_mask
    kl = ESTIMATORS[kl_type](logprobs[mask], reference_logprobs[mask])
    return kl.sum().item() / max(1, int(batch.train.sum()))


# --- metrics -------------------------------------------------------------------------------------


def target_metrics(
    batch: Batch, targets: Targets, teacher: TeacherConfig | None = None
) -> dict[str, float]:
    """Return mean, max and min of the targets, how well the critic predicted the returns, the KL.

    Args:
        batch: the step's rollouts.
        targets: the result of `make_targets` for the batch.
        teacher: the section `teacher`, if there is a teacher.
    """
    mask = batch.action_mask
    if not mask.any():
        return {}
    metrics = _summary("critic/advantages", targets.advantages[mask])
    if teacher and targets.teacher_logprobs is not None and targets.old_logprobs is not None:
        kl = targets.old_logprobs[mask].double() - targets.teacher_logprobs[mask].double()
        metrics["teacher/reverse_kl"] = kl.mean().item()
        metrics["teacher/clipfrac"] = (kl.abs() > teacher.clip).double().mean().item()
    if targets.values is not None and targets.returns is not None:
        values, returns = targets.values[mask], targets.returns[mask]
        metrics |= _summary("critic/values", values) | _summary("critic/returns", returns)
        variance = returns.var(correction=0)
        metrics["critic/vf_explained_var"] = (
            (1 - (returns - values).var(correction=0) / variance).item() if variance > 0 else 0.0
        )
    return metrics


def _summary(name: str, x: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": x.mean().item(),
        f"{name}/max": x.max().item(),
        f"{name}/min": x.min().item(),
    }
