"""Play and score the rollouts of a sample, on the event loop that asks for them.

This is the failure policy of one rollout. The model's mistakes are part of the trajectory. After an
infrastructure failure and a pause, the episode is retried, and then dropped, never rewarded with 0.
Errors in user code are shown. `agentrl.rollout` decides which rollouts are played, and how many may
be dropped. `agentrl.rollout_workers` has players in other processes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from agentrl import registry, sandbox
from agentrl.agent_loops.attempt import CLEANUP_SECONDS, Runtime
from agentrl.agent_loops.play import play_episode
from agentrl.config.environment import hide_secrets
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import (
    Infrastructure,
    NoEngineLeft,
    RequestRefused,
    SessionLost,
    UserCodeError,
    UserError,
)
from agentrl.http.pool import TimeLimit, leave_pool, waiting_requests
from agentrl.plural import plural
from agentrl.rewards import Scorer
from agentrl.trajectory import Sample, Scored, Span, Trajectory
from agentrl.watchdog import Watchdog
from agentrl.workers import run_all

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
GC_THRESHOLDS = (50_000, 20, 100)
"""The new objects between two collections of the first generation, and how many of these come
before one of the second, and of all. Python's own 700 new objects are a few turns."""
REPEATED_SECONDS = 5.0
"""Within this time equal errors are one line in the log, with their number."""


@dataclass(frozen=True, slots=True)
class Play:
    """A rollout to play."""

    sample: Sample
    rollout: int
    episode_id: str
    sampling: Sampling
    seed: int
    trains: bool
    """True in a training step, also for the greedy rollout (`Group.greedy`), whose reward is the
    baseline of the others. Then the reward includes penalties."""

    def announce(self, sampler: Sampler, episode_id: str = "") -> None:
        """Announce the rollout to an engine, or another attempt at it under an id of its own."""
        awaited = registry.agent_loops.get(self.sample.agent_name).awaited
        options = {} if awaited else {"awaited": False}
        sampler.begin(episode_id or self.episode_id, **options)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A rollout that was dropped."""

    cause: str
    """Why it was dropped: the type and the message of the exception, without keys of services."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", hide_secrets(self.cause))


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of an episode whose state has not changed for some time.

    Attributes:
        sample_id: the row of the episode.
        rollout: its number among the rollouts of the row.
        state: the thing that it waits for.
        since: when the wait began, in `time.monotonic()` seconds.
    """

    sample_id: str
    rollout: int
    state: str
    since: float


OnEnd = Callable[[int], object]
"""Called with the number of rollouts that have ended."""


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
        kind = without_numbers(line)
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


class Player:
    """Plays rollouts in this process. All methods but `close` belong to one event loop."""

    def __init__(self, runtime: Runtime, scorer: Scorer):
        """Play nothing yet.

        Args:
            runtime: engine, template, toolbox and config.
            scorer: computes the rewards of trajectories.
        """
        self.runtime = runtime
        self._scorer = scorer
        self._has_shown_bug = False
        self._errors = _ErrorLog()
        self._watchdog = Watchdog(WATCHDOG_SECONDS, causes=waiting_requests)
        self._paused: list[TimeLimit] = []

    def begin(self, play: Play) -> None:
        """Announce a rollout to the engine."""
        play.announce(self.runtime.sampler)

    async def play(self, plays: Sequence[Play], on_end: OnEnd) -> list[Scored | Dropped]:
        """Play and score rollouts; all of them together if a reward needs all of them."""
        size = len(plays) if self._scorer.has_group_reward else 1
        parts = [plays[i : i + size] for i in range(0, len(plays), size)]
        results = await run_all([self._play_and_score(part, on_end) for part in parts])
        return [r for part in results for r in part]

    def armed(self) -> AbstractContextManager[None]:
        """Activate the watchdog within the block."""
        return self._watchdog.armed()

    def longest_wait(self) -> Wait | None:
        """Return the wait of the episode whose state has not changed for the longest time."""
        if (slowest := self._watchdog.longest_wait()) is None:
            return None
        return Wait(slowest.sample.id, slowest.rollout, slowest.state, slowest.since)

    async def pause(self) -> None:
        """Stop the time limits of the episodes in flight."""
        self._paused = [episode.limit for episode in self._watchdog.episodes()]
        for limit in self._paused:
            limit.pause()

    async def resume(self) -> None:
        """Let the time limits go on; the pause is no time without progress either."""
        for limit in self._paused:
            limit.resume()
        self._paused = []
        self._watchdog.restart()

    def reprefill_tokens(self) -> int:
        """Return the engine's number."""
        return self.runtime.sampler.reprefill_tokens()

    def metrics(self) -> dict[str, float]:
        """Return nothing: this process has no events of its own."""
        return {}

    async def drain(self, others: Collection[asyncio.Task[Any]] = ()) -> None:
        """Wait until cancelled episodes have cleaned up, then close scorer and toolbox.

        Args:
            others: tasks of the event loop that belong to no episode.
        """
        episodes = asyncio.all_tasks() - {asyncio.current_task(), *others}
        if episodes:
            await asyncio.wait(episodes, timeout=CLEANUP_SECONDS)
        self._errors.flush()
        try:
            await self._scorer.close()
        finally:
            await self.runtime.toolbox.aclose()
            await sandbox.release()
            leave_pool()

    def close(self) -> None:
        """End the processes of parser and rewards, and the thread of the watchdog."""
        self._scorer.stop()
        self.runtime.close()
        self._watchdog.close()

    async def _play_and_score(self, plays: Sequence[Play], on_end: OnEnd) -> list[Scored | Dropped]:
        """Play rollouts of one sample, and score all that were not dropped in one call."""
        begun: dict[str, float] = {}
        outcomes = await run_all([self._play(play, begun) for play in plays])
        trajectories = [p for p in outcomes if isinstance(p, Trajectory)]
        scored = iter(await self._score(trajectories, plays[0], begun) if trajectories else [])
        on_end(len(plays))
        return [p if isinstance(p, Dropped) else next(scored) for p in outcomes]

    async def _play(self, play: Play, begun: dict[str, float]) -> Trajectory | Dropped:
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
                    play.announce(self.runtime.sampler, episode_id)
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
                    self._watchdog.set_state(episode_id, "other rollouts of the sample")
                    return trajectory
                except (RequestRefused, NoEngineLeft) as e:  # It would fail again.
                    self._errors.add(e, sample)
                    return Dropped(f"{type(e).__name__}: {e}")
                except SessionLost as e:
                    lost += 1
                    self._errors.add(e, sample, f" (played again, {lost} of {MAX_LOST_SESSIONS})")
                    if lost > MAX_LOST_SESSIONS:
                        return Dropped(f"{type(e).__name__}: {e}")
                    first, longest = LOST_SESSION_SECONDS
                    pause = min(first * 2 ** (lost - 1), longest) * random.uniform(0.8, 1.2)
                except Infrastructure as e:
                    failures += 1
                    self._errors.add(e, sample, _attempt_of(failures))
                    if failures == MAX_ATTEMPTS:
                        return Dropped(f"{type(e).__name__}: {e}")
                    pause = retry_pause(failures)
                except (UserCodeError, UserError) as e:
                    if not self._has_shown_bug:
                        self._has_shown_bug = True
                        log.error("row %s (%s): %s", sample.id, sample.agent_name, e)
                    return Dropped(f"{type(e).__name__}: {str(e).splitlines()[0]}")
        finally:
            if trajectory is None:
                self._watchdog.remove(episode_id)

    async def _score(
        self, trajectories: Sequence[Trajectory], play: Play, begun: Mapping[str, float]
    ) -> list[Scored | Dropped]:
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
            return [Dropped(cause)] * len(trajectories)
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


def without_numbers(text: str) -> str:
    """Replace words with digits: texts that differ only in ids and addresses are one kind."""
    return re.sub(r"\S*\d\S*", "#", text)


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
