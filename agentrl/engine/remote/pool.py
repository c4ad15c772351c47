"""Several engines as one.

An episode's first turn goes to the engine with the fewest episodes, later ones to the same, where
their prefix is cached. When an engine fails, the turn is sent to another with the same tokens, and
the episode stays there. What becomes of the engine is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from agentrl.engine.base import Engine, Sampling, Update
from agentrl.engine.remote.client import RemoteEngine
from agentrl.engine.remote.supervisor import (
    Breaker,
    Opener,
    RecoveryPolicy,
    Replica,
    Supervisor,
    open_all,
)
from agentrl.errors import EngineDead, EngineError, EngineNonsense, EngineOverloaded, RequestRefused
from agentrl.trajectory import Generation

SCORE_SECONDS = 600.0
READY_SECONDS = 0.1
"""Between two looks for an engine that is back."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
"""Seconds to wait for a place where all engines are full; doubled from time to time."""

T = TypeVar("T")


class Pool(Engine):
    """An engine made of engines; one alone gains by it too, since it is started anew.

    `generate`, `score`, `ready`, `begin` and `end` belong to one event loop; the other methods wait
    for the engines and are for another thread.
    """

    max_length: int
    """The longest row, in tokens, of the engine that takes the fewest."""

    def __init__(
        self,
        openers: Sequence[Opener],
        *,
        close: Callable[[], None] = lambda: None,
        pacing: RecoveryPolicy | None = None,
    ):
        """Open all engines, side by side.

        Args:
            openers: one an engine: starts it or attaches to it. One that is ours and dies is opened
                again, on a thread.
            close: called at the end, also where an engine does not open.
            pacing: how patient to be.

        Raises:
            AgentRLError: what the first opener that failed raised; the other engines are closed.
        """
        self._pacing = p = pacing or RecoveryPolicy()
        with contextlib.ExitStack() as stack:
            stack.callback(close)
            engines = open_all(openers)
            self._close = stack.pop_all()
        replicas = [
            Replica(i, opener, engine, Breaker(p.first_backoff, p.max_backoff))
            for i, (opener, engine) in enumerate(zip(openers, engines, strict=True))
        ]
        self._supervisor = Supervisor(replicas, p)
        self._replicas = replicas
        self._assignments: dict[str, tuple[Replica, RemoteEngine]] = {}
        """By episode: whose turns go where. Not to a replica's next engine: its cache is empty."""
        self._failovers = 0
        self._told = {"engine/restarts": 0, "engine/failovers": 0}
        self.max_length = min(e.max_length for e in engines)

    # -- Sampler -----------------------------------------------------------------------------------

    async def ready(self) -> None:
        """See `Sampler`: once an engine can be asked.

        Raises:
            EngineDead: none ever will; with the last lines they said.
        """
        while not any(map(self._supervisor.is_usable, self._replicas)):
            self._supervisor.raise_if_hopeless()
            await asyncio.sleep(READY_SECONDS)
        self.max_length = min(self.max_length, *(m.engine.max_length for m in self._replicas))

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
    ) -> Generation:
        """See `Sampler`. An engine that is full is waited for, if all are.

        Raises:
            RequestRefused: no engine would serve it; PromptTooLong where it leaves no room.
            EngineOverloaded: all engines were full until the deadline.
            EngineError: all engines failed, there is none to ask, or the deadline passed.
            UserError: `sampling` cannot be.
        """

        async def ask(engine: RemoteEngine) -> Generation:
            sent = self._supervisor.version
            found = await engine.generate(
                prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
            )
            self._check_version(found, sent, engine)
            return found

        return await self._try_engines(
            lambda tried: self._replica_for_episode(episode_id, tried), ask, deadline
        )

    def end(self, episode_id: str) -> None:
        replica, engine = self._assignments.pop(episode_id, (None, None))
        if replica is not None and engine is not None:
            replica.episodes.discard(episode_id)
            engine.end(episode_id)

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """See `Sampler`: by any engine."""
        return await self._try_engines(
            lambda tried: min(
                self._candidates(tried), key=lambda m: len(m.in_flight), default=None
            ),
            lambda engine: engine.score(token_ids, temperature),
            time.monotonic() + SCORE_SECONDS,
        )

    async def scores(self, token_ids: array[int]) -> list[array[float]]:
        """See `Engine`: by all that can be asked. One that fails alone is sent the policy again."""
        found: list[array[float]] = []
        failed: list[tuple[Replica, RemoteEngine, EngineError]] = []
        deadline = time.monotonic() + SCORE_SECONDS
        for replica in self._candidates(set()):
            engine = replica.engine
            try:
                found.append(await self._ask(replica, lambda e: e.score(token_ids), deadline))
            except EngineError as e:
                failed.append((replica, engine, e))
        if not found:
            if failed:
                raise failed[-1][2]
            self._supervisor.refuse()
        for failure in failed:
            self._supervisor.exclude(*failure, stale=True)
        return found

    # -- EngineControl -----------------------------------------------------------------------------

    def sleep(self) -> None:
        """See `EngineControl`; no engine is sent the policy until it is published."""
        self._supervisor.sleep()

    def publish(self, update: Update) -> int:
        """See `EngineControl`; an engine that does not take it is left out.

        Raises:
            EngineError: no engine took it; with all causes.
        """
        return self._supervisor.publish(update)

    def close(self) -> None:
        """See `EngineControl`. Idempotent."""
        with self._close:
            self._supervisor.close()

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, and how many engines can be asked now."""
        now = {"engine/restarts": self._supervisor.restarts, "engine/failovers": self._failovers}
        since = {name: float(count - self._told[name]) for name, count in now.items()}
        self._told = now
        return since | {
            "engine/usable": float(sum(map(self._supervisor.is_usable, self._replicas)))
        }

    # -- where a request goes ----------------------------------------------------------------------

    async def _try_engines(
        self,
        choose: Callable[[set[Replica]], Replica | None],
        ask: Callable[[RemoteEngine], Awaitable[T]],
        deadline: float,
    ) -> T:
        """Ask one engine after another, each once; and again those that were full."""
        failed: set[Replica] = set()
        full: set[Replica] = set()
        error: EngineError | None = None
        backoff, moved = FIRST_BACKOFF, False
        while True:
            replica = choose(failed | full)
            if replica is None and full:
                left = deadline - time.monotonic()
                if left <= 0:
                    assert error is not None
                    raise error
                await asyncio.sleep(min(left, backoff * random.uniform(0.5, 1.0)))
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                full.clear()
                continue
            if replica is None:
                if error is not None:
                    raise error
                self._supervisor.refuse()
            if moved:
                self._failovers += 1
                moved = False
            try:
                return await self._ask(replica, ask, deadline)
            except RequestRefused:
                raise
            except EngineOverloaded as e:
                full.add(replica)
                error = e
            except EngineError as e:
                failed.add(replica)
                error, moved = e, True
            if time.monotonic() >= deadline:
                raise error

    async def _ask(
        self, replica: Replica, ask: Callable[[RemoteEngine], Awaitable[T]], deadline: float
    ) -> T:
        """One request to one engine, and what its outcome says of the engine."""
        engine, flight = replica.engine, asyncio.timeout(None)
        try:
            async with flight:
                with self._in_flight(replica, engine, flight):
                    found = await ask(engine)
        except TimeoutError:
            if not flight.expired():
                raise
            cause = replica.cause or "the engine is closed"
            raise EngineError(f"{engine.url} was given up: {cause}") from None
        except (RequestRefused, EngineOverloaded):
            raise
        except EngineError as e:
            # An answer that came too late says nothing: the episode had no time left.
            if time.monotonic() < deadline or isinstance(e, EngineDead):
                self._supervisor.failed(replica, engine, e)
            raise
        self._supervisor.succeeded(replica, engine)
        return found

    def _replica_for_episode(self, episode_id: str, tried: set[Replica]) -> Replica | None:
        """Whom to ask for an episode's turn: where it was, or where the fewest are."""
        replica, engine = self._assignments.get(episode_id, (None, None))
        if (
            replica is not None
            and replica not in tried
            and replica.engine is engine
            and self._supervisor.is_usable(replica)
        ):
            return replica
        replica = min(
            self._candidates(tried),
            key=lambda m: (len(m.episodes), m.served, m.index),
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
        return [m for m in self._replicas if m not in tried and self._supervisor.is_usable(m)]

    def _check_version(self, found: Generation, sent: int | None, engine: RemoteEngine) -> None:
        """Refuse what another policy sampled than those published while it was in flight.

        Raises:
            EngineNonsense: it did.
        """
        now = self._supervisor.version
        if sent is None or now is None:
            return
        lo, hi = min(sent, now), max(sent, now)
        if not lo <= min(found.versions, default=lo) <= max(found.versions, default=lo) <= hi:
            raise EngineNonsense(
                f"{engine.url}: tokens of policy {sorted(set(found.versions))}, but {now} is"
                " published"
            )

    # -- whether an engine hangs -------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_flight(
        self, replica: Replica, engine: RemoteEngine, flight: asyncio.Timeout
    ) -> Iterator[None]:
        """Watch the engine while a request is there."""
        replica.in_flight.add(flight)
        replica.loop = asyncio.get_running_loop()
        if replica.watch is None or replica.watch.done():
            replica.watch = asyncio.create_task(self._watch(replica, engine))
        try:
            yield
        finally:
            replica.in_flight.discard(flight)
            if not replica.in_flight:
                replica.watch.cancel()
                replica.watch = None

    async def _watch(self, replica: Replica, engine: RemoteEngine) -> None:
        """Look at an engine every so often; leave it out once it is seen to hang."""
        misses = 0
        while replica.engine is engine and not replica.breaker.open:
            await asyncio.sleep(self._pacing.health_interval)
            try:
                await engine.check_health(time.monotonic() + self._pacing.health_timeout)
                misses = 0
            except EngineError as e:
                if self._supervisor.standing:
                    misses = 0
                    continue
                misses += 1
                if misses == 2 or isinstance(e, EngineDead):
                    self._supervisor.exclude(replica, engine, e, broken=True)
