"""The sessions of tools: the core that `LocalToolbox` and the tool server share.

    ToolHost       all open sessions of a process, and the limit of concurrent calls
      ToolSession  one episode: the functions that its row lists, one object per class tool, and
                   the results so far
      Runner       runs one call: queue, deadline, and a result in every case

A call is identified by (episode, turn, index). If it is sent twice, it runs once, and both requests
get the same result. The calls of one object run one after another. Each object is created once, its
`reward()` is called once, and it is closed once, also after errors.

A tool server may have several worker processes, each on its own port. A client computes which
worker serves an episode (`worker_number`). A proxy in front of them would add a hop to every call,
and it would be the first process to be overloaded.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentrl import sandbox
from agentrl.errors import SessionLost, ToolServerError, UserError
from agentrl.plural import plural
from agentrl.registry import tools
from agentrl.replies import Reply, check_reply
from agentrl.tools.environment import offered_functions, to_scores
from agentrl.tools.payloads import canonical_json, clean_content, storable_messages, unknown_tool
from agentrl.tools.runner import (
    Call,
    CallLimits,
    Instance,
    Runner,
    Waiters,
    cancel_waiters,
)
from agentrl.tools.tool import Tool, environment_hooks, schemas_of, serial_groups_of
from agentrl.tools.validation import SlowCheck
from agentrl.trajectory import Message, Sample, Scores, ToolResult, copy_value

log = logging.getLogger("agentrl.tools")

IDLE_SECONDS = 1800.0
"""A session that was not used for this time is closed, because its trainer was probably killed."""
GRACE_SECONDS = 5.0
"""The time that closing an object waits for a call that still runs."""
MAX_CLOSED_EPISODES = 10_000
"""How many closed episodes are remembered, so that their reward can be requested again."""
MAX_CALLS = 1024
"""Limit of concurrent calls in a process of a tool server, including those that wait for a thread.
"""


class UnknownEpisode(SessionLost):
    """There is no such session: it was never opened or is closed, or the server was restarted."""


class CallConflict(ToolServerError):
    """The turn and index of this call belong to another call."""


class SessionConflict(ToolServerError):
    """The episode is already open with other tools or other constructor arguments."""


class WrongWorker(ToolServerError):
    """Another worker of this server serves the episode."""


class Busy(ToolServerError):
    """The server has its maximum of concurrent calls. The call may be sent again later."""


class Draining(ToolServerError):
    """The server is stopping: running calls may end and episodes may be closed, nothing else."""


def worker_number(episode_id: str, count: int) -> int:
    """Return the number of an episode's worker: CRC-32 of the id's UTF-8 bytes, modulo `count`."""
    return zlib.crc32(episode_id.encode("utf-8", "replace")) % count


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The number of this process among the workers of its server, and the ports of all."""

    ports: tuple[int, ...] = ()
    """The ports of all workers, by number; empty if there is only one worker."""
    number: int = 0

    def other_port(self, episode_id: str) -> int:
        """Return the port of the worker that serves an episode; 0 if it is this worker."""
        if not self.ports:
            return 0
        number = worker_number(episode_id, len(self.ports))
        return 0 if number == self.number else self.ports[number]


class Opened(NamedTuple):
    """A session that is open, as the agent loop sees it."""

    messages: Sequence[Message] = ()
    """The openings of its class tools, or the first observations of its environment."""
    functions: Sequence[str] = ()
    """The names of the functions that the model may call."""
    hooks: Sequence[str] = ()
    """Which of `respond` and `reward` its environment has."""


def _start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task whose error need not be read: all that wait for it may be cancelled earlier."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class ToolSession:
    """The tools of one episode."""

    def __init__(self, runner: Runner, episode_id: str, sample: Sample, row_tools: Sequence[Tool]):
        self.episode_id = episode_id
        self.sample = sample
        self.last_used = time.monotonic()
        self.calls_running = 0
        self._runner = runner
        specs = [t.spec for t in row_tools]
        schemas_of(specs)  # raises if two functions have the same name
        self.serial_groups = serial_groups_of(specs)
        self._known_functions = {f.name: (t, f) for t in row_tools for f in t.functions}
        self._functions = self._known_functions
        """Those that the model may call."""
        self._classes = [t for t in row_tools if t.is_class]
        self._create_kwargs: dict[str, dict[str, Any]] = {}
        """The row's constructor arguments of each class tool."""
        self._instances: dict[str, Instance] = {}
        self._state: dict[str, Any] = {}
        self._async_waiters: Waiters = set()
        """The waits for async calls, which can be cancelled at once."""
        self._waiters: Waiters = set()
        """The waits for calls in threads and processes."""
        self._answers: dict[tuple[int, int], tuple[str, bytes, asyncio.Future[ToolResult]]] = {}
        self._create_kwargs_json: bytes = b""
        self._opening: asyncio.Task[Opened] | None = None
        self._replies: dict[int, asyncio.Task[Reply | None]] = {}
        self._scores: asyncio.Task[Scores] | None = None

    async def open(self, create_kwargs: Mapping[str, Mapping[str, Any]]) -> Opened:
        """Create the objects and open them. A second call waits for the first one.

        Raises:
            SessionConflict: a second call has other `create_kwargs`.
            DataError: a constructor does not take its `create_kwargs`.
            UserCodeError: a constructor, an `opening()` or a `start()` raised or took too long; or
                an environment's `tools` has a name that is no public method.
        """
        # Empty arguments of a tool are the same as none.
        encoded = canonical_json(
            {tool: dict(kwargs) for tool, kwargs in create_kwargs.items() if kwargs}
        )
        if self._create_kwargs_json and self._create_kwargs_json != encoded:
            raise SessionConflict(
                f"episode {self.episode_id} is open with other create_kwargs. Use another"
                " episode_id, or send the same create_kwargs again"
            )
        self._create_kwargs_json = encoded
        if not self._classes:
            return Opened((), tuple(self._functions))
        if self._opening is None:
            self._opening = _start(self._make(create_kwargs))
        return await asyncio.shield(self._opening)

    async def _make(self, create_kwargs: Mapping[str, Mapping[str, Any]]) -> Opened:
        messages: list[Message] = []
        for tool in self._classes:
            arguments = tool.arguments(create_kwargs.get(tool.name, {}), self.sample)
            self._create_kwargs[tool.name] = arguments
        for tool in self._classes:
            if tool.stateful:
                instance = await self._runner.make(tool, self._constructor_arguments(tool))
                self._instances[tool.name] = instance
                messages += await self._runner.opening(tool, instance)
            if tool.is_environment:
                self._offer(tool)
        hooks = environment_hooks([tool.spec for tool in self._classes])
        return Opened(tuple(messages), tuple(self._functions), hooks)

    def _offer(self, tool: Tool) -> None:
        """Let the model call the functions that an environment offers now.

        Raises:
            UserCodeError: the environment's `tools` has a name that is no public method.
        """
        offered = offered_functions(tool, self._instances[tool.name].value)
        self._functions = {name: self._known_functions[name] for name in offered}

    async def respond(self, turn: int, messages: Sequence[Message]) -> Reply | None:
        """Return the environment's reply to a turn. A turn that is sent again gets the same reply.

        Raises:
            UserCodeError: `respond()` raised, took too long, or returned something else.
            UserError: the episode has no environment that replies.
            ToolServerError: `respond()` could not start, or raised `Infrastructure`.
        """
        if turn not in self._replies:
            self._replies[turn] = _start(self._reply(messages))
        return await asyncio.shield(self._replies[turn])

    async def _reply(self, messages: Sequence[Message]) -> Reply | None:
        tool, reply = await self._ask("respond", messages)
        self._offer(tool)
        checked = check_reply(tool.label, reply)
        if checked is None:
            return None
        content = clean_content(checked.content, checked.images)
        return Reply(content, float(checked.score), bool(checked.done), checked.images)

    async def score(self, messages: Sequence[Message]) -> Scores:
        """Return the environment's reward. `reward()` is called once; later calls get its result.

        Raises:
            UserCodeError: `reward()` raised, took too long, or returned something else.
            UserError: the episode has no environment with a reward.
            ToolServerError: `reward()` could not start, or raised `Infrastructure`.
        """
        if self._scores is None:
            self._scores = _start(self._score(messages))
        return await asyncio.shield(self._scores)

    async def _score(self, messages: Sequence[Message]) -> Scores:
        tool, returned = await self._ask("reward", messages)
        return to_scores(f"{tool.label}: reward()", returned)

    async def _ask(self, hook: str, messages: Sequence[Message]) -> tuple[Tool, Any]:
        """Call a hook of the episode's environment; return the environment and the result."""
        tool = next((t for t in self._classes if t.is_environment and hook in t.hooks), None)
        if tool is None:
            raise UserError(f"episode {self.episode_id} has no environment with {hook}()")
        self.calls_running += 1
        try:
            instance = self._instances[tool.name]
            own = copy_value(storable_messages(messages))
            is_async = inspect.iscoroutinefunction(getattr(instance.value, hook))
            waiters = self._async_waiters if is_async else self._waiters
            return tool, await self._runner.ask(tool, instance, hook, own, waiters)
        finally:
            self.calls_running -= 1
            self.last_used = time.monotonic()

    def _constructor_arguments(self, tool: Tool) -> dict[str, Any]:
        """Return the constructor arguments of one object of a class tool."""
        injected = self._injected_values(tool.constructor_injected)
        return {**copy_value(self._create_kwargs[tool.name]), **injected}

    def _injected_values(
        self, names: Sequence[str], messages: Sequence[Message] = ()
    ) -> dict[str, Any]:
        """Return the values of the parameters that agentrl fills, see `injected_parameters`."""
        values: dict[str, Any] = {"state": self._state, "sample": self.sample}
        if "messages" in names:
            values["messages"] = copy_value(storable_messages(messages))
        if "sandbox" in names:
            values["sandbox"] = sandbox.current()
        return {name: values[name] for name in names}

    async def call(
        self,
        turn: int,
        index: int,
        name: str,
        arguments: dict[str, Any],
        messages: Sequence[Message] = (),
    ) -> ToolResult:
        """Run a call, or return its result if it ran before.

        Raises:
            CallConflict: the turn and index belong to another call.
            ToolServerError: the call could not start, or the tool raised `Infrastructure`.
            UserCodeError: the `reward()` of an object that was created for this call raised.
        """
        # Encoded before the call, because the tool may change its arguments.
        encoded = canonical_json(arguments)
        while (earlier := self._answers.get((turn, index))) is not None:
            earlier_name, earlier_arguments, answer = earlier
            if (earlier_name, earlier_arguments) != (name, encoded):
                raise CallConflict(
                    f"episode {self.episode_id}: call {index} of turn {turn} was sent before"
                    f" as {earlier_name!r} with other arguments, and now as {name!r}"
                )
            await asyncio.wait((answer,))
            if not answer.cancelled():
                return answer.result()
            # The earlier request was cancelled before there was a result: run the call again.
        answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        self._answers[turn, index] = (name, encoded, answer)
        self.calls_running += 1
        try:
            answer.set_result(await self._run(name, arguments, encoded, messages))
        except BaseException as e:
            # There is no result, so the same request may run the call again.
            del self._answers[turn, index]
            if isinstance(e, asyncio.CancelledError):
                answer.cancel()
            else:
                answer.set_exception(e)
                answer.exception()  # marks the exception as retrieved: nobody else may wait for it
            raise
        finally:
            self.calls_running -= 1
            self.last_used = time.monotonic()
        return answer.result()

    async def _run(
        self, name: str, arguments: dict[str, Any], encoded: bytes, messages: Sequence[Message]
    ) -> ToolResult:
        entry = self._functions.get(name)
        if entry is None:
            return unknown_tool(name, self._functions)
        tool, function = entry
        runner = self._runner
        try:
            values = function.parameters.check(arguments)
        except SlowCheck:
            call = Call(tool, function, arguments, self._waiters)
            result = await runner.check_in_thread(call)
            if isinstance(result, ToolResult):
                return result
            values = result
        except Exception as e:
            return runner.reject(tool, name, e)
        if function.injected:
            values = {**values, **self._injected_values(function.injected, messages)}
        # A cached call may also serve other episodes, so the end of this one does not cancel it.
        is_cancellable = function.is_async and not tool.process
        waiters = self._async_waiters if is_cancellable else self._waiters
        call = Call(tool, function, values, set() if tool.cache else waiters)
        start = time.monotonic()
        if tool.cache:
            result = await runner.cached_result(tool, encoded, lambda: runner.call(call, None))
        elif tool.scope == "call":
            result = await runner.call_once(call, self._constructor_arguments(tool))
        else:
            result = await runner.call(call, self._instances.get(tool.name))
        seconds = time.monotonic() - start
        return replace(result, seconds=seconds)

    async def close(self, with_reward: bool = True) -> float:
        """Call `reward()` of every object, close the objects, and return the sum of the rewards.

        Args:
            with_reward: whether to call `reward()`. If false, the result is 0.
        """
        if self._opening is not None:
            await asyncio.wait((self._opening,))
            with_reward = with_reward and self._opening.exception() is None
        # First, because an object is closed after its running call, and this one can end at once.
        cancel_waiters(self._async_waiters)
        ends = [
            self._end(tool, with_reward) for tool in self._classes if tool.name in self._instances
        ]
        rewards = await asyncio.gather(*ends, return_exceptions=True)
        cancel_waiters(self._waiters)  # the results of calls that still run are not needed any more
        for reward in rewards:
            if isinstance(reward, BaseException):
                raise reward
        return float(sum(r for r in rewards if not isinstance(r, BaseException)))

    async def _end(self, tool: Tool, with_reward: bool) -> float:
        instance = self._instances[tool.name]
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await instance.lock.acquire()
        except TimeoutError:
            log.warning("%s is closed while a call is still running", tool.label)
        try:
            return await self._runner.reward(tool, instance) if with_reward else 0.0
        finally:
            await self._runner.close_object(tool, instance)


class ToolHost:
    """All open sessions of a process. Belongs to one event loop.

    Args:
        on_call_end: see `Runner`.
        shard: which of the server's workers this process is.
        max_calls: limit of concurrent calls, see `enter`.
        limits: see `Runner`.
        idle_seconds: `close_idle_sessions` closes a session that was not used for this time.
    """

    def __init__(
        self,
        on_call_end: Callable[[str, float, float], None] | None = None,
        *,
        shard: ShardInfo = ShardInfo(),
        max_calls: float = math.inf,
        limits: CallLimits = CallLimits(),
        idle_seconds: float = IDLE_SECONDS,
    ):
        self.shard = shard
        self.calls_in_flight = 0
        """Number of calls between `enter` and `leave`."""
        self.is_draining = False
        """True if this process is stopping: new sessions and calls are refused."""
        self._max_calls = max_calls
        self._idle_seconds = idle_seconds
        self._runner = Runner(on_call_end, limits)
        self._sessions: dict[str, ToolSession] = {}
        self._closings: dict[str, asyncio.Task[float] | float] = {}
        """The closed episodes, oldest first: the sum of the rewards, or the task that computes it.
        A task that has ended takes 2 kB, so only those that raised are kept."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_worn_out(self) -> bool:
        """True if so many calls hang in this process that it should be restarted."""
        return self._runner.is_worn_out

    def enter(self) -> None:
        """Count a call until `leave`.

        Raises:
            Draining: the server is stopping.
            Busy: the server has its maximum of concurrent calls.
        """
        self._check_not_draining()
        if self.calls_in_flight >= self._max_calls:
            raise Busy(
                f"the tool server has {plural(self.calls_in_flight, 'call')} in flight, which is"
                " its maximum"
            )
        self.calls_in_flight += 1

    def leave(self) -> None:
        """Stop counting a call."""
        self.calls_in_flight -= 1

    def _check_not_draining(self) -> None:
        if self.is_draining:
            raise Draining("the tool server is stopping")

    def _check_shard(self, episode_id: str) -> None:
        if port := self.shard.other_port(episode_id):
            raise WrongWorker(f"the worker at port {port} serves episode {episode_id}")

    async def open(
        self, episode_id: str, sample: Sample, create_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> Opened:
        """Open an episode with the tools of its row, or with its environment.

        Opening it again opens the same session.

        Raises:
            Draining: the server is stopping.
            WrongWorker: another process serves the episode.
            SessionConflict: it is open with other tools or `create_kwargs`.
            UserError: a tool is unknown, or its constructor does not take the `create_kwargs`.
            UserCodeError: see `ToolSession.open`.
        """
        self._check_not_draining()
        self._check_shard(episode_id)
        session = self._sessions.get(episode_id)
        if session is None:
            if episode_id in self._closings:
                raise UnknownEpisode(f"episode {episode_id} is closed already")
            row_tools = [tools.get(name) for name in dict.fromkeys(sample.tools)]
            session = ToolSession(self._runner, episode_id, sample, row_tools)
            self._sessions[episode_id] = session
        elif {*sample.tools} != {*session.sample.tools}:
            raise SessionConflict(
                f"episode {episode_id} is open with the tools {[*session.sample.tools]}, and cannot"
                f" be opened with {[*sample.tools]}. Use another episode_id"
            )
        return await session.open(create_kwargs)

    def serial_groups(self, episode_id: str) -> dict[str, str] | None:
        """Return the result of `serial_groups_of` for an episode; None if it is not open."""
        session = self._sessions.get(episode_id)
        return None if session is None else session.serial_groups

    def session(self, episode_id: str) -> ToolSession:
        """Return the open session of an episode.

        Raises:
            WrongWorker: another process serves the episode.
            UnknownEpisode: it is not open.
        """
        self._check_shard(episode_id)
        try:
            return self._sessions[episode_id]
        except KeyError:
            raise UnknownEpisode(f"episode {episode_id} is not open") from None

    async def close(self, episode_id: str, with_reward: bool = True) -> float:
        """Close an episode and return the sum of its class tools' rewards.

        It is closed even if the caller is cancelled. A second call returns the same reward.

        Args:
            episode_id: an episode that is open or was closed.
            with_reward: whether to call `reward()`. If false, the result is 0.

        Raises:
            UnknownEpisode: it was never opened, or was closed long ago.
            WrongWorker: another process serves the episode.
            UserCodeError: a `reward()` raised. All objects are closed nevertheless.
        """
        closing = self._closings.get(episode_id)
        if closing is None:
            session = self.session(episode_id)
            del self._sessions[episode_id]
            closing = asyncio.create_task(self._close(session, with_reward))
            self._closings[episode_id] = closing
            if len(self._closings) > MAX_CLOSED_EPISODES:
                del self._closings[next(iter(self._closings))]
        return await asyncio.shield(closing) if isinstance(closing, asyncio.Task) else closing

    async def _close(self, session: ToolSession, with_reward: bool) -> float:
        reward = await session.close(with_reward)
        self._closings[session.episode_id] = reward
        return reward

    async def close_idle_sessions(self) -> None:
        """Close sessions that are not used any more. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(self._idle_seconds / 4, 60.0))
            oldest = time.monotonic() - self._idle_seconds
            idle = [
                s.episode_id
                for s in self._sessions.values()
                if s.last_used < oldest and not s.calls_running
            ]
            if idle:
                log.warning("closing %d idle sessions", len(idle))
                await asyncio.gather(*map(self.close, idle), return_exceptions=True)

    async def aclose(self) -> None:
        """Close every session without asking for its reward, and let the threads end."""
        closings = [self.close(episode_id, with_reward=False) for episode_id in [*self._sessions]]
        await asyncio.gather(*closings, return_exceptions=True)
        running = [c for c in self._closings.values() if isinstance(c, asyncio.Task)]
        await asyncio.gather(*running, return_exceptions=True)
        self._runner.close()
