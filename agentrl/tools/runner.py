"""Running one call of a tool: it waits its turn, keeps to its deadline, always has an answer."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import Infrastructure, ToolError, ToolServerError, UserCodeError
from agentrl.tools.deadline import Deadline
from agentrl.tools.decorator import Tool, ToolFunction
from agentrl.tools.results import failure, success
from agentrl.trajectory import ToolResult
from agentrl.workers import Outcome, Threads

log = logging.getLogger("agentrl.tools")

THREADS = 64
QUEUE_SECONDS = 30.0
"""How long a call may wait to start; beyond it the machine is overloaded, no model's fault."""
ATTEMPTS = 3
"""Of a call to an idempotent tool."""


@dataclass(slots=True, eq=False)
class Instance:
    """A class tool's object, for one episode."""

    value: Any
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call that runs: an object's calls run one after another."""
    stuck: asyncio.Future[Outcome] | None = None
    """A call that outlived its deadline or its caller, and may still be running."""


class Runner:
    """Runs the calls of all sessions of a process. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = Threads(THREADS)
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._deadlines: dict[float, Deadline] = {}
        self._abandoned: set[asyncio.Task[Outcome]] = set()
        self._logged: set[tuple[str, type]] = set()

    async def call(
        self,
        tool: Tool,
        function: ToolFunction,
        arguments: Mapping[str, Any],
        instance: Instance | None,
    ) -> ToolResult:
        """Call a function of a tool with checked arguments.

        Raises:
            ToolServerError: the call found no room to run, or the tool raised `Infrastructure`.
        """
        began = time.monotonic()
        if instance is None:
            result = await self._answer(tool, tool.target, arguments, None)
        else:
            result = await self._in_turn(tool, function, arguments, instance)
        seconds = time.monotonic() - began
        return ToolResult(result.content, result.ok, result.reward, result.error, seconds)

    async def _in_turn(
        self,
        tool: Tool,
        function: ToolFunction,
        arguments: Mapping[str, Any],
        instance: Instance,
    ) -> ToolResult:
        """Call a method, once the object's earlier calls are done."""
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await instance.turn.acquire()
        except TimeoutError:
            raise _no_room(tool) from None
        try:
            if instance.stuck is not None and not instance.stuck.done():
                return failure("timeout", f"{tool.name} is still busy with a call that hangs")
            method = getattr(instance.value, function.attribute)
            return await self._answer(tool, method, arguments, instance)
        finally:
            instance.turn.release()

    async def hook(
        self, tool: Tool, target: Callable[..., Any], arguments: Mapping[str, Any], what: str
    ) -> Any:
        """What a constructor, `reward` or `close` returned.

        Raises:
            UserCodeError: it raised, or took longer than the tool's timeout.
            ToolServerError: it found no room to run, or raised `Infrastructure`.
        """
        outcome = await self._outcome(tool, target, arguments, None, attempts=1)
        if outcome is None:
            raise UserCodeError(f"tool {tool.name!r}: {what} took over {tool.timeout:g} s")
        value, error = outcome
        if error is not None:
            kind = ToolServerError if isinstance(error, Infrastructure) else UserCodeError
            raise kind(f"tool {tool.name!r}: {what}: {_said(error)}") from error
        return value

    def close(self) -> None:
        """Let the threads go; what hangs in them dies with the process."""
        self._threads.close()

    async def _answer(
        self,
        tool: Tool,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        instance: Instance | None,
    ) -> ToolResult:
        attempts = ATTEMPTS if tool.idempotent else 1
        outcome = await self._outcome(tool, target, arguments, instance, attempts)
        if outcome is None:
            return failure("timeout", f"the tool did not answer within {tool.timeout:g} s")
        value, error = outcome
        if error is None:
            try:
                return success(value)
            except Exception as e:
                error = e
        if isinstance(error, ToolError):
            return failure("tool_error", str(error))
        if isinstance(error, Infrastructure):
            raise ToolServerError(f"tool {tool.name!r}: {error}") from error
        self._log(tool, error)
        return failure("crash", f"the tool failed: {_said(error)}")

    async def _outcome(
        self,
        tool: Tool,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        instance: Instance | None,
        attempts: int,
    ) -> Outcome | None:
        """What the target returned or raised; None if its deadline came first."""
        if self._has_room(tool):
            job = await self._start(tool, target, arguments)
        else:
            try:
                async with asyncio.timeout(QUEUE_SECONDS):
                    job = await self._start(tool, target, arguments)
            except TimeoutError:
                raise _no_room(tool) from None
        deadline = time.monotonic() + tool.timeout
        wait = self._deadline(tool.timeout).wait
        while True:
            try:
                await wait(job)
            finally:
                if not job.done():
                    self._abandon(job, instance)
            if not job.done():
                return None
            value, error = job.result()
            if not isinstance(value, str) and error is None and inspect.isawaitable(value):
                # A plain function around an async one.
                job = asyncio.create_task(_caught(lambda value=value: value))
                wait = Deadline(deadline - time.monotonic()).wait
                continue
            attempts -= 1
            if error is None or isinstance(error, ToolError) or not attempts:
                return value, error
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await asyncio.sleep(0.1 * 2 ** (ATTEMPTS - attempts))
                    job = await self._start(tool, target, arguments)
            except TimeoutError:
                return None
            wait = Deadline(deadline - time.monotonic()).wait

    def _deadline(self, seconds: float) -> Deadline:
        """The one that all calls of this timeout share."""
        found = self._deadlines.get(seconds)
        if found is None:
            found = self._deadlines[seconds] = Deadline(seconds)
        return found

    def _has_room(self, tool: Tool) -> bool:
        """Whether a call can start at once, so that no clock need be set."""
        gate = self._gates.get(tool.name)
        return self._threads.has_room and (gate is None or not gate.locked())

    async def _start(
        self, tool: Tool, target: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> asyncio.Future[Outcome]:
        """Run the target once there is room: async ones here, others in a thread."""
        if not tool.max_concurrency:
            return await self._launch(target, arguments)
        gate = self._gates.setdefault(tool.name, asyncio.Semaphore(tool.max_concurrency))
        await gate.acquire()
        try:
            job = await self._launch(target, arguments)
        except BaseException:
            gate.release()
            raise
        # When it really ends: one that hangs keeps its place.
        job.add_done_callback(lambda _: gate.release())
        return job

    async def _launch(
        self, target: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> asyncio.Future[Outcome]:
        bound = functools.partial(target, **arguments)
        if inspect.iscoroutinefunction(target):
            return asyncio.create_task(_caught(bound))
        return await self._threads.start(bound)

    def _abandon(self, job: asyncio.Future[Outcome], instance: Instance | None) -> None:
        if isinstance(job, asyncio.Task):
            job.cancel()
            # The loop itself holds tasks weakly, and this one has no other owner any more.
            self._abandoned.add(job)
            job.add_done_callback(self._abandoned.discard)
        if instance is not None:
            instance.stuck = job

    def _log(self, tool: Tool, error: BaseException) -> None:
        """A bug in a tool: the first of its kind with the traceback, the others are counted."""
        if (tool.name, type(error)) not in self._logged:
            self._logged.add((tool.name, type(error)))
            log.error("tool %r failed (said once): %s", tool.name, _said(error), exc_info=error)


async def _caught(function: Callable[[], Awaitable[Any]]) -> Outcome:
    """What an async function returns or raises, SystemExit included: it would end the loop."""
    try:
        return await function(), None
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None, e  # the tool's own doing
    except BaseException as e:
        return None, e


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _no_room(tool: Tool) -> ToolServerError:
    return ToolServerError(
        f"tool {tool.name!r}: a call waited {QUEUE_SECONDS:g} s and found no room to start"
        f" ({THREADS} threads, max_concurrency={tool.max_concurrency or 'none'})"
    )
