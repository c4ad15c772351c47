"""What an algorithm makes of a batch: advantages, and the weights of tokens (legend: `batch.py`).

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

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.config import AlgorithmConfig, Config
from agentrl.errors import AgentRLError, ConfigError, RunStopped, UserCodeError
from agentrl.registry import advantage_estimator, advantage_estimators
from agentrl.trainer.batch import Batch, Targets, assign_mini_batches
from agentrl.trainer.losses import ESTIMATORS, describe_value


def make_targets(
    batch: Batch,
    config: Config,
    old_logprobs: Tensor | None,
    values: Tensor | None,
    reference_logprobs: Tensor | None,
    *,
    kl_coef: float | None = None,
) -> Targets:
    """All that the loss needs of a batch.

    What a failed call costs (`tools.penalties`) is taken off the advantages of the tokens that
    wrote it, last of all, and off nothing else: a reward that only these tokens see (gamma 0),
    compared with nobody's. It is a nudge, not a part of the return: it moves the policy from such
    calls also where they did no harm, and a baseline does not take it back. In units of advantages,
    which GRPO's and whitened ones have in standard deviations. NeMo RL has the like of it as
    `invalid_tool_call_advantage`.

    Args:
        batch: the step's rollouts.
        config: the run's.
        old_logprobs: (B, T) at the start of the step; wanted for a KL in the reward, and where the
            step takes several mini-batches.
        values: (B, T) at the start of the step, for an algorithm with a critic.
        reference_logprobs: (B, T), wanted where a KL coefficient is above 0.
        kl_coef: weight of the KL in the reward, where a controller steers it; None: the config's.

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
    scale = a.loss_scale or config.rollout.max_trajectory_tokens
    return Targets(
        advantages=advantages,
        weights=loss_weights(batch, a.loss_agg_mode, a.mini_batch_size, scale),
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs if a.kl_loss_coef else None,
        returns=returns,
        values=values,
    )


def has_learning_signal(batch: Batch, config: AlgorithmConfig, targets: Targets) -> bool:
    """Return whether policy or critic can learn from what was earned.

    The policy can where a token has an advantage that is not exactly 0, the critic where a value is
    not the return. Neither can if no rollout trains, or if the estimator finds all rollouts equally
    good: then at most a KL or an entropy bonus moves the policy. A KL in the reward was not earned.

    Args:
        batch: the step's rollouts.
        config: the section `algorithm`.
        targets: what `make_targets` made of them.
    """
    advantages, returns, values = targets.advantages, targets.returns, targets.values
    if config.kl_reward_coef:
        advantages, returns = _advantages(batch, config, values, None)
    teaches = advantages != 0
    if returns is not None and values is not None:
        teaches |= returns != values
    return bool(teaches[batch.action_mask].any())


def _advantages(
    batch: Batch, config: AlgorithmConfig, values: Tensor | None, penalty: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (B, T) advantages, whitened and net of what failed calls cost, and returns."""
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
    """Advantages as the estimator has them, before any whitening, and returns for a critic.

    Args:
        batch: some rollouts.
        config: the section `algorithm`.
        values: (B, T), for an algorithm with a critic.
        penalty: (B, T), taken off what each chosen token earned; 0 elsewhere. None: nothing is.

    Returns:
        (B, T) advantages; (B, T) returns, or None.

    Raises:
        RegistryError: no such estimator.
        UserCodeError: it does not return (B, T) advantages, and (B, T) returns or None.
        RunStopped: one of them is not finite.
    """
    if penalty is not None:
        batch = _subtract_penalty(batch, penalty)
    if config.whiten_rewards:
        batch = _scale_rewards(batch)
    name = config.adv_estimator
    estimator = advantage_estimators.get(name)
    try:
        returned = estimator(batch, batch.token_rewards, values, config)
    except AgentRLError:
        raise
    except Exception as e:
        raise UserCodeError.of(f"the advantage estimator {name!r}", e) from e
    shape = batch.token_rewards.shape

    def refuse(wrong: str) -> UserCodeError:
        return UserCodeError(
            f"the advantage estimator {name!r} returned {wrong}. It must return (advantages,"
            f" returns): (B, T) numbers, here {tuple(shape)}, and what a critic should learn,"
            " (B, T) or None"
        )

    if not isinstance(returned, tuple) or len(returned) != 2:
        raise refuse(f"{describe_value(returned)}, no pair")
    advantages, returns = returned
    if not isinstance(advantages, Tensor) or advantages.shape != shape:
        raise refuse(f"{describe_value(advantages)} for the advantages")
    if not advantages.is_floating_point():
        raise refuse(f"advantages of {advantages.dtype}, no floating-point numbers,")
    if returns is not None and (not isinstance(returns, Tensor) or returns.shape != shape):
        raise refuse(f"{describe_value(returns)} for the returns")
    if returns is None and config.critic:
        raise refuse("None for the returns, and there is a critic that learns them")
    if not advantages[batch.action_mask].isfinite().all():
        raise RunStopped(f"an advantage of the estimator {name!r} is not finite")
    return advantages, returns


def _subtract_penalty(batch: Batch, penalty: Tensor) -> Batch:
    """A rollout's penalty is the sum of its tokens', as it would be were it a grader's doing."""
    mask = batch.action_mask
    owner = batch.rollout[mask.nonzero(as_tuple=True)[0]]
    # In the order of the tokens: a sum over padded rows rounds as their width has it.
    rewards = batch.rewards.double().index_add(0, owner, penalty[mask].double(), alpha=-1)
    return replace(
        batch,
        rewards=rewards.to(batch.rewards.dtype),
        token_rewards=batch.token_rewards - penalty,
    )


def _scale_rewards(batch: Batch) -> Batch:
    """All rewards in units of the spread of those at chosen tokens; a shift would pay for length.

    What rollouts are compared with is scaled alike.
    """
    scale = unit_variance_scale(batch.token_rewards, batch.action_mask)
    return replace(
        batch,
        rewards=batch.rewards * scale,
        token_rewards=batch.token_rewards * scale,
        baseline=None if batch.baseline is None else batch.baseline * scale,
    )


# --- of whole rollouts, against others of the same prompt: the same at all their tokens --------


@advantage_estimator("grpo")
def grpo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """GRPO (arXiv:2402.03300, section 4.1.2): reward minus its group's mean, over its std.

    Without `norm_adv_by_std` it is Dr. GRPO's (arXiv:2503.20783), whose gradient in expectation is
    (n - 1) / n of the true one with `seq-mean-token-sum`: the mean holds the rollout's own reward.
    """
    rewards, group, train = batch.rewards, batch.group, batch.train
    return broadcast_to_tokens(
        batch, subtract_group_mean(rewards[train], group[train], config.norm_adv_by_std)
    ), None


@advantage_estimator("rloo")
def rloo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """RLOO (arXiv:2402.14740): reward minus the mean of the group's *other* rewards.

    Its gradient is unbiased with `seq-mean-token-sum`, on policy.
    """
    train = batch.train
    return broadcast_to_tokens(
        batch, subtract_mean_of_others(batch.rewards[train], batch.group[train])
    ), None


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """REINFORCE++ with a baseline (arXiv:2501.03262): reward minus its group's mean.

    What divides is the spread of the whole batch, not the group's: `whiten_advantages`, which the
    row of that name sets.
    """
    train = batch.train
    return broadcast_to_tokens(
        batch, subtract_group_mean(batch.rewards[train], batch.group[train])
    ), None


@advantage_estimator("remax")
def remax(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """ReMax (arXiv:2310.10505): reward minus that of the prompt's greedy rollout.

    Raises:
        ConfigError: the batch has no rewards of greedy rollouts.
    """
    if batch.baseline is None:
        raise ConfigError(
            "algorithm.adv_estimator=remax compares with a greedy rollout of each prompt, but none"
            " was played"
        )
    return broadcast_to_tokens(batch, (batch.rewards - batch.baseline)[batch.train]), None


def subtract_group_mean(rewards: Tensor, group: Tensor, by_std: bool = False) -> Tensor:
    """Each reward minus the mean of its group.

    A group whose rewards are all equal, a group of one among them, gives exactly 0: nothing can be
    learned from it, and a mean that rounds must not say otherwise.

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
    """Each reward minus the mean of the *others* of its group, which its own does not move.

    Such a baseline leaves the expected gradient as it is. Equal rewards give exactly 0, and so does
    a group of one: it has nothing to compare with.

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
    """(R, ...) float64 minus the mean, exactly 0 where a group's are equal; (G, 1...) its size."""
    flat = [-1] + [1] * (rewards.dim() - 1)
    count = torch.bincount(group).double().view(flat)
    wide = rewards.double()
    mean = _sums(wide, group) / count.clamp(min=1)
    index = group.view(flat).expand_as(wide)
    low = torch.zeros_like(mean).scatter_reduce(0, index, wide, "amin", include_self=False)
    high = torch.zeros_like(mean).scatter_reduce(0, index, wide, "amax", include_self=False)
    return torch.where((low == high)[group], 0.0, wide - mean[group]), count


def _sums(x: Tensor, group: Tensor) -> Tensor:
    """(G, ...) sums of (R, ...) over each group."""
    groups = int(group.max()) + 1 if len(group) else 0
    return x.new_zeros(groups, *x.shape[1:]).index_add(0, group, x)


def broadcast_to_tokens(batch: Batch, advantages: Tensor) -> Tensor:
    """(B, T): to all tokens of a rollout what it has, to those that do not train 0.

    Args:
        batch: the step's rollouts.
        advantages: of those that train, in their order.
    """
    of_rollout = advantages.new_zeros(len(batch.rewards))
    of_rollout[batch.train] = advantages
    return torch.where(batch.action_mask, of_rollout[batch.rollout][:, None], 0.0)


# --- of turns: what a rollout earned from a turn on, against others at the same turn -----------


@advantage_estimator("turn_rloo")
def turn_rloo(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, None]:
    """Reward-to-go minus the mean of the group's other rollouts at the same turn index.

    RLOO (arXiv:2402.14740) turn by turn: all tokens of a turn have the advantage of what was earned
    in it and after it, so that no turn answers for what an earlier one earned. A rollout that had
    ended before a turn counts there with a reward-to-go of 0, for that is what it earned from then
    on; to leave it out and to give the last one standing the advantage 0 biases the gradient.

    The baseline knows nothing of the rollout that it is for, so the expected gradient is the true
    one: with `seq-mean-token-sum`, on policy. It is no longer with division by a standard
    deviation, whitening, a mean over tokens, or clipping that takes effect. A turn is what the
    policy took between two observations, in the order in which they were taken (`Batch.turn`).
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
    """What each rollout earned in a turn and all that follow.

    Args:
        batch: the step's rollouts.
        token_rewards: (B, T).

    Returns:
        (R, K) float64, K being the most turns of a rollout; 0 where it had ended.
    """
    mask = batch.response_mask
    owner = batch.rollout[mask.nonzero(as_tuple=True)[0]]
    turn = _turn(batch, mask)
    turns = int(turn.max()) + 1 if len(turn) else 0
    earned = torch.zeros(len(batch.rewards) * turns, dtype=torch.float64)
    earned.index_add_(0, owner * turns + turn, token_rewards[mask].double())
    return earned.view(len(batch.rewards), turns).flip(1).cumsum(1).flip(1)


def _turn(batch: Batch, mask: Tensor) -> Tensor:
    """(N,) the turn of each token in the mask; all in the first where a rollout names none."""
    return batch.turn[mask].clamp(min=0)


# --- of single tokens: returns over the chosen tokens of a rollout, as time has them -----------


@advantage_estimator("gae")
def gae(
    batch: Batch, token_rewards: Tensor, values: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv:1506.02438) over each rollout's chosen tokens, with a critic's values.

    Every rollout here was scored, so its last token ends it: nothing is bootstrapped.
    """
    assert values is not None, "a critic's"
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
    """REINFORCE++ (arXiv:2501.03262): the discounted reward-to-go of each chosen token.

    Its baseline and its scale are the batch's: `whiten_advantages`, which the row of that name
    sets.
    """
    advantages, _ = generalized_advantages(
        token_rewards,
        torch.zeros_like(token_rewards),
        batch.action_mask,
        batch.rollout,
        batch.turn,
        config.gamma,
        lam=1.0,
        bootstrap=torch.zeros_like(batch.rewards),
    )
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
    """Generalised advantage estimates (arXiv:1506.02438) over the tokens the policy chose.

    The tokens in `mask`, across all rows of a rollout, are the steps of the decision process, in
    the order of their turns and, within a turn, of their places: so in time, whatever rows they
    stand in. The observations between two of them belong to the environment, take no time and are
    not read: any number of them, whatever values stand there, changes no bit of the result.

    Args:
        token_rewards: (B, T), each earned by choosing the token.
        values: (B, T), of the state before the token.
        mask: (B, T) bool.
        rollout: (B,) int64.
        turn: (B, T) int64, when each token was sampled: which of its rollout's turns did. Tokens
            of equal turns follow each other by row and column.
        gamma: discount per chosen token.
        lam: 0 is one-step temporal differences, 1 the whole return.
        bootstrap: (R,), the value of the state after a rollout's last token: 0 where it ended. A
            rollout that ran out of a budget and was scored has ended, too.

    Returns:
        (B, T) advantages, in the wider of the dtypes of rewards and values, and (B, T) returns, in
        that of the values; 0 outside the mask.
    """
    row, column = mask.nonzero(as_tuple=True)
    order = turn[row, column].argsort(stable=True)
    order = order[rollout[row[order]].argsort(stable=True)]  # by rollout, then turn, then place
    row, column = row[order], column[order]
    owner = rollout[row]
    steps = torch.bincount(owner, minlength=len(bootstrap))
    first = steps.cumsum(0) - steps
    at = (owner, torch.arange(len(row), device=row.device) - first[owner])

    length = int(steps.max()) if len(row) else 0
    wide = torch.promote_types(token_rewards.dtype, values.dtype)
    reward = values.new_zeros(len(bootstrap), length, dtype=wide)
    reward[at] = token_rewards[row, column].to(wide)
    # One column more: what comes after the last step. Past a rollout's end all is 0.
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


# --- in units of their own spread --------------------------------------------------------------


EPSILON = 1e-8
"""Added to a variance before it divides. Variances are taken in float64, since a mean that rounds
would make a spread of equal numbers."""


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the masked entries to mean 0 and (unbiased) variance 1; 0 elsewhere.

    One entry alone becomes 0, and equal entries do: there is no spread to scale by.

    Args:
        x: any shape; what stands outside the mask is not read.
        mask: bool, the same shape.
    """
    chosen = x[mask].double()
    white = torch.zeros_like(x)
    if not _has_spread(chosen):
        return white
    centred = chosen - chosen.mean()
    return white.masked_scatter(mask, (centred / _std(centred)).to(x.dtype))


def unit_variance_scale(x: Tensor, mask: Tensor) -> float:
    """What the masked entries are multiplied with to have (unbiased) variance 1; no shift.

    Args:
        x: any shape; what stands outside the mask is not read.
        mask: bool, the same shape.

    Returns:
        1 for one entry and for equal ones: there is no spread to scale by.
    """
    chosen = x[mask].double()
    return 1 / _std(chosen - chosen.mean()) if _has_spread(chosen) else 1.0


def _has_spread(chosen: Tensor) -> bool:
    return len(chosen) > 0 and bool(chosen.min() != chosen.max())


def _std(centred: Tensor) -> float:
    return (centred.square().sum().item() / (len(centred) - 1) + EPSILON) ** 0.5


# --- groups that teach nothing -----------------------------------------------------------------


def dead_groups(batch: Batch, advantages: Tensor) -> Tensor:
    """Which groups can teach nothing: all their advantages are exactly 0, no failed call costs.

    It is asked of the estimator's own advantages: whitening shifts a 0 to something else.

    Args:
        batch: some rollouts.
        advantages: (B, T) of them.

    Returns:
        (G,) bool, up to the last group that has a rollout. True as well for a group without one.
    """
    teaches_token = advantages != 0
    if batch.call_penalties is not None:
        teaches_token |= batch.call_penalties > 0
    teaches = (batch.action_mask & teaches_token).any(1)
    dead = torch.ones(int(batch.group.max()) + 1, dtype=torch.bool)
    dead[batch.group[batch.rollout[teaches]]] = False
    return dead


# --- how the losses of tokens become one -------------------------------------------------------


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
    step = assign_mini_batches(count, mini_batch_size)  # (R,)
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


# --- the KL in the reward ----------------------------------------------------------------------


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

    def load(self, coef: float) -> None:
        """Go on from what `coef` was; a fixed weight stays the config's."""
        if self.target:
            self.coef = coef


def rollout_kl(batch: Batch, logprobs: Tensor, reference_logprobs: Tensor, kl_type: str) -> float:
    """The KL to the reference in nats a rollout: summed over its chosen tokens.

    The mean of the rollouts that train; 0 where none does.

    Args:
        batch: says which tokens are chosen.
        logprobs: (B, T), of the policy that is compared.
        reference_logprobs: (B, T).
        kl_type: the estimator, as `algorithm.kl_type` names it.
    """
    mask = batch.action_mask
    kl = ESTIMATORS[kl_type](logprobs[mask], reference_logprobs[mask])
    return kl.sum().item() / max(1, int(batch.train.sum()))


# --- metrics -----------------------------------------------------------------------------------


def target_metrics(batch: Batch, targets: Targets) -> dict[str, float]:
    """Mean, max and min of what the tokens are told, and how well the critic foresaw it."""
    mask = batch.action_mask
    if not mask.any():
        return {}
    metrics = _summary("critic/advantages", targets.advantages[mask])
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
