"""Play episodes on an asyncio event loop in a thread, or in other processes.

`Rollouts.collect` is its synchronous interface: it takes samples and returns groups of scored
trajectories. `Rollouts.start` plays one sample in the background. `agentrl.player` plays a rollout
and retries it; here too many dropped rollouts, or agents that always fail, stop the run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from agentrl import sandbox
from agentrl.agent_loops.attempt import Runtime, mix_seed
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import RunStopped
from agentrl.open_files import raise_limit
from agentrl.player import Dropped, Play, Player, Wait, collect_rarely, without_numbers
from agentrl.plural import plural
from agentrl.rewards import Scorer
from agentrl.rollout_workers.workers import (
    LocalProcess,
    RolloutWorkers,
    StartProcess,
    count_workers,
    make_settings,
)
from agentrl.tools import LocalToolbox, open_toolbox
from agentrl.trajectory import Group, Sample, Scored, Trajectory
from agentrl.workers import LoopThread, new_loop, run_all

log = logging.getLogger("agentrl")

MIN_SURVIVORS = 0.75
"""The smallest share of its rollouts that a group needs for a useful baseline."""
MAX_DROPPED = 0.05
"""The largest share of dropped rollouts in a step; with more the run stops."""
MAX_AGENT_ERRORS = 64
"""So many episodes in a row whose agents fail (`agent.on_error=zero`) stop the run."""
MAX_CAUSE = 1000
"""The stored length of a drop's cause, in characters: a dead engine's error contains its log."""
NO_LIMIT = contextlib.nullcontext()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlayedSample:
    """All rollouts of a sample, including those that were dropped."""

    sample: Sample
    n: int
    """The number of rollouts without the greedy one."""
    results: Sequence[Scored | Dropped]
    """The n rollouts, and the greedy one if it was requested."""

    @property
    def group(self) -> Group | None:
        """The group; None if more than a quarter of it was dropped, or the greedy rollout was."""
        sampled, greedy = self.results[: self.n], self.results[self.n :]
        scored = tuple(r for r in sampled if isinstance(r, Scored))
        baselines = [r for r in greedy if isinstance(r, Scored)]
        if len(scored) < math.ceil(MIN_SURVIVORS * self.n) or len(baselines) < len(greedy):
            return None
        baseline = baselines[0] if baselines else None
        return Group(self.sample, scored, self.n - len(scored), baseline, _causes_of(self.results))


def stop_if_too_many_dropped(played: Sequence[PlayedSample]) -> None:
    """Raise `RunStopped` if more than 5 % of the rollouts were dropped; it lists the causes."""
    results = [result for p in played for result in p.results]
    _stop_if_too_many_dropped([r for r in results if isinstance(r, Dropped)], len(results))


class GroupRecord(Protocol):
    """Keeps groups, so that another process does not play them again."""

    @property
    def groups(self) -> Mapping[int, Group]:
        """The groups that were played before, by the rows of their samples."""
        ...

    def add(self, group: Group) -> None:
        """Keep a group. The event loop of the rollouts calls it, so it must not block."""
        ...


@dataclass(slots=True, eq=False)
class _RolloutCount:
    """The progress of rollouts that were started together."""

    total: int
    ended: int = 0
    """The number of rollouts that have ended."""
    record: GroupRecord | None = None
    """Gets the groups of samples whose rollouts have ended."""

    def end(self, rollouts: int) -> None:
        """Count rollouts that have ended."""
        self.ended += rollouts


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the episodes that are being played, and the one that waits longest.

    Attributes:
        ended: the number of episodes that have ended.
        total: the number of all episodes.
        wait: the longest wait of an episode; None if no episode is in flight.
    """

    ended: int
    total: int
    wait: Wait | None = None


class Rollouts:
    """A synchronous interface that plays and scores episodes."""

    def __init__(
        self, runtime: Runtime, scorer: Scorer, *, seed: int, players: RolloutWorkers | None = None
    ):
        """Start the thread of the event loop.

        Args:
            runtime: engine, template, toolbox and config.
            scorer: computes the rewards of trajectories.
            seed: the seed of the run.
            players: play the rollouts; None: this process does.
        """
        self.runtime = runtime
        self._players = players or Player(runtime, scorer)
        self._seed = seed
        self._run_id = uuid.uuid4().hex[:8]
        self._attempts = itertools.count()
        self._has_shown_bug = False
        self._agent_errors: dict[str, list[str]] = defaultdict(list)
        """The errors of agents since their last episode without one, by agent loop."""
        self._working_agents: set[str] = set()
        """The agent loops that have ended an episode without an error."""
        self._counts: list[_RolloutCount] = []
        self._loop = LoopThread("rollouts", new_loop)

    def collect(
        self,
        samples: Sequence[Sample],
        *,
        n: int,
        sampling: Sampling,
        step: int,
        tag: str = "train",
        earlier: Sequence[Sample] = (),
        greedy: bool = False,
        record: GroupRecord | None = None,
    ) -> list[Group]:
        """Play each sample n times.

        Args:
            samples: the rows of the step.
            n: rollouts per sample.
            sampling: the sampling parameters.
            step: the training step. The seed of a turn depends on step, row, rollout and turn.
            tag: "train", "val" and so on; a part of the episode ids. "train" has its own seeds.
            earlier: the rows that were already played in this step. If a row is played again, it
                gets other seeds.
            greedy: also play each sample once at temperature 0, as its rollout number n.
            record: has the groups of samples that were played before, which are not played again,
                and gets each new group whose rollouts were not dropped when they have ended.

        Returns:
            One group for each sample, in order. A group is left out if more than a quarter of its
            rollouts, or its greedy rollout, was dropped.

        Raises:
            RunStopped: more than 5 % of the rollouts were dropped, or every agent failed; the
                message lists the causes.
            UserCodeError: a reward function raised.
        """
        samplings = [sampling] * n + [sampling.as_greedy()] * greedy
        known = record.groups if record else {}
        new = [sample for sample in samples if sample.row not in known]
        plays = [*self._plays(new, samplings, step, tag, earlier)]
        results = iter(self.run(self._play_all(plays, len(samplings), record)))
        played = [
            PlayedSample(sample, n, known[sample.row].scored)
            if sample.row in known
            else PlayedSample(sample, n, [*islice(results, len(samplings))])
            for sample in samples
        ]
        stop_if_too_many_dropped(played)
        self.stop_if_agents_fail()
        return [group for p in played if (group := p.group) is not None]

    def start(
        self,
        sample: Sample,
        *,
        n: int,
        sampling: Sampling,
        position: int,
        greedy: bool = False,
        slots: AbstractAsyncContextManager[Any] = NO_LIMIT,
    ) -> Future[PlayedSample]:
        """Start to play a training sample n times in the background.

        Samples request tokens in the order in which they were started. Cancel the future to end
        the rollouts.

        Args:
            sample: the row.
            n: rollouts of the sample.
            sampling: the sampling parameters.
            position: the position of the sample in the sequence of all draws of the run. It
                determines the seeds.
            greedy: also play the sample once at temperature 0.
            slots: held while the sample is played; a semaphore serves samples in their order.

        Returns:
            The future rollouts. Its exception is a `UserCodeError` if a reward function raised.
        """
        samplings = [sampling] * n + [sampling.as_greedy()] * greedy
        seed = mix_seed(self._seed, position)
        plays = [*self._plays_of(sample, samplings, f"train-p{position}", seed, trains=True)]

        async def play_group() -> PlayedSample:
            async with slots:
                return PlayedSample(sample, n, await self._play_all(plays, len(plays)))

        return self._loop.submit(play_group())

    def stop_if_agents_fail(self) -> None:
        """Raise `RunStopped` if all episodes of an agent failed, or its last `MAX_AGENT_ERRORS`."""
        for name, errors in [*self._agent_errors.items()]:
            if errors and (name not in self._working_agents or len(errors) >= MAX_AGENT_ERRORS):
                raise RunStopped(
                    f"the agent (agent_name {name}) failed in each of the last"
                    f" {plural(len(errors), 'episode')}: nothing can be learned. Let it return"
                    " errors of tools to the policy as text (docs/agents.md, Mistakes of the"
                    f" policy). Causes:\n{_list_causes(errors)}"
                )

    def _record_agent(self, trajectory: Trajectory) -> None:
        """Record whether the agent of an episode failed, and log the first error."""
        name, error = trajectory.sample.agent_name, trajectory.error
        if not error:
            self._working_agents.add(name)
            self._agent_errors.pop(name, None)
            return
        self._agent_errors[name].append(error.partition("\n")[0])
        if not self._has_shown_bug:
            self._has_shown_bug = True
            log.warning(
                "row %s (%s): reward 0 by agent.on_error=zero (counted in stop/agent_error): %s",
                *(trajectory.sample.id, name, error),
            )

    def progress(self) -> Progress | None:
        """Return the progress of `collect` and of started samples; None if nothing is played.

        Any thread may call it.
        """
        counts = [*self._counts]
        if not counts:
            return None
        ended, total = sum(c.ended for c in counts), sum(c.total for c in counts)
        return Progress(ended, total, self._players.longest_wait())

    def reprefill_tokens(self) -> int:
        """Return `Sampler.reprefill_tokens` of this process and of others that play."""
        return self._players.reprefill_tokens()

    def metrics(self) -> dict[str, float]:
        """Return the counts of events since the last call, for the record of a step."""
        return self._players.metrics()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the rollouts and wait for it. Ctrl-C cancels it."""
        future = self._loop.submit(work)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: Future[T]) -> T:
        """Wait for work on the event loop and return its result. Ctrl-C ends only the wait."""
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if future.done():  # the work raised TimeoutError, or it ended just now
                    return future.result()
                if not self._loop.is_alive:
                    raise RunStopped("the thread that runs the episodes died") from None

    @contextlib.contextmanager
    def paused_time_limits(self) -> Iterator[None]:
        """Do not count the time of this block against the time limits of episodes in flight.

        It does not count as time without progress either.
        """
        self.run(self._players.pause())
        try:
            yield
        finally:
            self.run(self._players.resume())

    def close(self) -> None:
        """Close the tools, the rewards and the parser, and stop the thread. Idempotent."""
        try:
            if self._loop.is_alive:
                self.run(self._players.drain())
        finally:  # also if the thread died: processes of parser and rewards must be stopped
            self._players.close()
            self._loop.stop()

    def _plays(
        self,
        samples: Sequence[Sample],
        samplings: Sequence[Sampling],
        step: int,
        tag: str,
        earlier: Sequence[Sample],
    ) -> Iterator[Play]:
        """Yield the rollouts of each sample, one for each of the sampling parameters."""
        trains = tag == "train"
        times_played = Counter(s.row for s in earlier)
        for s in samples:
            # A row that occurs twice in a step gets another seed the second time.
            seed = mix_seed(self._seed, step, s.row, times_played[s.row], trains)
            times_played[s.row] += 1
            yield from self._plays_of(s, samplings, f"{tag}-{step}", seed, trains)

    def _plays_of(
        self, sample: Sample, samplings: Sequence[Sampling], name: str, seed: int, trains: bool
    ) -> Iterator[Play]:
        """Yield the rollouts of one sample; their episode ids begin with `name`."""
        for k, sampling in enumerate(samplings):
            attempt = f"{self._run_id}-{next(self._attempts)}"
            yield Play(sample, k, f"{name}-{sample.row}-{k}-{attempt}", sampling, seed, trains)

    async def _play_all(
        self, plays: Sequence[Play], per_sample: int, record: GroupRecord | None = None
    ) -> list[Scored | Dropped]:
        """Play and score all rollouts. Each run of `per_sample` rollouts belongs to one sample."""
        count = _RolloutCount(len(plays), record=record)
        self._counts.append(count)
        try:
            with self._players.armed():
                return await self._play_parts(plays, per_sample, count)
        finally:
            self._counts.remove(count)

    async def _play_parts(
        self, plays: Sequence[Play], per_sample: int, count: _RolloutCount
    ) -> list[Scored | Dropped]:
        """Play and score rollouts."""
        for play in plays:
            self._players.begin(play)
        parts = [plays[i : i + per_sample] for i in range(0, len(plays), per_sample)]
        results = await run_all([self._play_sample(part, count) for part in parts])
        return [result for part in results for result in part]

    async def _play_sample(
        self, plays: Sequence[Play], count: _RolloutCount
    ) -> list[Scored | Dropped]:
        """Play the announced rollouts of one sample."""
        results = await self._players.play(plays, count.end)
        for result in results:
            if isinstance(result, Scored):
                self._record_agent(result.trajectory)
        scored = tuple(result for result in results if isinstance(result, Scored))
        if count.record and len(scored) == len(results):
            count.record.add(Group(plays[0].sample, scored))
        return results


def _causes_of(results: Sequence[Scored | Dropped]) -> tuple[str, ...]:
    return tuple(r.cause[:MAX_CAUSE] for r in results if isinstance(r, Dropped))


def _stop_if_too_many_dropped(dropped: Sequence[Dropped], played: int) -> None:
    """Raise `RunStopped` if more than `MAX_DROPPED` of the rollouts were dropped."""
    if len(dropped) <= MAX_DROPPED * played:
        return
    verb = "was" if len(dropped) == 1 else "were"
    raise RunStopped(
        f"{len(dropped)} of {plural(played, 'rollout')} {verb} dropped, more than"
        f" {MAX_DROPPED:.0%}."
        " Causes:\n" + _list_causes([rollout.cause for rollout in dropped])
    )


def _list_causes(all_causes: Sequence[str]) -> str:
    """Return a line for each of the three most common kinds of causes, with its number."""
    by_cause: dict[str, list[str]] = defaultdict(list)
    for cause in all_causes:
        by_cause[without_numbers(cause)].append(cause)
    most_common = sorted(by_cause.values(), key=len, reverse=True)[:3]
    return "\n".join(f"  {len(causes)} x {causes[0]}" for causes in most_common)


@contextlib.contextmanager
def open_rollouts(
    config: Config,
    sampler: Sampler,
    template: ChatTemplate,
    scorer: Scorer,
    *,
    start: StartProcess = LocalProcess,
) -> Iterator[Rollouts]:
    """Create `Rollouts` with the config's tools, and close them at the end of the block.

    The tools run in this process or on a tool server, as the config says. With `rollout.workers`,
    each worker opens tools and rewards of its own.

    Args:
        config: the config of the run.
        sampler: the engine.
        template: the chat template.
        scorer: computes rewards.
        start: starts the process of a worker.

    Raises:
        AgentRLError: the tools or a worker cannot be started.
    """
    collect_rarely()
    raise_limit()
    sandbox.configure(config.sandbox)
    count = count_workers(config)
    with contextlib.ExitStack() as stack:
        if count == 1:
            toolbox = stack.enter_context(
                open_toolbox(config.tools, config.all_files, config.sandbox)
            )
            players = None
        else:
            toolbox, settings = LocalToolbox(), make_settings(config, sampler, template, count)
            players = RolloutWorkers(sampler, settings, start=start)
        rollouts = Rollouts(
            Runtime(sampler, template, toolbox, config),
            scorer,
            seed=config.trainer.seed,
            players=players,
        )
        stack.callback(rollouts.close)
        if players:
            rollouts.run(players.open())
        yield rollouts
