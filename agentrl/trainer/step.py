"""The learning half of a step: from scored rollouts to new weights. No engine takes part.

    groups ─► make_batch ─► Batch ─► compute_targets ─► Targets ─► learn ─► new weights

`Trainer.step` calls these functions with the rollouts that it has just played, and
`agentrl.trainer.replay` with recorded ones. So a replay runs the code of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from agentrl.config import Config
from agentrl.learner.algorithms import KLController, has_learning_signal, make_targets, rollout_kl
from agentrl.learner.batch import Batch, Targets, collate
from agentrl.learner.learner import Check, Learned, Learner
from agentrl.metrics import DEAD_STEP
from agentrl.trajectory import Group

Timed = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager that measures the time of a part of the step, by its name."""


def make_batch(groups: Sequence[Group], config: Config, pad_id: int = 0) -> Batch:
    """Turn the groups of a step into a batch, with the weights of turn and tool rewards.

    Args:
        groups: the groups that train, in the order of their rows.
        config: the run's config.
        pad_id: the padding token. No forward pass reads it.

    Raises:
        RunStopped: see `collate`.
    """
    reward = config.reward
    return collate(groups, pad_id, turn_weight=reward.turn_weight, tool_weight=reward.tool_weight)


def compute_targets(
    learner: Learner, batch: Batch, kl: KLController, timed: Timed = lambda name: nullcontext()
) -> tuple[Targets, dict[str, float]]:
    """Run the forward passes that the algorithm needs, and compute the targets of the update.

    Args:
        learner: the models, at the start of the step.
        batch: the step's rollouts.
        kl: the present weight of a KL penalty in the reward.
        timed: measures the parts `ref`, `values`, `old_log_prob` and `adv`.

    Returns:
        The targets, and the metric `waste/dead_step`.

    Raises:
        RegistryError, UserCodeError, RunStopped: see `estimate`.
    """
    config = learner.config
    with timed("ref"):
        reference = learner.reference_logprobs(batch)  # (B, T) or None
    with timed("values"):
        values = learner.values(batch)  # (B, T) or None
    with timed("old_log_prob"):
        old = learner.old_logprobs(batch)  # (B, T) or None
    with timed("adv"):
        targets = make_targets(batch, config, old, values, reference, kl_coef=kl.coef)
        has_signal = has_learning_signal(batch, config.algorithm, targets)
    return targets, {DEAD_STEP: float(not has_signal)}


def learn(
    learner: Learner,
    batch: Batch,
    targets: Targets,
    kl: KLController,
    step: int,
    check: Check | None = None,
) -> tuple[dict[str, float], Learned]:
    """Update the weights, and adjust the weight of a KL penalty in the reward for the next step.

    Args:
        learner: the models, at the start of the step.
        batch: the step's rollouts.
        targets: the result of `compute_targets`.
        kl: the weight of a KL penalty in the reward.
        step: the number of the step, from 1.
        check: see `Learner.update`.

    Returns:
        The metrics of the update, and the numbers that it used for each token.

    Raises:
        RunStopped: see `Learner.update`.
    """
    algorithm = learner.config.algorithm
    learns_policy = step > algorithm.critic_only_steps
    metrics, learned = learner.update(batch, targets, step, check, learn_policy=learns_policy)
    old, reference = targets.old_logprobs, targets.reference_logprobs
    if kl.coef and learns_policy and old is not None and reference is not None:
        nats, coef = rollout_kl(batch, old, reference, algorithm.kl_type), kl.coef
        kl.update(nats, int(batch.train.sum()))
        metrics |= {"actor/reward_kl_penalty": nats, "actor/reward_kl_penalty_coeff": coef}
    return metrics, learned
