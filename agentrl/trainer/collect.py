"""What a step learns from: rows are played until enough of their groups can teach something.

    rows ─► a round of groups ─► live ones, until there are `data.batch_size` ─► Played
                      └────────► dead ones, set aside: their advantages are all exactly 0

A step without `algorithm.filter_groups` is one round of `data.batch_size` rows and takes what comes
of it. With it (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) rows further on take the
places of dead groups. Which are dead the run's own estimator says, of what is known as soon as a
group was played: its rewards. An estimator that needs more (a critic's values, a KL in the reward)
or compares rollouts of different rows is refused beside it (`agentrl.config.checks`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config import Config
from agentrl.config.sections import BUDGETS
from agentrl.data import RowOrder
from agentrl.engine.base import Sampling
from agentrl.metrics import rollout_metrics
from agentrl.rollout import Rollouts
from agentrl.trainer.algorithms import dead_groups, estimate
from agentrl.trainer.batch import Batch
from agentrl.trajectory import Group, Sample

log = logging.getLogger("agentrl")


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """All that was played for a step, by what becomes of it; groups in the order of their rows."""

    groups: Sequence[Group]
    """What trains: at most `data.batch_size` live groups; dead ones only where none was live."""
    evicted: Sequence[Group]
    """What does not: dead groups, and live ones of which there were enough already."""
    position: int
    """How many rows the run has taken, these included."""
    metrics: dict[str, float]
    """Of trained and evicted rollouts together: rewards mean the same whatever is set aside."""

    @property
    def greedy(self) -> list[Group]:
        """The greedy rollouts, as groups of one."""
        every = (*self.groups, *self.evicted)
        return [Group(g.sample, (g.greedy,)) for g in every if g.greedy]


class Collector:
    """Plays a step's rows."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[Sample],
        rollouts: Rollouts,
        collate: Callable[[Sequence[Group]], Batch],
    ):
        """Nothing is played yet.

        Args:
            config: the run's.
            rows: all that it trains on.
            rollouts: who plays.
            collate: makes a batch, for the estimator to judge.
        """
        self._algorithm = config.algorithm
        self._rows, self._rollouts, self._collate = rows, rollouts, collate
        self._order = RowOrder(len(rows), config.trainer.seed, config.data.shuffle)
        self._n = config.rollout.n
        self._sampling = Sampling(temperature=config.rollout.temperature)
        self._greedy = self._algorithm.adv_estimator == "remax"
        self._batch_size = self._round_size = config.data.batch_size
        self._max_rounds = 1
        if self._algorithm.filter_groups:
            self._round_size = config.data.gen_batch_size or self._batch_size
            self._max_rounds = self._algorithm.max_gen_batches

    def collect(self, position: int, step: int) -> StepRollouts:
        """Play rows from a position on.

        Args:
            position: how many rows the run has taken.
            step: how many steps it has made; keys the random numbers.

        Raises:
            RunStopped: too many rollouts were dropped.
            UserCodeError: a reward raised.
        """
        samples_so_far: list[Sample] = []
        groups: list[Group] = []
        live: list[bool] = []
        rounds = 0
        while sum(live) < self._batch_size and rounds < self._max_rounds:
            places = self._order.take(position + len(samples_so_far), self._round_size)
            samples = [self._rows[place] for place in places]
            new_groups = self._rollouts.collect(
                samples,
                n=self._n,
                sampling=self._sampling,
                step=step,
                earlier=samples_so_far,
                greedy=self._greedy,
            )
            samples_so_far += samples
            groups += new_groups
            live += self._live(new_groups)
            rounds += 1
        # In the order of rows, not in that in which they were done: short ones have no privilege.
        chosen = [i for i, lives in enumerate(live) if lives] or list(range(len(groups)))
        chosen = chosen[: self._batch_size]
        evicted = [group for i, group in enumerate(groups) if i not in chosen]
        metrics = rollout_metrics(groups)
        if self._algorithm.filter_groups:
            metrics |= _filter_metrics(evicted, live, rounds)
        if groups and not any(live):
            log.warning(
                "step %d: in none of %d groups did rollouts differ in what they earned: there is"
                " nothing to learn from",
                step + 1,
                len(groups),
            )
        position += len(samples_so_far)
        return StepRollouts([groups[i] for i in chosen], evicted, position, metrics)

    def _live(self, groups: Sequence[Group]) -> list[bool]:
        """Which groups have an advantage that is not exactly 0; all, where none is set aside."""
        if not groups or not self._algorithm.filter_groups:
            return [True] * len(groups)
        batch = self._collate(groups)
        advantages, _ = estimate(batch, self._algorithm)
        return (~dead_groups(batch, advantages)).tolist()


def _filter_metrics(
    evicted: Sequence[Group], live: Sequence[bool], rounds: int
) -> dict[str, float]:
    """How groups were chosen; `evicted_samples` counts rollouts."""
    return {
        "training/filter_groups/rounds": float(rounds),
        "training/filter_groups/live": float(sum(live)),
        "training/filter_groups/dead": float(len(live) - sum(live)),
        "training/filter_groups/evicted_samples": float(sum(len(g.scored) for g in evicted)),
    }


# --- steps without a learning signal -----------------------------------------------------------


MAX_DEAD_STEPS = 3
"""Dead steps in a row before a warning. One or two are chance where batches are small."""
DEAD_STEP = "waste/dead_step"
"""The metric: 1 for a dead step, else 0."""
DEAD_GROUPS = "waste/dead_group_frac"
STOP = "stop/"


class DeadSteps:
    """The dead steps of a run so far: several in a row are worth a warning.

    Such a run looks like a slow one. A step is dead if no token has an advantage from the rewards
    (`has_learning_signal`): all its rollouts are masked by their budget's policy, or all rewards of every
    group are equal. Then the policy stays, or only a KL or an entropy bonus moves it.
    """

    def __init__(self, record: Iterable[tuple[int, Mapping[str, Any]]]):
        """Continue a run's record; its steps give no warning again.

        Args:
            record: steps with their metrics, as `read_metrics` returns them.
        """
        self._steps = self._dead = self._in_a_row = 0
        self._has_warned = False
        self._sums: Counter[str] = Counter()
        """Over the dead steps: the share of dead groups, and of each stop reason."""
        for _, metrics in record:
            self._add(metrics)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Count a step, and warn at the `MAX_DEAD_STEPS`-th dead one in a row."""
        self._add(metrics)
        if metrics.get(DEAD_STEP) and self._in_a_row == MAX_DEAD_STEPS:
            first = step - MAX_DEAD_STEPS + 1
            log.warning(
                f"steps %d to %d had no learning signal ({DEAD_STEP}): %s",
                first,
                step,
                _explain(metrics, 1),
            )

    def finish(self) -> None:
        """Log at the end of a run how many steps were dead, if a warning was due or all were."""
        if self._has_warned or 0 < self._steps == self._dead:
            log.warning(
                f"%d of %d steps had no learning signal ({DEAD_STEP}): on average %s",
                self._dead,
                self._steps,
                _explain(self._sums, self._dead),
            )

    def _add(self, metrics: Mapping[str, Any]) -> None:
        if DEAD_STEP not in metrics:  # a validation before the first step
            return
        self._steps += 1
        if not metrics[DEAD_STEP]:
            self._in_a_row = 0
            return
        self._dead += 1
        self._in_a_row += 1
        self._has_warned |= self._in_a_row == MAX_DEAD_STEPS
        for name, value in metrics.items():
            if name == DEAD_GROUPS or name.startswith(STOP):
                self._sums[name] += value


def _explain(sums: Mapping[str, Any], steps: int) -> str:
    """Return what the rollouts of dead steps have in common, and what may help.

    Args:
        sums: of the metrics of so many steps.
        steps: the number of steps.
    """
    stops = {name: value for name, value in sums.items() if name.startswith(STOP)}
    most = max(stops, key=stops.__getitem__, default=STOP)
    reason = most.removeprefix(STOP)
    equal = sums.get(DEAD_GROUPS, 0.0) / steps
    masked, advice = "", ""
    if equal < 0.995:  # a step without a learning signal has no other groups
        masked = ", rollouts of the others are masked by rollout.budget_policy"
    if reason in BUDGETS:
        advice = f" Raise the budget {reason!r}"
        advice += f", or set rollout.budget_policy.{reason}=keep." if masked else "."
    return (
        f"all rewards are equal in {equal:.0%} of the groups{masked}, and the"
        f" most frequent stop reason is {reason or 'unknown'!r}"
        f" ({stops.get(most, 0.0) / steps:.0%} of the rollouts). Read some trajectories. If all"
        " rollouts fail, or all succeed, choose easier or harder rows, or a reward with more than"
        f" two values.{advice}"
    )
