"""One training step, from rows to the update.

    rows ─► groups of scored trajectories ─► Batch ─► Targets ─► new weights

`Run` commits the step, publishes the weights, validates, records and saves. A replay
(`agentrl.replay.replay`) calls `compute_targets` and `learn` with recorded rollouts. So it runs
the code of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from agentrl.learner.algorithms import KLController, has_learning_signal, make_targets, rollout_kl
from agentrl.learner.batch import Batch, Targets, collate
from agentrl.learner.learner import Check, Learned, Learner
from agentrl.learner.mismatch import mean_drift
from agentrl.metrics import DEAD_STEP
from agentrl.trainer.parts import MadeStep, Parts, RunState
from agentrl.trainer.profile import annotate_episodes
from agentrl.trainer.recorded import RecordedStream
from agentrl.trainer.stream import StepRollouts

Timed = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager that measures the time of a part of the step, by its name."""


def train_step(parts: Parts, state: RunState) -> MadeStep:
    """Play the next rows and update the weights. The caller commits the step.

    A signal may stop the rollouts at any moment. From the update on, the weights are no longer
    those of the state, which `is_consistent` says.

    Args:
        parts: the parts of the run.
        state: the state before the step.

    Raises:
        RunStopped: too many episodes were dropped, engine and trainer disagree, or a number of the
            update is not finite.
    """
    step, learner, timed = state.step + 1, parts.learner, parts.clock.timed

    with timed("gen"), parts.interrupt.abandonable():
        rollouts = parts.stream.take(state.position, state.step)
    if not parts.stream.plays_ahead:
        parts.engine.sleep()
    with timed("store"):
        _store(parts, step, rollouts)
    with timed("metrics"):
        metrics = rollouts.metrics()

    with timed("collate"):
        batch = collate(rollouts.groups, parts.pad_id, parts.config.reward)  # (B, T)
    teacher = None
    if parts.teacher is not None:
        with timed("teacher"), parts.interrupt.abandonable():
            teacher = parts.teacher.logprobs(batch, rollouts.groups)  # (B, T)
    targets, signal = compute_targets(learner, batch, state.kl, timed, teacher)

    def check(compared: Mapping[str, float]) -> None:
        state.is_consistent = True  # The learner has not changed any weight yet.
        parts.guard.check(compared)
        state.is_consistent = False

    parts.engine.weights_moving()
    state.is_consistent = False
    with timed("update_actor"):
        parts.guard.drift = mean_drift(batch, parts.publisher.drifts)
        if isinstance(parts.stream, RecordedStream):
            parts.guard.drift = math.inf  # `RecordedStream.verify` compared each answer.
        updated, learned = learn(learner, batch, targets, state.kl, step, check)

    episodes = rollouts.groups[0].scored if rollouts.groups else ()
    table = partial(learned.table, batch)
    played = rollouts.position, rollouts.successes
    return MadeStep(*played, metrics | signal | updated, episodes, table)


def _store(parts: Parts, step: int, rollouts: StepRollouts) -> None:
    """Store the rollouts of the step, in the background.

    If a file of the last step could not be written, this raises, and the state is still that of the
    last step.
    """
    annotate_episodes("episodes", [*rollouts.groups, *rollouts.evicted, *rollouts.greedy])
    parts.store.write(step, rollouts.groups)
    for split, groups in (("evicted", rollouts.evicted), ("baseline", rollouts.greedy)):
        if groups:
            parts.store.write(step, groups, split=split)


def compute_targets(
    learner: Learner,
    batch: Batch,
    kl: KLController,
    timed: Timed = lambda name: nullcontext(),
    teacher_logprobs: Tensor | None = None,
) -> tuple[Targets, dict[str, float]]:
    """Run the forward passes that the algorithm needs, and compute the targets of the update.

    Args:
        learner: the models, at the start of the step.
        batch: the step's rollouts.
        kl: the present weight of a KL penalty in the reward.
        timed: measures the parts `ref`, `values`, `old_log_prob` and `adv`.
        teacher_logprobs: (B, T), of the teacher; None without a teacher.

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
        targets = make_targets(
            batch,
            config,
            old,
            values,
            reference,
            kl_coef=kl.coef,
            teacher_logprobs=teacher_logprobs,
        )
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
