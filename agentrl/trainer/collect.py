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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.config import Config
from agentrl.data import RowOrder
from agentrl.engine.base import Sampling
from agentrl.metrics import rollout_metrics
from agentrl.rollout import Rollouts
from agentrl.trainer.advantages import dead_groups
from agentrl.trainer.algorithms import estimate
from agentrl.trainer.batch import Batch
from agentrl.trajectory import Group, Sample

log = logging.getLogger("agentrl")


@dataclass(frozen=True, slots=True)
class Played:
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
        self._wanted = self._at_a_time = config.data.batch_size
        self._most_rounds = 1
        if self._algorithm.filter_groups:
            self._at_a_time = config.data.gen_batch_size or self._wanted
            self._most_rounds = self._algorithm.max_gen_batches

    def collect(self, position: int, step: int) -> Played:
        """Play rows from a position on.

        Args:
            position: how many rows the run has taken.
            step: how many steps it has made; keys the random numbers.

        Raises:
            RunStopped: too many rollouts were dropped.
            UserCodeError: a reward raised.
        """
        taken: list[Sample] = []
        groups: list[Group] = []
        live: list[bool] = []
        rounds = 0
        while sum(live) < self._wanted and rounds < self._most_rounds:
            places = self._order.take(position + len(taken), self._at_a_time)
            samples = [self._rows[place] for place in places]
            found = self._rollouts.collect(
                samples,
                n=self._n,
                sampling=self._sampling,
                step=step,
                earlier=taken,
                greedy=self._greedy,
            )
            taken += samples
            groups += found
            live += self._live(found)
            rounds += 1
        # In the order of rows, not in that in which they were done: short ones have no privilege.
        chosen = [i for i, lives in enumerate(live) if lives] or list(range(len(groups)))
        chosen = chosen[: self._wanted]
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
        position += len(taken)
        return Played([groups[i] for i in chosen], evicted, position, metrics)

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
