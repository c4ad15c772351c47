"""Where a call runs, and what it waits for before it may: a thread, a process, the tool's limits.

    async function     on the event loop
    function, method   in one of `THREADS` daemon threads
    process=True       in one of `PROCESSES` worker processes

Waiting is not the call's time: whoever waits too long finds the machine overloaded, which is no
model's fault.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentrl.errors import ToolServerError
from agentrl.tools.pace import Pace
from agentrl.tools.record import Tool
from agentrl.workers import Outcome, Processes, Threads

THREADS = 64
PROCESSES = max(2, os.cpu_count() or 1)
QUEUE_SECONDS = 30.0
"""How long a call may wait to start; beyond it the machine is overloaded, no model's fault."""


class Places:
    """The places of a process, for all of its calls. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = Threads(THREADS)
        self._processes = Processes(PROCESSES)
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._workers = asyncio.Semaphore(PROCESSES)
        self._paces: dict[str, Pace] = {}
        self._hung: Counter[str] = Counter()

    async def start(
        self,
        tool: Tool,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        seconds: float,
        is_async: bool,
    ) -> asyncio.Future[Outcome]:
        """Run the target once there is room for it.

        Args:
            tool: whose limits hold.
            target: it, its constructor or one of its methods.
            arguments: by name.
            seconds: when its worker process is killed; other places know no such end.
            is_async: whether calling the target makes a coroutine.

        Raises:
            ToolServerError: there was none for too long.
        """
        if not (tool.max_concurrency or tool.rate_limit or tool.process):
            # Nearly all calls.
            bound = functools.partial(target, **arguments)
            if is_async:
                return asyncio.create_task(caught(bound))
            if self._threads.has_room:
                return await self._threads.start(bound)
        elif self._has_room(tool):
            return await self._start(tool, target, arguments, seconds, is_async)
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                return await self._start(tool, target, arguments, seconds, is_async)
        except TimeoutError:
            raise self.no_room(tool) from None

    def give_up(self, tool: Tool, job: asyncio.Future[Outcome]) -> None:
        """Note that nobody waits for a call any more, which keeps its place until it ends."""
        self._hung[tool.name] += 1
        job.add_done_callback(lambda _: self._hung.subtract((tool.name,)))

    def no_room(self, tool: Tool) -> ToolServerError:
        """What to raise for a call that found no place."""
        limits = [f"{THREADS} threads"]
        if tool.process:
            limits = [f"{PROCESSES} processes"]
        if tool.max_concurrency:
            limits.append(f"max_concurrency={tool.max_concurrency}")
        if tool.rate_limit:
            limits.append(f"rate_limit={tool.rate_limit:g}")
        hung = ", ".join(f"{n} of {name!r}" for name, n in self._hung.most_common(3) if n > 0)
        hung = hung and (
            f". Calls that hang hold places until they end: {hung}; give what waits a timeout of"
            " its own, or process=True"
        )
        return ToolServerError(
            f"tool {tool.name!r}: a call waited {QUEUE_SECONDS:g} s and found no room to start"
            f" ({', '.join(limits)}){hung}"
        )

    def close(self) -> None:
        """Let the threads go, what hangs in them dies with this process; end the others."""
        self._threads.close()
        self._processes.close()

    def _has_room(self, tool: Tool) -> bool:
        """Whether a call can start at once, so that no clock need be set."""
        gate = self._gates.get(tool.name)
        if gate is not None and gate.locked():
            return False
        if tool.rate_limit and not self._pace(tool).is_free:
            return False
        return not self._workers.locked() if tool.process else self._threads.has_room

    def _pace(self, tool: Tool) -> Pace:
        found = self._paces.get(tool.name)
        if found is None:
            found = self._paces[tool.name] = Pace(tool.rate_limit)
        return found

    async def _start(
        self,
        tool: Tool,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        seconds: float,
        is_async: bool,
    ) -> asyncio.Future[Outcome]:
        if not tool.max_concurrency:
            return await self._launch(tool, target, arguments, seconds, is_async)
        gate = self._gates.setdefault(tool.name, asyncio.Semaphore(tool.max_concurrency))
        await gate.acquire()
        try:
            job = await self._launch(tool, target, arguments, seconds, is_async)
        except BaseException:
            gate.release()
            raise
        # When it really ends: one that hangs keeps its place.
        job.add_done_callback(lambda _: gate.release())
        return job

    async def _launch(
        self,
        tool: Tool,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        seconds: float,
        is_async: bool,
    ) -> asyncio.Future[Outcome]:
        if tool.rate_limit:
            await self._pace(tool).wait(QUEUE_SECONDS)
        if tool.process:
            await self._workers.acquire()
            # Nothing may raise here that is not the job's: its end is what gives the place back.
            call = functools.partial(self._processes.apply, target, (), arguments, seconds)
            job = asyncio.create_task(caught(call))
            job.add_done_callback(lambda _: self._workers.release())
            return job
        bound = functools.partial(target, **arguments)
        if is_async:
            return asyncio.create_task(caught(bound))
        return await self._threads.start(bound)


async def caught(function: Callable[[], Awaitable[Any]]) -> Outcome:
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
