"""Several engines as one.

The first turn of an episode goes to the engine with the fewest episodes, later turns to the same
engine, where their prefix is cached. When an engine fails, the turn is sent to another one with the
same tokens, and the episode stays there. The supervisor repairs the engine that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from agentrl.engine.base import Engine, Followers, Sampling, SharedSampler, Update
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.supervisor import (
    Opener,
    RecoveryPolicy,
    Replica,
    Supervisor,
    open_all,
)
from agentrl.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidEngineResponse,
    RequestRefused,
)
from agentrl.http.pool import paused_time_limits
from agentrl.images import RowImage
from agentrl.trajectory import Generation

SCORE_SECONDS = 600.0
POLL_SECONDS = 0.1
"""The interval between two checks whether an engine is available again."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
"""The seconds to wait if all engines are full; doubled each time."""

T = TypeVar("T")


class EnginePool(Engine):
    """Several engines that are used as one.

    A pool of one engine is useful too, because it restarts the engine. `generate`, `scores`,
    `ready`, `begin` and `end` belong to one event loop. The other methods block, and are for
    another thread.
    """

    max_length: int
    """The longest row, in tokens, that all engines accept."""
    is_concurrent = True

    def __init__(
        self,
        openers: Sequence[Opener],
        *,
        close: Callable[[], None] = lambda: None,
        recovery: RecoveryPolicy | None = None,
    ):
        """Open all engines at the same time.

        Args:
            openers: one function per engine, which starts it or connects to it. If an engine that
                agentrl started ends, a thread opens it again.
            close: called at the end, also if an engine cannot be opened.
            recovery: intervals and limits of the recovery of engines.

        Raises:
            AgentRLError: the error of the first opener that failed. The other engines are closed.
        """
        policy = recovery or RecoveryPolicy()
        with contextlib.ExitStack() as stack:
            stack.callback(close)
            engines = open_all(openers)
            self._close = stack.pop_all()
        replicas = [
            Replica(i, opener, engine)
            for i, (opener, engine) in enumerate(zip(openers, engines, strict=True))
        ]
        self.supervisor, self.replicas = Supervisor(replicas, policy), replicas
        self._start(policy)
        self.max_length = min(e.max_length for e in engines)

    def _start(self, policy: RecoveryPolicy) -> None:
        """Create what routing needs."""
        self._recovery = policy
        self._assignments: dict[str, tuple[Replica, RemoteEngine]] = {}
        """The engine of each episode. After a restart, a replica has another engine, with an empty
        cache."""
        self.failovers = 0
        self._reported = {"engine/restarts": 0, "engine/failovers": 0}

    # -- Sampler -----------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Return when an engine can be used.

        Raises:
            NoEngineLeft: no engine will be available; the message has the last error of each.
        """
        while not any(map(self.supervisor.is_usable, self.replicas)):
            self.supervisor.raise_if_unrecoverable()
            await asyncio.sleep(POLL_SECONDS)
        self.max_length = min(
            self.max_length, *(replica.engine.max_length for replica in self.replicas)
        )

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        """Sample a turn on one of the engines. If all are full, wait.

        Raises:
            RequestRefused: no engine can serve the request; PromptTooLong if the prompt is too
                long.
            EngineOverloaded: all engines were full until the deadline.
            EngineError: all engines failed, none can be used, or the deadline passed.
            UserError: `sampling` is invalid.
        """

        async def send_request(engine: RemoteEngine) -> Generation:
            first = self.supervisor.version
            result = await engine.generate(
                prompt_ids,
                sampling,
                episode_id=episode_id,
                seed=seed,
                deadline=deadline,
                images=images,
            )
            self._check_version(result, first, engine)
            return result

        return await self._try_engines(episode_id, send_request, deadline)

    def end(self, episode_id: str) -> None:
        replica, engine = self._assignments.pop(episode_id, (None, None))
        if replica is not None and engine is not None:
            replica.episodes.discard(episode_id)
            engine.end(episode_id)

    async def scores(
        self, token_ids: array[int], images: Sequence[RowImage] = ()
    ) -> list[array[float]]:
        """Return the logprobs of each engine that can be used.

        If an engine fails while another one succeeds, the policy is sent to it again.
        """
        deadline = time.monotonic() + SCORE_SECONDS
        candidates = [(replica, replica.engine) for replica in self._candidates(set())]
        answers = await asyncio.gather(
            *(self._send(r, lambda e: e.score(token_ids, images), deadline) for r, _ in candidates),
            return_exceptions=True,
        )
        result: list[array[float]] = []
        failed: list[tuple[Replica, RemoteEngine, EngineError]] = []
        for (replica, engine), answer in zip(candidates, answers, strict=True):
            if isinstance(answer, EngineError):
                failed.append((replica, engine, answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                result.append(answer)
        if not result:
            if failed:
                raise failed[-1][2]
            self.supervisor.raise_unavailable()
        for failure in failed:
            self.supervisor.exclude(*failure, stale=True)
        return result

    def reprefill_tokens(self) -> int:
        return sum(replica.engine.reprefilled for replica in self.replicas)

    def share(self, followers: Followers) -> SharedSampler:
        """Let other processes send requests to the servers."""
        from agentrl.engine.remote import follow

        for replica in self.replicas:
            replica.engine.followers = followers
        self.supervisor.followers = followers
        state = partial(follow.view_of, self)
        return SharedSampler(
            make=lambda: partial(follow.FollowingPool, state()),
            functions={
                "engine_failed": partial(follow.report_failure, self),
                "engines_wanted": followers.changed,
            },
            state=state,
        )

    # -- EngineControl -----------------------------------------------------------------------------

    def weights_moving(self) -> None:
        """Announce that the learner's weights change. No engine gets them until `publish`."""
        self.supervisor.weights_moving()

    def sleep(self) -> None:
        """Announce that the trainer computes. No engine gets the policy until `publish`."""
        self.supervisor.sleep()

    def publish(self, update: Update) -> int:
        """Send the policy to all engines. An engine that does not load it is excluded.

        Raises:
            EngineError: no engine loaded it; the message has all causes.
        """
        return self.supervisor.send_update(update)

    def close(self) -> None:
        """Close all engines. Idempotent."""
        with self._close:
            self.supervisor.close()

    def metrics(self) -> dict[str, float]:
        """Return the counts of events since the last call, and how many engines can be used now."""
        totals = {"engine/restarts": self.supervisor.restarts, "engine/failovers": self.failovers}
        new = {name: float(count - self._reported[name]) for name, count in totals.items()}
        self._reported = totals
        return new | {"engine/usable": float(sum(map(self.supervisor.is_usable, self.replicas)))}

    # -- routing -----------------------------------------------------------------------------------

    async def _try_engines(
        self,
        episode_id: str,
        send_request: Callable[[RemoteEngine], Awaitable[Generation]],
        deadline: float,
    ) -> Generation:
        """Send a request for a turn to the engines, one after another, until one answers.

        An engine that failed is not tried again. If all others are full, they are tried again.
        """
        failed: set[Replica] = set()
        full: set[Replica] = set()
        error: EngineError | None = None
        backoff, has_failed_over = FIRST_BACKOFF, False
        while True:
            replica = self._replica_for_episode(episode_id, failed | full)
            if replica is None and full:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    assert error is not None
                    raise error
                await asyncio.sleep(min(remaining, backoff * random.uniform(0.5, 1.0)))
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                full.clear()
                continue
            if replica is None:
                if error is not None:
                    raise error
                if self.supervisor.is_publishing and time.monotonic() < deadline:
                    with paused_time_limits():
                        await asyncio.sleep(POLL_SECONDS)
                    continue
                self.supervisor.raise_unavailable()
            if has_failed_over:
                self.failovers += 1
                has_failed_over = False
            try:
                return await self._send(replica, send_request, deadline)
            except RequestRefused:
                raise
            except EngineOverloaded as e:
                full.add(replica)
                error = e
            except EngineError as e:
                failed.add(replica)
                error, has_failed_over = e, True
            if time.monotonic() >= deadline:
                raise error

    async def _send(
        self,
        replica: Replica,
        send_request: Callable[[RemoteEngine], Awaitable[T]],
        deadline: float,
    ) -> T:
        """Send a request to one engine, and record its outcome."""
        engine, timeout = replica.engine, asyncio.timeout(None)
        try:
            async with timeout:
                with self._in_flight(replica, engine, timeout):
                    result = await send_request(engine)
        except TimeoutError:
            if not timeout.expired():
                raise
            cause = replica.cause or "the engine is closed"
            raise EngineError(f"{engine.url} was abandoned: {cause}") from None
        except (RequestRefused, EngineOverloaded):
            raise
        except EngineError as e:
            # A missed deadline says nothing about the engine: the episode had no time left.
            if time.monotonic() < deadline or isinstance(e, EngineDead):
                self.supervisor.record_failure(replica, engine, e)
            raise
        self.supervisor.record_success(replica, engine)
        return result

    def _replica_for_episode(self, episode_id: str, tried: set[Replica]) -> Replica | None:
        """Return the replica for the next turn of an episode.

        It is the last one that was used, or the one with the fewest episodes.
        """
        replica, engine = self._assignments.get(episode_id, (None, None))
        if (
            replica is not None
            and replica not in tried
            and replica.engine is engine
            and self.supervisor.is_usable(replica)
        ):
            return replica
        replica = min(
            self._candidates(tried),
            key=lambda replica: (len(replica.episodes), replica.served, replica.index),
            default=None,
        )
        if replica is not None:
            self.end(episode_id)
            self._assignments[episode_id] = replica, replica.engine
            replica.episodes.add(episode_id)
            replica.served += 1
            replica.engine.begin(episode_id)
        return replica

    def _candidates(self, tried: set[Replica]) -> list[Replica]:
        return [
            replica
            for replica in self.replicas
            if replica not in tried and self.supervisor.is_usable(replica)
        ]

    def _check_version(self, result: Generation, first: int | None, engine: RemoteEngine) -> None:
        """Check that only policies that were published during a request sampled its turn.

        Args:
            result: the turn.
            first: the version that was published when the request was sent.
            engine: the engine of the request.

        Raises:
            InvalidEngineResponse: another policy sampled a token.
        """
        last = self.supervisor.newest
        if first is None or last is None:
            return
        lo, hi = min(first, last), max(first, last)
        if not lo <= min(result.versions, default=lo) <= max(result.versions, default=lo) <= hi:
            raise InvalidEngineResponse(
                f"{engine.url}: tokens of policy {sorted(set(result.versions))}, but {last} is"
                " published"
            )

    # -- health ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_flight(
        self, replica: Replica, engine: RemoteEngine, timeout: asyncio.Timeout
    ) -> Iterator[None]:
        """Check the health of the engine regularly while a request is in flight."""
        replica.in_flight.add(timeout)
        replica.loop = asyncio.get_running_loop()
        if replica.watch is None or replica.watch.done():
            replica.watch = asyncio.create_task(self._watch(replica, engine))
        try:
            yield
        finally:
            replica.in_flight.discard(timeout)
            if not replica.in_flight:
                replica.watch.cancel()
                replica.watch = None

    async def _watch(self, replica: Replica, engine: RemoteEngine) -> None:
        """Check the health of an engine regularly; exclude it if it hangs."""
        misses = 0
        while replica.engine is engine and not replica.is_excluded:
            await asyncio.sleep(self._recovery.health_interval)
            try:
                await engine.check_health(time.monotonic() + self._recovery.health_timeout)
                misses = 0
            except EngineError as e:
                if self.supervisor.is_suspended:
                    misses = 0
                    continue
                misses += 1
                if misses == 2 or isinstance(e, EngineDead):
                    self.supervisor.exclude(replica, engine, e, broken=True)
