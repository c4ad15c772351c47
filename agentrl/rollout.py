"""Plays episodes: one asyncio loop in one thread, on which every client lives.

`Rollouts.collect` is the synchronous door: samples in, groups of scored trajectories out. It owns
the failure policy: what the model does wrong is data; what a machine does wrong is played again
and then dropped, never rewarded with 0; what user code does wrong is shown, and stops the run when
it is more than a stray case.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import re
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentrl import sandbox
from agentrl.agent_loops.attempt import World, mix_seed
from agentrl.agent_loops.play import CLEANUP_S, play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import Infrastructure, RunStopped, TemplateError, UserCodeError
from agentrl.http.pool import leave_pool, waiting_requests
from agentrl.open_files import raise_limit
from agentrl.rewards import Scorer
from agentrl.tools import open_toolbox
from agentrl.trajectory import Group, Sample, Scored, Trajectory
from agentrl.watchdog import Watchdog
from agentrl.workers import run_all

log = logging.getLogger("agentrl")

ATTEMPTS = 3
"""An episode that a machine failed is played again, twice at most."""
MIN_SURVIVORS = 0.75
"""A group needs this share of its rollouts, or its baseline would be noise."""
MAX_DROPPED = 0.05
"""A step that loses more than this share of its rollouts stops the run."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Play:
    """A rollout to be played."""

    sample: Sample
    rollout: int
    episode_id: str
    sampling: Sampling
    seed: int
    trains: bool
    """Whether its reward is one that trains."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A rollout that was lost, and by what."""

    cause: str


class Rollouts:
    """The synchronous door to episodes."""

    def __init__(self, world: World, scorer: Scorer, *, seed: int):
        """Start the loop's thread.

        Args:
            world: engine, template, toolbox, config.
            scorer: turns trajectories into rewards.
            seed: the run's.
        """
        self.world = world
        self._scorer = scorer
        self._seed = seed
        self._run_id = uuid.uuid4().hex[:8]
        self._attempts = itertools.count()
        self._shown_bug = False
        self._watchdog = Watchdog(world.config.trainer.watchdog_s, causes=waiting_requests)
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

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
            samples: the step's rows.
            n: rollouts a sample.
            sampling: how turns are sampled.
            step: with the row, rollout and turn, keys the random numbers.
            tag: names the pass in episode ids and keys its randomness ("train", "val").
            earlier: what was played before in this step: a row that stood there, too, is played
                with other random numbers.
            greedy: play each sample once more, as its rollout n, at temperature 0.

        Returns:
            One group a sample, in order; a group that lost more than a quarter of its rollouts, or
            the greedy one, is left out.

        Raises:
            RunStopped: more than 5 % of the rollouts were dropped; the message says by what.
            UserCodeError: a reward raised.
        """
        ways = [sampling] * n + [replace(sampling, temperature=0.0)] * greedy
        plays = [*self._plays(samples, ways, step, tag, earlier)]
        results = self.run(self._play_all(plays, len(ways)))
        _stop_if_too_many_dropped(results)
        groups = []
        for i, sample in enumerate(samples):
            mine = results[i * len(ways) : (i + 1) * len(ways)]
            scored = tuple(r for r in mine[:n] if isinstance(r, Scored))
            best = mine[n] if greedy else None
            if len(scored) >= math.ceil(MIN_SURVIVORS * n) and not isinstance(best, _Dropped):
                groups.append(Group(sample, scored, n - len(scored), best))
        return groups

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the rollouts' loop and wait for it; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except TimeoutError:
                    if future.done():
                        raise
                    if not self._thread.is_alive():
                        raise RunStopped("the thread that plays episodes died") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the toolbox's connections and a foreign parser, and stop the thread. Idempotent."""
        try:
            if self._thread.is_alive():
                self.run(self._drain())
        finally:  # processes of a parser and of rewards would outlive a thread that died
            self._scorer.stop()
            self.world.close()
            self._watchdog.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)

    async def _drain(self) -> None:
        """Let cancelled episodes clean up, then close the toolbox and what rewards hold."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=CLEANUP_S)
        try:
            await self._scorer.close()
        finally:
            await self.world.toolbox.aclose()
            await sandbox.release()
            leave_pool()

    def _plays(
        self,
        samples: Sequence[Sample],
        ways: Sequence[Sampling],
        step: int,
        tag: str,
        earlier: Sequence[Sample],
    ) -> Iterator[_Play]:
        """Each sample in each of these ways, sample by sample."""
        trains = tag == "train"
        before = Counter(s.row for s in earlier)
        for s in samples:
            # A row that stands twice in a step is played with other random numbers.
            seed = mix_seed(self._seed, step, s.row, before[s.row], trains)
            before[s.row] += 1
            for k, way in enumerate(ways):
                attempt = f"{self._run_id}-{next(self._attempts)}"
                episode_id = f"{tag}-{step}-{s.row}-{k}-{attempt}"
                yield _Play(s, k, episode_id, way, seed, trains)

    async def _play_all(self, plays: Sequence[_Play], each: int) -> list[Scored | _Dropped]:
        """What became of the plays, of which `each` in a row are of one sample."""
        for play in plays:
            self.world.sampler.begin(play.episode_id)
        size = each if self._scorer.compares else 1
        together = [plays[i : i + size] for i in range(0, len(plays), size)]
        with self._watchdog.armed():
            return [r for rs in await run_all([*map(self._play_and_score, together)]) for r in rs]

    async def _play_and_score(self, plays: Sequence[_Play]) -> list[Scored | _Dropped]:
        """Rollouts of a sample, scored when all are played; those that were lost are left out."""
        played = await run_all([self._play(play) for play in plays])
        left = [p for p in played if isinstance(p, Trajectory)]
        scored = iter(await self._score(left, plays[0]) if left else [])
        return [p if isinstance(p, _Dropped) else next(scored) for p in played]

    async def _play(self, play: _Play) -> Trajectory | _Dropped:
        """The episode, played again where a machine failed it."""
        sample, episode_id = play.sample, play.episode_id
        played, cause = None, ""
        try:
            for attempt in range(ATTEMPTS):
                if attempt:
                    self._watchdog.forget(episode_id)
                    episode_id = f"{episode_id.partition('+')[0]}+{attempt}"
                    self.world.sampler.begin(episode_id)
                try:
                    await self.world.sampler.ready()
                    played = await play_episode(
                        self.world,
                        sample,
                        episode_id=episode_id,
                        rollout=play.rollout,
                        sampling=play.sampling,
                        seed=play.seed,
                        watch=self._watchdog.watch,
                    )
                    self._watchdog.enter(episode_id, "the others of its sample")
                    return played
                except Infrastructure as e:
                    cause = _told(e, sample, attempt)
                except (UserCodeError, TemplateError) as e:
                    if not self._shown_bug:
                        self._shown_bug = True
                        log.error("row %s (%s): %s", sample.id, sample.agent_name, e)
                    return _Dropped(f"{type(e).__name__}: {str(e).splitlines()[0]}")
            return _Dropped(cause)
        finally:
            if played is None:
                self._watchdog.forget(episode_id)

    async def _score(self, played: Sequence[Trajectory], play: _Play) -> list[Scored | _Dropped]:
        """Rewards of a sample's trajectories; judged again where a judge failed, not played."""
        names = [trajectory.episode_id for trajectory in played]
        cause = ""
        try:
            for attempt in range(ATTEMPTS):
                for name in names:
                    self._watchdog.enter(name, "reward")
                try:
                    return [*await self._scorer.score_all(played, trains=play.trains)]
                except Infrastructure as e:
                    cause = _told(e, play.sample, attempt)
            return [_Dropped(cause)] * len(played)
        finally:
            for name in names:
                self._watchdog.forget(name)


def _told(error: Infrastructure, sample: Sample, attempt: int) -> str:
    # Of a dead engine's last lines every row would tell.
    first = str(error).partition("\n")[0].removesuffix(" Its last lines:")
    log.warning("row %s: %s (attempt %d of %d)", sample.id, first, attempt + 1, ATTEMPTS)
    return f"{type(error).__name__}: {error}"


def _stop_if_too_many_dropped(results: Sequence[Scored | _Dropped]) -> None:
    dropped = [r.cause for r in results if isinstance(r, _Dropped)]
    if len(dropped) <= MAX_DROPPED * len(results):
        return
    # One cause each, whatever ids and addresses its texts hold.
    kinds: dict[str, list[str]] = defaultdict(list)
    for cause in dropped:
        kinds[re.sub(r"\S*\d\S*", "#", cause)].append(cause)
    most = sorted(kinds.values(), key=len, reverse=True)[:3]
    raise RunStopped(
        f"{len(dropped)} of {len(results)} rollouts were dropped, more than {MAX_DROPPED:.0%}."
        " Causes:\n" + "\n".join(f"  {len(causes)} x {causes[0]}" for causes in most)
    )


@contextlib.contextmanager
def open_rollouts(
    config: Config, sampler: Sampler, template: ChatTemplate, scorer: Scorer
) -> Iterator[Rollouts]:
    """Rollouts with the config's tools, in process or served over HTTP; closed at the end."""
    settle_heap()
    raise_limit()
    sandbox.configure(config.sandbox)
    with open_toolbox(config.tools, config.files, config.sandbox) as toolbox:
        rollouts = Rollouts(
            World(sampler, template, toolbox, config), scorer, seed=config.trainer.seed
        )
        try:
            yield rollouts
        finally:
            rollouts.close()


def settle_heap() -> None:
    """Leave what stands now (modules, schemas, the model's objects) out of garbage collection.

    Hundreds of thousands of objects that live as long as the process were looked at again and again
    while episodes made new ones: a third of an agent loop's time.
    """
    gc.collect()
    gc.freeze()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
