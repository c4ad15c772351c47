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
    Member,
    Opener,
    Pacing,
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
        pacing: Pacing | None = None,
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
        self._pacing = p = pacing or Pacing()
        with contextlib.ExitStack() as stack:
            stack.callback(close)
            engines = open_all(openers)
            self._close = stack.pop_all()
        members = [
            Member(i, opener, engine, Breaker(p.first_wait, p.longest_wait))
            for i, (opener, engine) in enumerate(zip(openers, engines, strict=True))
        ]
        self._supervisor = Supervisor(members, p)
        self._members = members
        self._pins: dict[str, tuple[Member, RemoteEngine]] = {}
        """By episode: whose turns go where. Not to a member's next engine: its cache is empty."""
        self._failovers = 0
        self._told = {"engine/restarts": 0, "engine/failovers": 0}
        self.max_length = min(e.max_length for e in engines)

    # -- Sampler -----------------------------------------------------------------------------------

    async def ready(self) -> None:
        """See `Sampler`: once an engine can be asked.

        Raises:
            EngineDead: none ever will; with the last lines they said.
        """
        while not any(map(self._supervisor.usable, self._members)):
            self._supervisor.check_hope()
            await asyncio.sleep(READY_SECONDS)
        self.max_length = min(self.max_length, *(m.engine.max_length for m in self._members))

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

        return await self._somewhere(lambda tried: self._pin(episode_id, tried), ask, deadline)

    def end(self, episode_id: str) -> None:
        member, engine = self._pins.pop(episode_id, (None, None))
        if member is not None and engine is not None:
            member.episodes.discard(episode_id)
            engine.end(episode_id)

    async def score(self, token_ids: array[int], temperature: float = 1.0) -> array[float]:
        """See `Sampler`: by any engine."""
        return await self._somewhere(
            lambda tried: min(self._candidates(tried), key=lambda m: len(m.flights), default=None),
            lambda engine: engine.score(token_ids, temperature),
            time.monotonic() + SCORE_SECONDS,
        )

    async def scores(self, token_ids: array[int]) -> list[array[float]]:
        """See `Engine`: by all that can be asked. One that fails alone is sent the policy again."""
        found: list[array[float]] = []
        failed: list[tuple[Member, RemoteEngine, EngineError]] = []
        deadline = time.monotonic() + SCORE_SECONDS
        for member in self._candidates(set()):
            engine = member.engine
            try:
                found.append(await self._ask(member, lambda e: e.score(token_ids), deadline))
            except EngineError as e:
                failed.append((member, engine, e))
        if not found:
            if failed:
                raise failed[-1][2]
            self._supervisor.refuse()
        for failure in failed:
            self._supervisor.leave_out(*failure, stale=True)
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
        return since | {"engine/usable": float(sum(map(self._supervisor.usable, self._members)))}

    # -- where a request goes ----------------------------------------------------------------------

    async def _somewhere(
        self,
        choose: Callable[[set[Member]], Member | None],
        ask: Callable[[RemoteEngine], Awaitable[T]],
        deadline: float,
    ) -> T:
        """Ask one engine after another, each once; and again those that were full."""
        failed: set[Member] = set()
        full: set[Member] = set()
        error: EngineError | None = None
        backoff, moved = FIRST_BACKOFF, False
        while True:
            member = choose(failed | full)
            if member is None and full:
                left = deadline - time.monotonic()
                if left <= 0:
                    assert error is not None
                    raise error
                await asyncio.sleep(min(left, backoff * random.uniform(0.5, 1.0)))
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                full.clear()
                continue
            if member is None:
                if error is not None:
                    raise error
                self._supervisor.refuse()
            if moved:
                self._failovers += 1
                moved = False
            try:
                return await self._ask(member, ask, deadline)
            except RequestRefused:
                raise
            except EngineOverloaded as e:
                full.add(member)
                error = e
            except EngineError as e:
                failed.add(member)
                error, moved = e, True
            if time.monotonic() >= deadline:
                raise error

    async def _ask(
        self, member: Member, ask: Callable[[RemoteEngine], Awaitable[T]], deadline: float
    ) -> T:
        """One request to one engine, and what its outcome says of the engine."""
        engine, flight = member.engine, asyncio.timeout(None)
        try:
            async with flight:
                with self._in_flight(member, engine, flight):
                    found = await ask(engine)
        except TimeoutError:
            if not flight.expired():
                raise
            cause = member.cause or "the engine is closed"
            raise EngineError(f"{engine.url} was given up: {cause}") from None
        except (RequestRefused, EngineOverloaded):
            raise
        except EngineError as e:
            # An answer that came too late says nothing: the episode had no time left.
            if time.monotonic() < deadline or isinstance(e, EngineDead):
                self._supervisor.failed(member, engine, e)
            raise
        self._supervisor.succeeded(member, engine)
        return found

    def _pin(self, episode_id: str, tried: set[Member]) -> Member | None:
        """Whom to ask for an episode's turn: where it was, or where the fewest are."""
        member, engine = self._pins.get(episode_id, (None, None))
        if (
            member is not None
            and member not in tried
            and member.engine is engine
            and self._supervisor.usable(member)
        ):
            return member
        member = min(
            self._candidates(tried),
            key=lambda m: (len(m.episodes), m.served, m.index),
            default=None,
        )
        if member is not None:
            self.end(episode_id)
            self._pins[episode_id] = member, member.engine
            member.episodes.add(episode_id)
            member.served += 1
            member.engine.begin(episode_id)
        return member

    def _candidates(self, tried: set[Member]) -> list[Member]:
        return [m for m in self._members if m not in tried and self._supervisor.usable(m)]

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
        self, member: Member, engine: RemoteEngine, flight: asyncio.Timeout
    ) -> Iterator[None]:
        """Watch the engine while a request is there."""
        member.flights.add(flight)
        member.loop = asyncio.get_running_loop()
        if member.watch is None or member.watch.done():
            member.watch = asyncio.create_task(self._watch(member, engine))
        try:
            yield
        finally:
            member.flights.discard(flight)
            if not member.flights:
                member.watch.cancel()
                member.watch = None

    async def _watch(self, member: Member, engine: RemoteEngine) -> None:
        """Look at an engine every so often; leave it out once it is seen to hang."""
        misses = 0
        while member.engine is engine and not member.breaker.open:
            await asyncio.sleep(self._pacing.health_every)
            try:
                await engine.check_health(time.monotonic() + self._pacing.health_seconds)
                misses = 0
            except EngineError as e:
                if self._supervisor.standing:
                    misses = 0
                    continue
                misses += 1
                if misses == 2 or isinstance(e, EngineDead):
                    self._supervisor.leave_out(member, engine, e, broken=True)
