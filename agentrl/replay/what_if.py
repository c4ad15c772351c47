"""A recorded step under another advantage estimator, other rewards or another loss.

The rollouts are those that were recorded. Advantages follow from them without a model, unless the
estimator needs a critic's values or the rewards have a KL penalty. Gradients are those at the
weights before the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.config import Config
from agentrl.config.teacher import TeacherConfig
from agentrl.errors import ConfigError, UserError
from agentrl.learner.algorithms import KLController, dead_groups, estimate, make_targets
from agentrl.learner.batch import Batch, Targets, collate
from agentrl.learner.learner import Learner
from agentrl.plural import format_steps
from agentrl.replay.replay import Replay, Replayer, load_names
from agentrl.report.rescore import REWARD_KEYS, Rescoring, recompute
from agentrl.report.run import StepGroups
from agentrl.trainer.step import compute_targets
from agentrl.trajectory import Group

ADVANTAGE_KEYS = (
    "algorithm.name", "algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam",
    "algorithm.norm_adv_by_std", "algorithm.whiten_advantages",
    "algorithm.kl_type", "algorithm.kl_reward_coef", "teacher.weight", "teacher.clip", *REWARD_KEYS,
)  # fmt: skip
"""The keys that change advantages."""
LOSS_KEYS = (
    "algorithm.policy_loss", "algorithm.loss_agg_mode", "algorithm.loss_scale",
    "algorithm.kl_loss_coef", "algorithm.entropy_coef", "algorithm.tis_cap", "algorithm.tis_level",
    "algorithm.tis_mode", "algorithm.tis_low", "algorithm.reject_band",
)  # fmt: skip
"""The keys that change the gradient, but no advantage."""
CLIP_KEYS = (
    "algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.tau_pos",
    "algorithm.tau_neg",
)  # fmt: skip
"""The keys that have no effect on the gradient of the first pass: no ratio is clipped there."""
CREDITS = {"trajectory": "rloo", "turn": "turn_rloo", "token": "gae"}
"""The estimators whose gradients are compared, by what they give a reward to. On policy and without
whitening, the expected gradient is the same for all (GAE: with lambda 1)."""


@dataclass(frozen=True, slots=True)
class EpisodeChange:
    """An episode with its recorded and its new reward and advantage."""

    episode_id: str
    group: int
    rollout: int
    reward: float
    new_reward: float
    advantage: float
    """The mean over the tokens that the policy sampled; 0 if the episode does not train."""
    new_advantage: float
    change: float
    """The difference of the advantages. Each is divided by the root mean square over the episodes
    first, so that another scale alone is no change."""


@dataclass(frozen=True, slots=True)
class Noise:
    """A gradient, and how much it varies between draws of the step's groups."""

    norm: float
    deviation: float
    """The square root of the variance of the gradient, summed over the parameters. It is estimated
    from the gradients of the G groups: G / (G - 1) * sum of |g - mean g|². NaN for one group."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of the policy loss at the weights before the step."""

    norm: float
    """The norm of the recorded gradient, before clipping."""
    new_norm: float
    cosine: float
    """Between the recorded and the new gradient; NaN if one of them is 0."""
    credits: Mapping[str, Noise]
    """For each of `CREDITS`; without `token` if the run has no critic."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What another config or reward would have done in a recorded step."""

    groups: int
    """The number of groups, those that were set aside (`algorithm.filter_groups`) included."""
    dead: int
    """Groups without a learning signal, as recorded."""
    new_dead: int
    died: int
    """Groups that have lost their signal."""
    revived: int
    """Groups that have gained one."""
    flipped_tokens: int
    """Sampled tokens whose advantage has changed its sign."""
    tokens: int
    """The sampled tokens of the episodes that train."""
    episodes: Sequence[EpisodeChange]
    """All episodes of the groups that trained, the largest change first."""
    gradients: Gradients | None

    @property
    def flipped(self) -> list[EpisodeChange]:
        """The episodes whose advantage has changed its sign."""
        return [e for e in self.episodes if e.advantage * e.new_advantage < 0]


def what_if(
    replayer: Replayer,
    step: int,
    config: Config,
    score: Rescoring | None = None,
    *,
    gradient: bool = False,
) -> WhatIf:
    """Compare a recorded step with what it would have been under another config.

    Args:
        replayer: the run.
        step: the step.
        config: the other config; see `agentrl.report.rescore.change_config`.
        score: scores the rollouts again; None: their recorded outcomes are used.
        gradient: also compare gradients. This loads the model.

    Raises:
        UserError: the step's rollouts are not stored, or the config needs a critic that the run
            does not have.
        ReplayDiffers: the weights before the step cannot be restored.
    """
    recorded = replayer.config_at(step)
    load_names(replayer.run, config)
    if config.algorithm.critic and not recorded.algorithm.critic:
        raise ConfigError(
            "algorithm.adv_estimator=gae needs the values of a critic, and the run has none"
        )
    both = (recorded, config)
    if gradient or any(
        c.algorithm.critic or c.algorithm.kl_reward_coef or c.teacher.model for c in both
    ):
        _open(replayer, step)
    elif step not in (stored := replayer.run.store.steps("train")):
        raise UserError(
            f"the rollouts of step {step} are not stored. Stored steps: {format_steps(stored)}"
        )
    before = replayer.run.read_step(step)
    after = StepGroups(
        _change_rewards(before.groups, config, score),
        _change_rewards(before.evicted, config, score),
    )
    old = _Version(replayer, step, recorded, before)
    new = _Version(replayer, step, config, after)
    was_dead, is_dead = old.dead(), new.dead()
    mask = old.batch.action_mask & new.batch.action_mask
    flipped = (old.targets.advantages * new.targets.advantages)[mask] < 0
    return WhatIf(
        groups=len(was_dead),
        dead=int(was_dead.sum()),
        new_dead=int(is_dead.sum()),
        died=int((is_dead & ~was_dead).sum()),
        revived=int((was_dead & ~is_dead).sum()),
        flipped_tokens=int(flipped.sum()),
        tokens=int(mask.sum()),
        episodes=_compare_episodes(before.groups, old, new),
        gradients=_compare_gradients(replayer, old, new) if gradient else None,
    )


class _Version:
    """A step under one config: its batch and targets."""

    def __init__(self, replayer: Replayer, step: int, config: Config, groups: StepGroups):
        self.config, self._groups = config, groups
        self.batch = collate(groups.groups, reward=config.reward)
        self.teacher_logprobs = None
        if config.teacher.model:
            self.teacher_logprobs = replayer.teacher_logprobs(
                step, config, self.batch, groups.groups
            )
        self.targets = _targets(replayer, config, self.batch, self.teacher_logprobs)

    def dead(self) -> Tensor:
        """Return which groups have no learning signal from rewards, (G,) bool."""
        groups = self._groups
        batch = collate([*groups.groups, *groups.evicted], reward=self.config.reward)
        # Groups are set aside only in runs without a critic.
        advantages, _ = estimate(batch, self.config.algorithm, self.targets.values)
        return dead_groups(batch, advantages)

    def advantages(self) -> Tensor:
        """Return the mean advantage of each rollout's tokens, (R,); 0 if it does not train."""
        batch, mask = self.batch, self.batch.action_mask
        owner = batch.rollout[mask.nonzero()[:, 0]]
        sums = torch.zeros(len(batch.rewards), dtype=torch.float64)
        sums.index_add_(0, owner, self.targets.advantages[mask].double())
        return sums / torch.bincount(owner, minlength=len(sums)).clamp(min=1)


def _open(replayer: Replayer, step: int) -> None:
    """Restore the weights before a step."""
    steps = []
    for between, differences, compared in replayer.open(step):
        steps.append(between)
        Replay(replayer.start, steps, 0.0, compared, differences).raise_differences()
    replayer.prepare(step)


def _targets(
    replayer: Replayer, config: Config, batch: Batch, teacher_logprobs: Tensor | None
) -> Targets:
    if not replayer.is_open:
        return make_targets(batch, config, None, None, None)
    learner = replayer.learner
    kl, coef = replayer.kl, config.algorithm.kl_reward_coef
    if coef != learner.config.algorithm.kl_reward_coef:
        kl = KLController(config.algorithm)
    with learner.use(config):
        return compute_targets(learner, batch, kl, teacher_logprobs=teacher_logprobs)[0]


def _change_rewards(
    groups: Sequence[Group], config: Config, score: Rescoring | None
) -> Sequence[Group]:
    """Return groups with the rewards of a config."""
    if score is not None:
        return score(groups, True)
    return [
        replace(
            group,
            scored=tuple(recompute(s, config) for s in group.scored),
            greedy=recompute(group.greedy, config) if group.greedy else None,
        )
        for group in groups
    ]


def _compare_episodes(groups: Sequence[Group], old: _Version, new: _Version) -> list[EpisodeChange]:
    advantages = [version.advantages() for version in (old, new)]
    scales = [a.square().mean().sqrt().item() or 1.0 for a in advantages]
    trajectories = [s.trajectory for group in groups for s in group.scored]
    index = old.batch.group.tolist()
    columns = [x.tolist() for x in (old.batch.rewards, new.batch.rewards, *advantages)]
    changes = [
        EpisodeChange(
            trajectory.episode_id,
            group,
            trajectory.rollout,
            reward,
            new_reward,
            advantage,
            new_advantage,
            new_advantage / scales[1] - advantage / scales[0],
        )
        for trajectory, group, reward, new_reward, advantage, new_advantage in zip(
            trajectories, index, *columns, strict=True
        )
    ]
    return sorted(changes, key=lambda e: -abs(e.change))


# --- gradients -----------------------------------------------------------------------------------


def _compare_gradients(replayer: Replayer, old: _Version, new: _Version) -> Gradients:
    learner = replayer.learner
    first, second = (_gradient(learner, version) for version in (old, new))
    norm, new_norm = math.sqrt(_dot(first, first)), math.sqrt(_dot(second, second))
    product = norm * new_norm
    credits = {}
    for name, estimator in CREDITS.items():
        if estimator != "gae" or old.config.algorithm.critic:
            credits[name] = _noise(learner, _targets_of_credit(replayer, new, estimator))
    cosine = _dot(first, second) / product if product else math.nan
    return Gradients(norm, new_norm, cosine, credits)


def _gradient(learner: Learner, version: _Version) -> dict[str, Tensor]:
    with learner.use(version.config):
        return learner.gradient(version.batch, version.targets)


def _targets_of_credit(
    replayer: Replayer, version: _Version, estimator: str
) -> tuple[Config, Batch, Targets]:
    """Return a step's targets under an estimator, as an estimate of the plain policy gradient."""
    config = version.config.with_values(
        "algorithm",
        adv_estimator=estimator,
        policy_loss="vanilla",
        loss_agg_mode="seq-mean-token-sum",
        whiten_advantages=False,
        gamma=1.0,
        kl_loss_coef=0.0,
        entropy_coef=0.0,
        mini_batch_size=0,
    )
    config = config.model_copy(update={"teacher": TeacherConfig()})
    return config, version.batch, _targets(replayer, config, version.batch, None)


def _noise(learner: Learner, step: tuple[Config, Batch, Targets]) -> Noise:
    """Return the norm of a gradient and its deviation, from one backward pass for each group."""
    config, batch, targets = step
    count = int(batch.group.max()) + 1
    total: dict[str, Tensor] = {}
    squares = 0.0
    with learner.use(config):
        for group in range(count):
            part = learner.gradient(batch, targets, batch.group[batch.rollout] == group)
            squares += _dot(part, part)
            for name, gradient in part.items():
                total[name] = total[name] + gradient if name in total else gradient
    square = _dot(total, total)
    spread = max(0.0, squares - square / count)
    deviation = math.sqrt(count / (count - 1) * spread) if count > 1 else math.nan
    return Noise(math.sqrt(square), deviation)


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the inner product of two gradients; a parameter that one of them lacks counts as 0."""
    return sum((a[name].double() * b[name].double()).sum().item() for name in a.keys() & b.keys())
