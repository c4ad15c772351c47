"""Play episodes on one asyncio event loop in one thread, which all clients share.

`Rollouts.collect` is its synchronous interface: it takes samples and returns groups of scored
trajectories. `Rollouts.start` plays one sample in the background. The module also implements the
failure policy. The model's mistakes are part of the trajectory. After an infrastructure failure and
a pause, the episode is retried, and then dropped, never rewarded with 0. Errors in user code are
shown, and stop the run if there are many.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import random
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from agentrl import registry, sandbox
from agentrl.agent_loops.attempt import CLEANUP_SECONDS, Runtime, mix_seed
from agentrl.agent_loops.play import play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.config.environment import hide_secrets
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import (
    Infrastructure,
    NoEngineLeft,
    RequestRefused,
    RunStopped,
    SessionLost,
    UserCodeError,
    UserError,
)
from agentrl.http.pool import TimeLimit, leave_pool, waiting_requests
from agentrl.open_files import raise_limit
from agentrl.plural import plural
from agentrl.rewards import Scorer
from agentrl.tools import open_toolbox
from agentrl.trajectory import Group, Sample, Scored, Span, Trajectory
from agentrl.watchdog import Watchdog
from agentrl.workers import LoopThread, run_all

log = logging.getLogger("agentrl")

WATCHDOG_SECONDS = 300.0
"""The time without progress after which a report says what each episode waits for."""
RETRY_SECONDS = (2.0, 20.0)
"""The pauses before the second and the third attempt of an episode or a reward, after failures of
the infrastructure. So no episode is dropped because an engine or a judge fails for 20 seconds."""
MAX_ATTEMPTS = 3
MAX_LOST_SESSIONS = 10
"""How often an episode is also played again because its tool server was restarted. That is no fault
of the episode, and a server that some tool kills takes the sessions of all others with it."""
LOST_SESSION_SECONDS = (0.5, 8.0)
"""The pause after the first lost session of an episode, and the longest one. Each is twice as long
as the one before."""
MIN_SURVIVORS = 0.75
"""The smallest share of its rollouts that a group needs for a useful baseline."""
MAX_DROPPED = 0.05
"""The largest share of dropped rollouts in a step; with more the run stops."""
MAX_AGENT_ERRORS = 64
"""So many episodes in a row whose agents fail (`agent.on_error=zero`) stop the run."""
MAX_CAUSE = 1000
"""The stored length of a drop's cause, in characters: a dead engine's error contains its log."""
GC_THRESHOLDS = (50_000, 20, 100)
"""The new objects between two collections of the first generation, and how many of these come
before one of the second, and of all. Python's own 700 new objects are a few turns."""
REPEATED_SECONDS = 5.0
"""Within this time equal errors are one line in the log, with their number."""

NO_LIMIT = contextlib.nullcontext()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Play:
    """A rollout to play."""

    sample: Sample
    rollout: int
    episode_id: str
    sampling: Sampling
    seed: int
    trains: bool
    """True in a training step, also for the greedy rollout (`Group.greedy`), whose reward is the
    baseline of the others. Then the reward includes penalties."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A rollout that was dropped."""

    cause: str
    """Why it was dropped: the type and the message of the exception, without keys of services."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", hide_secrets(self.cause))


@dataclass(frozen=True, slots=True)
class PlayedSample:
    """All rollouts of a sample, including those that were dropped."""

    sample: Sample
    n: int
    """The number of rollouts without the greedy one."""
    results: Sequence[Scored | _Dropped]
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
    _stop_if_too_many_dropped([r for r in results if isinstance(r, _Dropped)], len(results))


@dataclass(slots=True, eq=False)
class _RolloutCount:
    """The progress of rollouts that were started together."""

    total: int
    ended: int = 0
    """The number of rollouts that have ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the episodes that are being played, and the one that waits longest.

    Attributes:
        ended: the number of episodes that have ended.
        total: the number of all episodes.
        sample_id: the row of the episode whose state has not changed for the longest time; "" if no
            episode is in flight.
        rollout: the number of that episode among the rollouts of its row.
        state: the thing that it waits for.
        seconds: the time that it has waited.
    """

    ended: int
    total: int
    sample_id: str = ""
    rollout: int = 0
    state: str = ""
    seconds: float = 0.0


class _ErrorLog:
    """Logs errors of episodes; equal ones within `REPEATED_SECONDS` are counted.

    An engine that dies fails all its episodes at once, and each of them would log the same line.
    """

    def __init__(self):
        self._repeated: dict[str, tuple[str, int]] = {}

    def add(self, error: Infrastructure, sample: Sample, again: str = "") -> None:
        """Log the first line of an error; `again` says whether the episode is retried."""
        # The whole error contains the last lines of a dead engine.
        line = str(error).partition("\n")[0].removesuffix(" Its last lines:")
        kind = _without_numbers(line)
        if kind in self._repeated:
            first, count = self._repeated[kind]
            self._repeated[kind] = first, count + 1
            return
        self._repeated[kind] = line, 0
        log.warning("row %s: %s%s", sample.id, line, again)
        asyncio.get_running_loop().call_later(REPEATED_SECONDS, self._end, kind)

    def flush(self) -> None:
        """Log the numbers of repeated errors now."""
        for kind in [*self._repeated]:
            self._end(kind)

    def _end(self, kind: str) -> None:
        line, count = self._repeated.pop(kind, ("", 0))
        if count:
            log.warning("the same error %s more: %s", plural(count, "time"), line)


class Rollouts:
    """A synchronous interface that plays and scores episodes."""

    def __init__(self, runtime: Runtime, scorer: Scorer, *, seed: int):
        """Start the thread of the event loop.

        Args:
            runtime: engine, template, toolbox and config.
            scorer: computes the rewards of trajectories.
            seed: the seed of the run.
        """
        self.runtime = runtime
        self._scorer = scorer
        self._seed = seed
        self._run_id = uuid.uuid4().hex[:8]
        self._attempts = itertools.count()
        self._has_shown_bug = False
        self._errors = _ErrorLog()
        self._agent_errors: dict[str, list[str]] = defaultdict(list)
        """The errors of agents since their last episode without one, by agent loop."""
        self._working_agents: set[str] = set()
        """The agent loops that have ended an episode without an error."""
        self._counts: list[_RolloutCount] = []
        self._watchdog = Watchdog(WATCHDOG_SECONDS, causes=waiting_requests)
        self._loop = LoopThread("rollouts", _new_loop)

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

        Returns:
            One group for each sample, in order. A group is left out if more than a quarter of its
            rollouts, or its greedy rollout, was dropped.

        Raises:
            RunStopped: more than 5 % of the rollouts were dropped, or every agent failed; the
                message lists the causes.
            UserCodeError: a reward function raised.
        """
        samplings = [sampling] * n + [replace(sampling, temperature=0.0)] * greedy
        plays = [*self._plays(samples, samplings, step, tag, earlier)]
        results = self.run(self._play_all(plays, len(samplings)))
        played = [
            PlayedSample(sample, n, results[i * len(samplings) : (i + 1) * len(samplings)])
            for i, sample in enumerate(samples)
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
        samplings = [sampling] * n + [replace(sampling, temperature=0.0)] * greedy
        seed = mix_seed(self._seed, position)
        plays = [*self._plays_of(sample, samplings, f"train-p{position}", seed, trains=True)]

        async def play_group() -> PlayedSample:
            async with slots:
                return PlayedSample(sample, n, await self._play_all(plays, len(plays)))

        return self._loop.submit(play_group())

    def stream(
        self,
        samples: Iterable[Sample],
        *,
        n: int,
        sampling: Sampling,
        tag: str = "val",
        in_flight: int = 256,
    ) -> Iterator[Group]:
        """Play each sample n times, and yield its group as soon as its rollouts have ended.

        The seeds equal `collect`'s at step 0, so they do not depend on the other samples.

        Args:
            samples: any number of rows; they are drawn when their turn comes.
            n: rollouts per sample.
            sampling: the sampling parameters.
            tag: a part of the episode ids.
            in_flight: about how many rollouts are played at the same time.

        Yields:
            One group for each sample, in the order in which they end, without the rollouts that
            were dropped.

        Raises:
            RunStopped: of 100 or more rollouts, or of all, more than 5 % were dropped; the message
                lists the causes.
            UserCodeError: a reward function raised.
        """
        ended: SimpleQueue[tuple[Sample, list[Scored | _Dropped]] | None] = SimpleQueue()
        waiting = iter(samples)

        async def play_one_after_another() -> None:
            for sample in waiting:
                plays = [*self._plays([sample], [sampling] * n, 0, tag, ())]
                ended.put((sample, await self._play_parts(plays, n, _RolloutCount(n))))
                # A cancellation must arrive even if nothing in an episode waits.
                await asyncio.sleep(0)

        async def play_all() -> None:
            try:
                with self._watchdog.armed():
                    workers = max(1, in_flight // n)
                    await run_all([play_one_after_another() for _ in range(workers)])
            finally:
                ended.put(None)

        future = self._loop.submit(play_all())
        dropped: list[_Dropped] = []
        played = 0
        try:
            while (item := self._wait_for(ended)) is not None:
                sample, results = item
                scored = tuple(r for r in results if isinstance(r, Scored))
                dropped += [r for r in results if isinstance(r, _Dropped)]
                played += n
                if played >= 100:
                    _stop_if_too_many_dropped(dropped, played)
                    self.stop_if_agents_fail()
                yield Group(sample, scored, n - len(scored), drop_causes=_causes_of(results))
            future.result()
            _stop_if_too_many_dropped(dropped, played)
            self.stop_if_agents_fail()
        finally:
            future.cancel()

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

    def _wait_for(self, queue: SimpleQueue[T]) -> T:
        """Return the next item that the event loop puts into a queue. Ctrl-C ends the wait."""
        while True:
            try:
                return queue.get(timeout=1.0)
            except Empty:
                if not self._loop.is_alive:
                    raise RunStopped("the thread that runs the episodes died") from None

    def progress(self) -> Progress | None:
        """Return the progress of `collect` and of started samples; None if nothing is played.

        Any thread may call it.
        """
        counts = [*self._counts]
        if not counts:
            return None
        ended, total = sum(c.ended for c in counts), sum(c.total for c in counts)
        if (slowest := self._watchdog.longest_wait()) is None:
            return Progress(ended, total)
        seconds = time.monotonic() - slowest.since
        return Progress(
            ended, total, slowest.sample.id, slowest.rollout, slowest.state, max(0.0, seconds)
        )

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
        limits = self.run(self._pause())
        try:
            yield
        finally:
            self.run(self._resume(limits))

    async def _pause(self) -> list[TimeLimit]:
        limits = [episode.limit for episode in self._watchdog.episodes()]
        for limit in limits:
            limit.pause()
        return limits

    async def _resume(self, limits: Sequence[TimeLimit]) -> None:
        for limit in limits:
            limit.resume()
        self._watchdog.restart()

    def close(self) -> None:
        """Close the toolbox, the scorer and the parser, and stop the thread. Idempotent."""
        try:
            if self._loop.is_alive:
                self.run(self._drain())
        finally:  # also if the thread died: processes of parser and rewards must be stopped
            self._scorer.stop()
            self.runtime.close()
            self._watchdog.close()
            self._loop.stop()

    async def _drain(self) -> None:
        """Wait until cancelled episodes have cleaned up, then close scorer and toolbox."""
        episodes = asyncio.all_tasks() - {asyncio.current_task()}
        if episodes:
            await asyncio.wait(episodes, timeout=CLEANUP_SECONDS)
        self._errors.flush()
        try:
            await self._scorer.close()
        finally:
            await self.runtime.toolbox.aclose()
            await sandbox.release()
            leave_pool()

    def _plays(
        self,
        samples: Sequence[Sample],
        samplings: Sequence[Sampling],
        step: int,
        tag: str,
        earlier: Sequence[Sample],
    ) -> Iterator[_Play]:
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
    ) -> Iterator[_Play]:
        """Yield the rollouts of one sample; their episode ids begin with `name`."""
        for k, sampling in enumerate(samplings):
            attempt = f"{self._run_id}-{next(self._attempts)}"
            yield _Play(sample, k, f"{name}-{sample.row}-{k}-{attempt}", sampling, seed, trains)

    async def _play_all(self, plays: Sequence[_Play], per_sample: int) -> list[Scored | _Dropped]:
        """Play and score all rollouts. Each run of `per_sample` rollouts belongs to one sample."""
        count = _RolloutCount(len(plays))
        self._counts.append(count)
        try:
            with self._watchdog.armed():
                return await self._play_parts(plays, per_sample, count)
        finally:
            self._counts.remove(count)

    async def _play_parts(
        self, plays: Sequence[_Play], per_sample: int, count: _RolloutCount
    ) -> list[Scored | _Dropped]:
        """Play and score rollouts; those of a sample together if a reward needs all of them."""
        for play in plays:
            self._begin(play.episode_id, play.sample)
        size = per_sample if self._scorer.has_group_reward else 1
        parts = [plays[i : i + size] for i in range(0, len(plays), size)]
        work = [self._play_and_score(part, count) for part in parts]
        return [r for results in await run_all(work) for r in results]

    def _begin(self, episode_id: str, sample: Sample) -> None:
        awaited = registry.agent_loops.get(sample.agent_name).awaited
        self.runtime.sampler.begin(episode_id, **({} if awaited else {"awaited": False}))

    async def _play_and_score(
        self, plays: Sequence[_Play], count: _RolloutCount
    ) -> list[Scored | _Dropped]:
        """Play rollouts of one sample, and score all that were not dropped in one call."""
        begun: dict[str, float] = {}
        outcomes = await run_all([self._play(play, begun) for play in plays])
        trajectories = [p for p in outcomes if isinstance(p, Trajectory)]
        scored = iter(await self._score(trajectories, plays[0], begun) if trajectories else [])
        count.ended += len(plays)
        return [p if isinstance(p, _Dropped) else next(scored) for p in outcomes]

    async def _play(self, play: _Play, begun: dict[str, float]) -> Trajectory | _Dropped:
        """Play an episode, and retry it after infrastructure failures.

        `begun` gets the time (`time.monotonic()`) at which each attempt started.
        """
        sample, episode_id = play.sample, play.episode_id
        trajectory, failures, lost, pause = None, 0, 0, 0.0
        try:
            while True:
                if tries := failures + lost:
                    self._watchdog.set_state(episode_id, "a pause before the next attempt")
                    await asyncio.sleep(pause)
                    self._watchdog.remove(episode_id)
                    episode_id = f"{episode_id.partition('+')[0]}+{tries}"
                    self._begin(episode_id, sample)
                try:
                    await self.runtime.sampler.ready()
                    if wait := self.runtime.resumed.get().enter():
                        await wait
                    begun[episode_id] = time.monotonic()
                    trajectory = await play_episode(
                        self.runtime,
                        sample,
                        episode_id=episode_id,
                        rollout=play.rollout,
                        sampling=play.sampling,
                        seed=play.seed,
                        watch=self._watchdog.add,
                    )
                    self._record_agent(trajectory)
                    self._watchdog.set_state(episode_id, "other rollouts of the sample")
                    return trajectory
                except (RequestRefused, NoEngineLeft) as e:  # It would fail again.
                    self._errors.add(e, sample)
                    return _Dropped(f"{type(e).__name__}: {e}")
                except SessionLost as e:
                    lost += 1
                    self._errors.add(e, sample, f" (played again, {lost} of {MAX_LOST_SESSIONS})")
                    if lost > MAX_LOST_SESSIONS:
                        return _Dropped(f"{type(e).__name__}: {e}")
                    first, longest = LOST_SESSION_SECONDS
                    pause = min(first * 2 ** (lost - 1), longest) * random.uniform(0.8, 1.2)
                except Infrastructure as e:
                    failures += 1
                    self._errors.add(e, sample, _attempt_of(failures))
                    if failures == MAX_ATTEMPTS:
                        return _Dropped(f"{type(e).__name__}: {e}")
                    pause = retry_pause(failures)
                except (UserCodeError, UserError) as e:
                    if not self._has_shown_bug:
                        self._has_shown_bug = True
                        log.error("row %s (%s): %s", sample.id, sample.agent_name, e)
                    return _Dropped(f"{type(e).__name__}: {str(e).splitlines()[0]}")
        finally:
            if trajectory is None:
                self._watchdog.remove(episode_id)

    async def _score(
        self, trajectories: Sequence[Trajectory], play: _Play, begun: Mapping[str, float]
    ) -> list[Scored | _Dropped]:
        """Score trajectories of one sample; retry the scoring after infrastructure failures."""
        episode_ids = [trajectory.episode_id for trajectory in trajectories]
        cause, start = "", time.monotonic()
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                for episode_id in episode_ids:
                    self._watchdog.set_state(episode_id, "reward")
                try:
                    every = await self._scorer.score_all(trajectories, trains=play.trains)
                    return [_add_reward_span(scored, start, begun) for scored in every]
                except Infrastructure as e:
                    self._errors.add(e, play.sample, _attempt_of(attempt))
                    cause = f"{type(e).__name__}: {e}"
                if attempt < MAX_ATTEMPTS:
                    await asyncio.sleep(retry_pause(attempt))
            return [_Dropped(cause)] * len(trajectories)
        finally:
            for episode_id in episode_ids:
                self._watchdog.remove(episode_id)


def _add_reward_span(scored: Scored, start: float, begun: Mapping[str, float]) -> Scored:
    """Return a copy whose trajectory has a span "reward" from `start` (monotonic) until now."""
    trajectory = scored.trajectory
    origin = begun[trajectory.episode_id]
    begin, end = (round(seconds - origin, 6) for seconds in (start, time.monotonic()))
    spans = (*trajectory.spans, Span("reward", begin, end))
    return replace(scored, trajectory=replace(trajectory, spans=spans))


def retry_pause(failures: int) -> float:
    """Return the pause after so many failures (at least one), up to 25 % longer by chance."""
    return RETRY_SECONDS[failures - 1] * random.uniform(1.0, 1.25)


def _attempt_of(attempt: int) -> str:
    return f" (attempt {attempt} of {MAX_ATTEMPTS})"


def _without_numbers(text: str) -> str:
    """Replace words with digits: texts that differ only in ids and addresses are one kind."""
    return re.sub(r"\S*\d\S*", "#", text)


def _causes_of(results: Sequence[Scored | _Dropped]) -> tuple[str, ...]:
    return tuple(r.cause[:MAX_CAUSE] for r in results if isinstance(r, _Dropped))


def _stop_if_too_many_dropped(dropped: Sequence[_Dropped], played: int) -> None:
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
        by_cause[_without_numbers(cause)].append(cause)
    most_common = sorted(by_cause.values(), key=len, reverse=True)[:3]
    return "\n".join(f"  {len(causes)} x {causes[0]}" for causes in most_common)


@contextlib.contextmanager
def open_rollouts(
    config: Config, sampler: Sampler, template: ChatTemplate, scorer: Scorer
) -> Iterator[Rollouts]:
    """Create `Rollouts` with the config's tools, and close them at the end of the block.

    The tools run in this process or on a tool server, as the config says.
    """
    collect_rarely()
    raise_limit()
    sandbox.configure(config.sandbox)
    with open_toolbox(config.tools, config.all_files, config.sandbox) as toolbox:
        rollouts = Rollouts(
            Runtime(sampler, template, toolbox, config), scorer, seed=config.trainer.seed
        )
        try:
            yield rollouts
        finally:
            rollouts.close()


def collect_rarely() -> None:
    """Make garbage collection rare in this process, from now on.

    All existing objects (modules, schemas, the model), hundreds of thousands that live as long as
    the process, are excluded. Those of episodes in flight are scanned rarely: an episode leaves no
    cycle behind. `Trainer` collects once a step. Otherwise the collector would take a third of the
    time of an agent loop, and half of it with thousands of episodes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
