"""The rollouts of a step: rows are drawn and played until enough groups have a learning signal.

    draws ─► groups ─► live ones, until there are `data.batch_size` ─► StepRollouts
                └────► dead ones, evicted: all their advantages are exactly 0

A step without `algorithm.filter_groups` takes `data.batch_size` draws and uses all their groups.
With it (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) further draws replace dead groups.
The run's own estimator decides which groups are dead. It uses only the rewards, which are known
when a group is finished. An estimator that needs more (a critic's values, a KL penalty in the
reward) or compares rollouts of different rows cannot be combined with `filter_groups`
(`agentrl.config.checks`).

With `trainer.max_staleness` = 0, `take` plays the draws, and nothing is played between two steps.
With k > 0, draws are started before they are taken. A draw is started as soon as it is certain that
its tokens are at most k versions old when its group is taken:

    draws  0 ... p              p + B              p + 2 B          (batch size B, k = 1)
           taken | step s takes | step s + 1 takes |
                                                   └ version s starts no draw after this

Groups are taken in the order of draws, whichever ends first. So no rollout is dropped for its age.
Long rollouts are trained on as often as they are drawn. A run that resumes at a position plays the
same draws again.
"""

from __future__ import annotations

import math
import threading
import time
from asyncio import Semaphore
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from agentrl.config import Config
from agentrl.data import Curriculum, row_order
from agentrl.engine.base import Sampling
from agentrl.evaluate import accuracy
from agentrl.learner.algorithms import dead_groups, estimate
from agentrl.learner.batch import collate
from agentrl.metrics import mean, rollout_metrics
from agentrl.rollout import NO_LIMIT, PlayedSample, Rollouts, stop_if_too_many_dropped
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
    stream_metrics: Mapping[str, float]
    """Metrics of `algorithm.filter_groups` and `trainer.max_staleness`; empty without them."""

    def metrics(self) -> dict[str, float]:
        """Compute the metrics over all groups.

        Evicted ones are included, so that rewards do not depend on which groups are evicted.
        """
        return rollout_metrics([*self.groups, *self.evicted]) | dict(self.stream_metrics)

    @property
    def successes(self) -> list[tuple[int, float]]:
        """The mean `accuracy` of each group that was played, with the index of its row."""
        every = (*self.groups, *self.evicted)
        return [(g.sample.row, mean([accuracy(s) for s in g.scored])) for g in every]

    @property
    def greedy(self) -> list[Group]:
        """The greedy rollouts, as groups of one."""
        every = (*self.groups, *self.evicted)
        return [Group(g.sample, (g.greedy,)) for g in every if g.greedy]


class RolloutStream:
    """Plays the rows of a run, and returns those of each step."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[Sample],
        rollouts: Rollouts,
        *,
        total_steps: int,
        pad_id: int = 0,
    ):
        """Create a stream; nothing is played yet.

        Args:
            config: the run's config.
            rows: all training rows.
            rollouts: plays the rows.
            total_steps: the steps of the whole run; no draw is started for a step after the last.
            pad_id: the padding token of the batches that the estimator gets.
        """
        self._algorithm = config.algorithm
        self._rows, self._rollouts = rows, rollouts
        self._pad_id, self._reward = pad_id, config.reward
        self._order = row_order(rows, config.trainer.seed, config.data.shuffle)
        self.curriculum: Curriculum | None = None
        """Draws the rows with `data.curriculum`."""
        if settings := config.data.curriculum:
            self._order = self.curriculum = Curriculum(self._order, **settings.model_dump())
        self._n = config.rollout.n
        r = config.rollout
        self._sampling = replace(
            Sampling.of(r),
            returns_kept=r.is_truncated,
            experts_from=0 if r.router_replay else None,
        )
        self._greedy = self._algorithm.adv_estimator == "remax"
        self._batch_size = self._round_size = config.data.batch_size
        max_rounds = 1
        if self._algorithm.filter_groups:
            self._round_size = config.data.gen_batch_size or self._batch_size
            max_rounds = self._algorithm.max_gen_batches
        self._max_draws = self._round_size * max_rounds
        self._max_staleness = config.trainer.max_staleness
        self._total_steps = total_steps
        self._position = 0
        """The number of draws that earlier steps have taken."""
        self._next = 0
        """The position of the next draw to start."""
        self._started: deque[Future[PlayedSample]] = deque()
        """The draws that were started and not yet taken, in order."""
        limit = config.rollout.max_in_flight // (self._n + self._greedy)
        self._slots = Semaphore(limit) if limit else NO_LIMIT
        self._waits = WaitMeter(limit or math.inf)
        self._reprefilled = 0
        """`async/reprefill_tokens` of all earlier steps."""

    @property
    def plays_ahead(self) -> bool:
        """True if rollouts go on while the trainer works on those that it has taken."""
        return self._max_staleness > 0

    def take(self, position: int, step: int) -> StepRollouts:
        """Return the rollouts of one step, and choose the groups that train.

        Args:
            position: the number of rows that the run has taken before this step.
            step: the number of steps that the run has made. It is the version of the policy, and
                determines the random numbers of rollouts that are played now.

        Raises:
            RunStopped: too many rollouts were dropped, or every agent failed.
            UserCodeError: a reward raised.
        """
        self._position = position
        groups, live, draws = self._take_started(step) if self.plays_ahead else self._play(step)
        self._position += draws
        # In the order of rows, not in that of completion, so that short rollouts have no advantage.
        chosen = [i for i, lives in enumerate(live) if lives] or list(range(len(groups)))
        chosen = chosen[: self._batch_size]
        trained = [groups[i] for i in chosen]
        evicted = [group for i, group in enumerate(groups) if i not in chosen]
        metrics: dict[str, float] = {}
        if self._algorithm.filter_groups:
            metrics |= _filter_metrics(evicted, live, math.ceil(draws / self._round_size))
        if self.plays_ahead:
            metrics |= staleness_metrics(trained, step) | self._waits.metrics()
            total = self._rollouts.reprefill_tokens()
            metrics["async/reprefill_tokens"] = float(total - self._reprefilled)
            self._reprefilled = total
        return StepRollouts(trained, evicted, self._position, metrics)

    def advance(self, step: int) -> None:
        """Start the draws that a version of the policy may play. The engine must have this version.

        Args:
            step: the number of steps that the run has made, which is the version.
        """
        if self.plays_ahead and step < self._total_steps:
            self._start_draws(step)

    def close(self) -> None:
        """Cancel the rollouts that were started and not taken. Idempotent."""
        for future in self._started:
            future.cancel()
        self._started.clear()

    def _play(self, step: int) -> tuple[list[Group], list[bool], int]:
        """Play rounds of draws until enough groups are live.

        Returns:
            The groups, which of them are live, and the number of draws.
        """
        samples: list[Sample] = []
        groups: list[Group] = []
        live: list[bool] = []
        while sum(live) < self._batch_size and len(samples) < self._max_draws:
            drawn = self._draw(self._position + len(samples), self._round_size)
            played = self._rollouts.collect(
                drawn,
                n=self._n,
                sampling=self._sampling,
                step=step,
                earlier=samples,
                greedy=self._greedy,
            )
            samples += drawn
            groups += played
            live += self._find_live(played)
        return groups, live, len(samples)

    def _take_started(self, step: int) -> tuple[list[Group], list[bool], int]:
        """Wait for started draws, in order, until enough groups are live; see `_play`."""
        played: list[PlayedSample] = []
        groups: list[Group] = []
        live: list[bool] = []
        if not self._started:  # The first step of this process.
            self._next = self._position
            self._waits.restart()
        while sum(live) < self._batch_size and len(played) < self._max_draws:
            self._start_draws(step, spare=len(played) - sum(live))
            with self._waits.waiting():
                played.append(self._rollouts.wait(self._started[0]))
            self._started.popleft()
            if (group := played[-1].group) is not None:
                groups.append(group)
                live += self._find_live([group])
            if len(played) >= self._batch_size:
                stop_if_too_many_dropped(played)
                self._rollouts.stop_if_agents_fail()
        return groups, live, len(played)

    def _start_draws(self, step: int, spare: int = 0) -> None:
        """Start all draws that will be taken at most `max_staleness` steps after `step`.

        The next step to take draws takes `batch_size` live ones and the dead ones among them, at
        most `max_draws`. Each later step takes at least `batch_size` draws.

        Args:
            step: the version of the policy.
            spare: how many of the draws that the current step has taken are dead or dropped.
        """
        end = self._position + min(self._batch_size + spare, self._max_draws)
        end += min(self._max_staleness, self._total_steps - step - 1) * self._batch_size
        for sample in self._draw(self._next, max(0, end - self._next)):
            future = self._rollouts.start(
                sample,
                n=self._n,
                sampling=self._sampling,
                position=self._next,
                greedy=self._greedy,
                slots=self._slots,
            )
            self._next += 1
            self._started.append(future)
            self._waits.add(1)
            future.add_done_callback(lambda _: self._waits.add(-1))

    def _draw(self, position: int, count: int) -> list[Sample]:
        """Return the rows of `count` draws, from a position on."""
        return [self._rows[index] for index in self._order.take(position, count)]

    def _find_live(self, groups: Sequence[Group]) -> list[bool]:
        """Return which groups have an advantage that is not exactly 0.

        Without `filter_groups` all groups count as live.
        """
        if not groups or not self._algorithm.filter_groups:
            return [True] * len(groups)
        batch = collate(groups, self._pad_id, self._reward)
        advantages, _ = estimate(batch, self._algorithm)
        return (~dead_groups(batch, advantages)).tolist()


class WaitMeter:
    """Measures how long learner and engines wait for each other."""

    def __init__(self, limit: float):
        """Start with no group in flight.

        Args:
            limit: the most groups that are played at the same time; further ones wait.
        """
        self._limit = limit
        self._lock = threading.Lock()
        self._in_flight = 0
        self.restart()

    def restart(self) -> None:
        """Set all sums to 0."""
        self._start = self._since = time.monotonic()
        self._sum = self._idle = self._waited = 0.0

    def add(self, groups: int) -> None:
        """Add to the number of groups that are played or wait. Any thread may call it."""
        with self._lock:
            now = time.monotonic()
            self._sum += min(self._in_flight, self._limit) * (now - self._since)
            self._idle += (now - self._since) if not self._in_flight else 0.0
            self._since = now
            self._in_flight += groups

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time in which the learner waits within this block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call.

        Returns:
            `async/in_flight`: the mean number of groups that were being played;
            `async/wait_engines`: the seconds in which the learner waited for rollouts;
            `async/wait_learner`: the seconds in which no rollout was played, because all draws that
            the version of the policy may play had ended.
        """
        self.add(0)
        with self._lock:
            seconds = max(self._since - self._start, 1e-9)
            metrics = {
                "async/in_flight": self._sum / seconds,
                "async/wait_engines": self._waited,
                "async/wait_learner": self._idle,
            }
            self.restart()
        return metrics


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return how many versions older than the policy the sampled tokens are.

    Args:
        groups: the groups that train.
        version: the version of the policy that is trained.

    Returns:
        `staleness/mean` and `staleness/max`; nothing for no token.
    """
    rows = [segment for g in groups for s in g.scored for segment in s.trajectory.segments]
    sampled = [v[v >= 0] for row in rows if len(v := np.frombuffer(row.versions, np.int32))]
    if not sum(map(len, sampled)):
        return {}
    ages = version - np.concatenate(sampled)
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def _filter_metrics(evicted: Sequence[Group], live: list[bool], rounds: int) -> dict[str, float]:
    """Return the metrics of filtering; `evicted_samples` counts rollouts."""
    return {
        "training/filter_groups/rounds": float(rounds),
        "training/filter_groups/live": float(sum(live)),
        "training/filter_groups/dead": float(len(live) - sum(live)),
        "training/filter_groups/evicted_samples": float(sum(len(g.scored) for g in evicted)),
    }
