"""The tools of an episode, while it lasts: the one core behind the local toolbox and the server.

    ToolHost       all open episodes of a process, and how many calls it takes
      ToolSession  one episode: the functions its row may call, an object per class tool, the
                   answers given so far
      Runner       runs one call: waits its turn, holds the deadline, makes a result of whatever
                   happens

A call is known by (episode, turn, index): asked for twice, it runs once, and both get its answer.
The calls of one object run one after another; an object is made, asked for its reward and closed
exactly once, whatever happens in between.

A tool server may consist of several worker processes. Each listens on a port of its own, and a
client computes which of them an episode stays with (`worker_of`): a process in front of them that
looks at every call would cost each of them a hop, and be the first thing to be full.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import sandbox
from agentrl.errors import ToolServerError
from agentrl.registry import tools
from agentrl.tools.payloads import canonical, readable, unknown_tool
from agentrl.tools.runner import QUEUE_SECONDS, Call, Instance, Runner, Waits, call_off
from agentrl.tools.tool import Tool, lanes_of, schemas_of
from agentrl.tools.validation import SlowCheck
from agentrl.trajectory import Message, Sample, ToolResult

log = logging.getLogger("agentrl.tools")

IDLE_SECONDS = 1800.0
"""A session nobody used for so long belongs to a driver that was killed."""
GRACE_SECONDS = 5.0
"""How long closing an object waits for a call that is still running."""
REMEMBERED = 10_000
"""Closed episodes whose reward can be asked for again."""
MAX_CALLS = 1024
"""Calls at once in a process of a tool server, those that wait for a thread included."""


class UnknownEpisode(ToolServerError):
    """No such session: it was never opened, is closed already, or its server was started anew."""


class CallConflict(ToolServerError):
    """The turn and index of this call were used for another one."""


class SessionConflict(ToolServerError):
    """The episode is open with other tools or other arguments of their constructors."""


class WrongWorker(ToolServerError):
    """The episode stays with another worker of this server."""


class Busy(ToolServerError):
    """The server has as many calls as it takes; sending this one again a little later may help."""


class Draining(ToolServerError):
    """The server is about to stop: calls that run may end, episodes may be closed, no more."""


def worker_of(episode_id: str, count: int) -> int:
    """The worker's number: CRC-32 of the id's UTF-8 bytes, modulo `count`."""
    return zlib.crc32(episode_id.encode("utf-8", "replace")) % count


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place among those of its server."""

    ports: tuple[int, ...] = ()
    """Where the workers listen, by number; none where there is but one."""
    number: int = 0

    def elsewhere(self, episode_id: str) -> int:
        """The port of the worker that the episode stays with; 0 if it is this one."""
        if not self.ports:
            return 0
        number = worker_of(episode_id, len(self.ports))
        return 0 if number == self.number else self.ports[number]


class ToolSession:
    """One episode's tools."""

    def __init__(self, runner: Runner, episode_id: str, sample: Sample, chosen: Sequence[Tool]):
        self.episode_id = episode_id
        self.sample = sample
        self.last_used = time.monotonic()
        self.calls_running = 0
        self._runner = runner
        offers = [t.offer for t in chosen]
        schemas_of(offers)  # refuses functions of the same name
        self.lanes = lanes_of(offers)
        self._functions = {f.name: (t, f) for t in chosen for f in t.functions}
        self._classes = [t for t in chosen if t.is_class]
        self._made_of: dict[str, dict[str, Any]] = {}
        """By class tool, the constructor's arguments."""
        self._instances: dict[str, Instance] = {}
        self._state: dict[str, Any] = {}
        self._waits: Waits = set()
        self._answers: dict[tuple[int, int], tuple[str, bytes, asyncio.Future[ToolResult]]] = {}
        self._opened_with: bytes = b""
        self._opening: asyncio.Task[None] | None = None

    async def open(self, create_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the objects. Asked again, it waits for those it is making.

        Raises:
            SessionConflict: asked again with other `create_kwargs`.
            DataError: `create_kwargs` are not what a constructor takes.
            UserCodeError: a constructor raised or took too long.
        """
        # A tool without arguments may be named with none, or not be named.
        wanted = canonical({tool: dict(kwargs) for tool, kwargs in create_kwargs.items() if kwargs})
        if self._opened_with and self._opened_with != wanted:
            raise SessionConflict(
                f"episode {self.episode_id} is open with other create_kwargs. Use another"
                " episode_id, or send the same create_kwargs again"
            )
        self._opened_with = wanted
        if not self._classes:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._make(create_kwargs))
        await asyncio.shield(self._opening)

    async def _make(self, create_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        for tool in self._classes:
            own = tool.arguments(create_kwargs.get(tool.name, {}), self.sample)
            self._made_of[tool.name] = {**own, **self._given(tool.made_with)}
        for tool in self._classes:
            if tool.stateful:
                made = await self._runner.make(tool, self._made_of[tool.name])
                self._instances[tool.name] = made

    def _given(self, names: Sequence[str], messages: Sequence[Message] = ()) -> dict[str, Any]:
        """What a function or constructor gets besides its arguments, see `injected`."""
        given: dict[str, Any] = {"state": self._state, "sample": self.sample}
        if "messages" in names:
            given["messages"] = readable(messages)
        if "sandbox" in names:
            given["sandbox"] = sandbox.current()
        return {name: given[name] for name in names}

    async def call(
        self,
        turn: int,
        index: int,
        name: str,
        arguments: dict[str, Any],
        messages: Sequence[Message] = (),
    ) -> ToolResult:
        """The answer to a call, from running it or from having run it.

        Raises:
            CallConflict: the turn and index were used for another call.
            ToolServerError: no room, or a tool's own infrastructure is down.
            UserCodeError: the `reward()` of an object that was made for this call raised.
        """
        encoded = canonical(arguments)  # now: the tool may change what it is given
        known = self._answers.get((turn, index))
        if known is not None:
            if known[:2] != (name, encoded):
                raise CallConflict(
                    f"episode {self.episode_id}: call {index} of turn {turn} was {known[0]!r}"
                    f" with other arguments, and now is {name!r}"
                )
            return await asyncio.shield(known[2])
        answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        self._answers[turn, index] = (name, encoded, answer)
        self.calls_running += 1
        try:
            answer.set_result(await self._run(name, arguments, encoded, messages))
        except BaseException as e:
            # Nothing was answered, so asking again may run it.
            del self._answers[turn, index]
            answer.set_exception(e)
            answer.exception()  # seen: without a second caller nobody else will look
            raise
        finally:
            self.calls_running -= 1
            self.last_used = time.monotonic()
        return answer.result()

    async def _run(
        self, name: str, arguments: dict[str, Any], encoded: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        found = self._functions.get(name)
        if found is None:
            return unknown_tool(name, self._functions)
        tool, function = found
        runner = self._runner
        try:
            given = function.parameters.check(arguments)
        except SlowCheck:
            call = Call(tool, function, arguments, self._waits)
            checked = await runner.check_in_thread(call)
            if isinstance(checked, ToolResult):
                return checked
            given = checked
        except Exception as e:
            return runner.refused(tool, name, e)
        if function.injected:
            given = {**given, **self._given(function.injected, messages)}
        # Other episodes may wait for a call whose answer is kept.
        call = Call(tool, function, given, set() if tool.cache else self._waits)
        began = time.monotonic()
        if tool.cache:
            result = await runner.remembered(tool, encoded, lambda: runner.call(call, None))
        elif tool.scope == "call":
            result = await runner.call_once(call, self._made_of[tool.name])
        else:
            result = await runner.call(call, self._instances.get(tool.name))
        seconds = time.monotonic() - began
        return ToolResult(result.content, result.ok, result.reward, result.error, seconds)

    async def close(self, scored: bool = True) -> float:
        """Ask every object for its reward, then close it; the sum of the rewards.

        Args:
            scored: whether there is anybody to hear the reward.
        """
        if self._opening is not None:
            await asyncio.wait((self._opening,))
            scored = scored and self._opening.exception() is None
        ends = [self._end(tool, scored) for tool in self._classes if tool.name in self._instances]
        rewards = await asyncio.gather(*ends, return_exceptions=True)
        call_off(self._waits)  # nobody hears of those calls any more
        for reward in rewards:
            if isinstance(reward, BaseException):
                raise reward
        return float(sum(r for r in rewards if not isinstance(r, BaseException)))

    async def _end(self, tool: Tool, scored: bool) -> float:
        instance = self._instances[tool.name]
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await instance.turn.acquire()
        except TimeoutError:
            log.warning("tool %r is closed while a call is still running", tool.name)
        try:
            return await self._runner.reward(tool, instance) if scored else 0.0
        finally:
            await self._runner.close_object(tool, instance)


class ToolHost:
    """Every open session of a process. Belongs to one event loop.

    Args:
        ran: see `Runner`.
        place: of this process among the workers of its server.
        max_calls: calls at once, see `enter`.
    """

    def __init__(
        self,
        ran: Callable[[str, float, float], None] | None = None,
        *,
        place: Place = Place(),
        max_calls: float = math.inf,
    ):
        self.place = place
        self.calls_in_flight = 0
        """Calls that were let in and have no answer yet."""
        self.draining = False
        """Whether this process is about to stop: sessions and calls are refused."""
        self._max_calls = max_calls
        self._runner = Runner(ran)
        self._sessions: dict[str, ToolSession] = {}
        self._closings: dict[str, asyncio.Task[float]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self) -> None:
        """Let a call in, and count it until `leave`.

        Raises:
            Draining: the server stops.
            Busy: there are as many calls as may be.
        """
        self._refuse_if_draining()
        if self.calls_in_flight >= self._max_calls:
            raise Busy(
                f"the tool server has {self.calls_in_flight} calls in flight, and takes no more"
            )
        self.calls_in_flight += 1

    def leave(self) -> None:
        """Stop counting a call: it was answered."""
        self.calls_in_flight -= 1

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Draining("the tool server is about to stop")

    def _check_place(self, episode_id: str) -> None:
        if port := self.place.elsewhere(episode_id):
            raise WrongWorker(f"episode {episode_id} stays with the worker at port {port}")

    async def open(
        self, episode_id: str, sample: Sample, create_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Open an episode with the tools its row names; opened twice, it is the same session.

        Raises:
            Draining: the server stops.
            WrongWorker: the episode stays with another process.
            SessionConflict: it is open with other tools or `create_kwargs`.
            UserError: an unknown tool, or `create_kwargs` its constructor does not take.
            UserCodeError: a constructor raised or took too long.
        """
        self._refuse_if_draining()
        self._check_place(episode_id)
        session = self._sessions.get(episode_id)
        if session is None:
            if episode_id in self._closings:
                raise UnknownEpisode(f"episode {episode_id} is closed already")
            chosen = [tools.get(name) for name in dict.fromkeys(sample.tools)]
            session = ToolSession(self._runner, episode_id, sample, chosen)
            self._sessions[episode_id] = session
        elif {*sample.tools} != {*session.sample.tools}:
            raise SessionConflict(
                f"episode {episode_id} is open with the tools {[*session.sample.tools]}, and now is"
                f" to be opened with {[*sample.tools]}. Use another episode_id"
            )
        await session.open(create_kwargs)

    def lanes(self, episode_id: str) -> dict[str, str] | None:
        """The functions whose calls run one after another, see `lanes_of`; None if not open."""
        session = self._sessions.get(episode_id)
        return None if session is None else session.lanes

    def session(self, episode_id: str) -> ToolSession:
        """Return the open session of an episode.

        Raises:
            WrongWorker: the episode stays with another process.
            UnknownEpisode: it is not open.
        """
        self._check_place(episode_id)
        try:
            return self._sessions[episode_id]
        except KeyError:
            raise UnknownEpisode(f"episode {episode_id} is not open") from None

    async def close(self, episode_id: str, scored: bool = True) -> float:
        """Close an episode, also where the caller gives up waiting; its class tools' reward.

        Asked again, it gives the same answer.

        Args:
            episode_id: of an open one, or one that was closed.
            scored: whether the reward is asked for.

        Raises:
            UnknownEpisode: never opened, or closed long ago.
            WrongWorker: the episode stays with another process.
            UserCodeError: a `reward()` raised; everything is closed all the same.
        """
        closing = self._closings.get(episode_id)
        if closing is None:
            session = self.session(episode_id)
            del self._sessions[episode_id]
            closing = asyncio.create_task(session.close(scored))
            self._closings[episode_id] = closing
            if len(self._closings) > REMEMBERED:
                del self._closings[next(iter(self._closings))]
        return await asyncio.shield(closing)

    async def reap(self) -> None:
        """Forever: close the sessions that nobody uses any more."""
        while True:
            await asyncio.sleep(min(IDLE_SECONDS / 4, 60.0))
            oldest = time.monotonic() - IDLE_SECONDS
            idle = [
                s.episode_id
                for s in self._sessions.values()
                if s.last_used < oldest and not s.calls_running
            ]
            if idle:
                log.warning("closing %d sessions that were left open", len(idle))
                await asyncio.gather(*map(self.close, idle), return_exceptions=True)

    async def aclose(self) -> None:
        """Close every session, whose reward nobody asks for any more, and let the threads go."""
        closings = [self.close(episode_id, scored=False) for episode_id in [*self._sessions]]
        await asyncio.gather(*closings, return_exceptions=True)
        running = [c for c in self._closings.values() if not c.done()]
        await asyncio.gather(*running, return_exceptions=True)
        self._runner.close()


def patience(timeout: float) -> float:
    """The longest that a call to a tool with this timeout can take to be answered, in seconds."""
    return 2 * QUEUE_SECONDS + timeout
