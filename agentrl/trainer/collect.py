"""The rollouts of a step: rows are played until enough groups have a learning signal.

    rows ─► a round of groups ─► live ones, until there are `data.batch_size` ─► StepRollouts
                      └────────► dead ones, evicted: all their advantages are exactly 0

A step without `algorithm.filter_groups` is one round of `data.batch_size` rows and uses all groups.
With it (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) further rows replace dead groups.
The run's own estimator decides which groups are dead. It uses only the rewards, which are known
when a group is finished. An estimator that needs more (a critic's values, a KL penalty in the
reward) or compares rollouts of different rows cannot be combined with `filter_groups`
(`agentrl.config.checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config import Config
from agentrl.data import row_order
from agentrl.engine.base import Sampling
from agentrl.metrics import rollout_metrics
from agentrl.rollout import Rollouts
from agentrl.trainer.algorithms import dead_groups, estimate
from agentrl.trainer.batch import Batch
from agentrl.trajectory import Group, Sample


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """All rollouts of a step; groups in the order of their rows."""

    groups: Sequence[Group]
    """The groups that train: at most `data.batch_size` live ones; dead ones only if none is live.
    """
    evicted: Sequence[Group]
    """The groups that do not train: dead ones, and live ones beyond `data.batch_size`."""
    position: int
    """The number of rows that the run has taken, including those of this step."""
    filter_metrics: Mapping[str, float]
    """Metrics of `algorithm.filter_groups`; empty without it."""

    def metrics(self) -> dict[str, float]:
        """Compute the metrics over all groups.

        Evicted ones are included, so that rewards do not depend on which groups are evicted.
        """
        return rollout_metrics([*self.groups, *self.evicted]) | dict(self.filter_metrics)

    @property
    def greedy(self) -> list[Group]:
        """The greedy rollouts, as groups of one."""
        every = (*self.groups, *self.evicted)
        return [Group(g.sample, (g.greedy,)) for g in every if g.greedy]


class Collector:
    """Plays the rows of a step."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[Sample],
        rollouts: Rollouts,
        collate: Callable[[Sequence[Group]], Batch],
    ):
        """Create a collector; nothing is played yet.

        Args:
            config: the run's config.
            rows: all training rows.
            rollouts: plays the rows.
            collate: makes the batch that the estimator gets.
        """
        self._algorithm = config.algorithm
        self._rows, self._rollouts, self._collate = rows, rollouts, collate
        self._order = row_order(rows, config.trainer.seed, config.data.shuffle)
        self._n = config.rollout.n
        self._sampling = Sampling(temperature=config.rollout.temperature)
        self._greedy = self._algorithm.adv_estimator == "remax"
        self._batch_size = self._round_size = config.data.batch_size
        self._max_rounds = 1
        if self._algorithm.filter_groups:
            self._round_size = config.data.gen_batch_size or self._batch_size
            self._max_rounds = self._algorithm.max_gen_batches

    def collect(self, position: int, step: int) -> StepRollouts:
        """Play the rows of one step, and choose the groups that train.

        Args:
            position: the number of rows that the run has taken before this step.
            step: the number of steps that the run has made; it determines the random numbers.

        Raises:
            RunStopped: too many rollouts were dropped.
            UserCodeError: a reward raised.
        """
        samples_so_far: list[Sample] = []
        groups: list[Group] = []
        live: list[bool] = []
        rounds = 0
        while sum(live) < self._batch_size and rounds < self._max_rounds:
            indices = self._order.take(position + len(samples_so_far), self._round_size)
            samples = [self._rows[index] for index in indices]
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
            live += self._find_live(new_groups)
            rounds += 1
        # In the order of rows, not in that of completion, so that short rollouts have no advantage.
        chosen = [i for i, lives in enumerate(live) if lives] or list(range(len(groups)))
        chosen = chosen[: self._batch_size]
        evicted = [group for i, group in enumerate(groups) if i not in chosen]
        metrics = {}
        if self._algorithm.filter_groups:
            metrics = _filter_metrics(evicted, live, rounds)
        position += len(samples_so_far)
        return StepRollouts([groups[i] for i in chosen], evicted, position, metrics)

    def _find_live(self, groups: Sequence[Group]) -> list[bool]:
        """Return which groups have an advantage that is not exactly 0.

        Without `filter_groups` all groups count as live.
        """
        if not groups or not self._algorithm.filter_groups:
            return [True] * len(groups)
        batch = self._collate(groups)
        advantages, _ = estimate(batch, self._algorithm)
        return (~dead_groups(batch, advantages)).tolist()


def _filter_metrics(evicted: Sequence[Group], live: list[bool], rounds: int) -> dict[str, float]:
    """Return the metrics of filtering; `evicted_samples` counts rollouts."""
    return {
        "training/filter_groups/rounds": float(rounds),
        "training/filter_groups/live": float(sum(live)),
        "training/filter_groups/dead": float(len(live) - sum(live)),
        "training/filter_groups/evicted_samples": float(sum(len(g.scored) for g in evicted)),
    }
