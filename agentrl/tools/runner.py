"""Running one call of a tool: it waits its turn, keeps to its deadline, always has an answer.

    Runner        runs the calls of all sessions of a process
      Places      where a call runs, and what it waits for before it may
      Deadline    waiting for calls that have a deadline
      Remembered  answers that are given again

An async function runs on the event loop, a function or method in one of `THREADS` daemon threads,
one with `process=True` in one of `PROCESSES` worker processes. Waiting is not the call's time:
whoever waits too long finds the machine overloaded, which is no model's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import Infrastructure, ToolError, ToolServerError, UserCodeError
from agentrl.tools.payloads import (
    BadArguments,
    SlowArguments,
    answered,
    describe_for_log,
    failure,
    is_finite,
    shown_to_model,
    success,
    text_of,
)
from agentrl.tools.tool import Tool, ToolFunction
from agentrl.trajectory import ToolResult
from agentrl.workers import Outcome, Processes, Threads, WorkerDied, WorkerError
from agentrl.workers.processes import START_SECONDS

log = logging.getLogger("agentrl.tools")

THREADS = 64
PROCESSES = max(2, os.cpu_count() or 1)
CHECK_THREADS = 4
"""Threads for arguments whose check takes long. Few, because a check shares Python's lock with the
event loop."""
QUEUE_SECONDS = 30.0
"""How long a call may wait to start; beyond it the machine is overloaded, no model's fault."""
MAX_KEPT = 2**26
"""Characters of one tool's arguments and answers; then the longest unused are forgotten."""
_OVERHEAD = 500
"""About what an entry takes beside its texts."""

Waits = set[asyncio.Future[bool]]
"""Waits that can be called off together."""


@dataclass(slots=True, eq=False)
class Instance:
    """A class tool's object."""

    value: Any
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call that runs: an object's calls run one after another."""
    stuck: asyncio.Future[Outcome] | None = None
    """A call that outlived its deadline or its caller, and may still be running."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a function of a tool, in an episode."""

    tool: Tool
    function: ToolFunction
    arguments: Mapping[str, Any]
    """By name; checked, unless they are still to be checked in a thread."""
    waits: Waits
    """Those of the episode; a call whose wait is called off is given up."""


class Runner:
    """Runs the calls of all sessions of a process. Belongs to one event loop.

    Args:
        ran: told of every call that ran: function, seconds it waited to start, seconds from there.
    """

    def __init__(self, ran: Callable[[str, float, float], None] | None = None) -> None:
        self._ran = ran
        self._places = Places()
        self._checks = Threads(CHECK_THREADS)
        self._deadline = functools.cache(Deadline)
        """All calls of one timeout share one."""
        self._remembered: defaultdict[Tool, Remembered] = defaultdict(Remembered)
        self._unowned: set[asyncio.Future[Any]] = set()
        """What ends by itself: the loop holds tasks weakly, and these have no other owner."""
        self._logged: set[tuple[str, str]] = set()

    async def check_in_thread(self, call: Call) -> dict[str, Any] | ToolResult:
        """Check arguments whose check takes too long for the event loop, within the tool's timeout.

        Returns:
            The keyword arguments to call the function with, or the result that the model reads.

        Raises:
            ToolServerError: all threads were busy for too long, or the episode ended.
        """
        tool, parameters = call.tool, call.function.parameters
        check = functools.partial(parameters.check_in_thread, dict(call.arguments))
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                job = await self._checks.start(check)
        except TimeoutError:
            raise ToolServerError(
                f"tool {tool.name!r}: a call waited {QUEUE_SECONDS:g} s for one of {CHECK_THREADS}"
                " validation threads"
            ) from None
        if await self._deadline(tool.timeout).wait(job, call.waits):
            raise ToolServerError(f"tool {tool.name!r}: its episode ended during the call")
        if not job.done():
            return self.refused(tool, call.function.name, parameters.too_slow())
        checked, error = job.result()
        return checked if error is None else self.refused(tool, call.function.name, error)

    def refused(self, tool: Tool, function: str, error: BaseException) -> ToolResult:
        """Return the result of a call whose arguments were not valid or could not be checked.

        Args:
            tool: the owner of the function.
            function: the name that the model called.
            error: what the check raised.

        Raises:
            ToolServerError: the error is an `Infrastructure`, raised by a type's own check.
        """
        if isinstance(error, SlowArguments) and (tool.name, "slow") not in self._logged:
            self._logged.add((tool.name, "slow"))
            log.warning(
                "tool %r: the check of a call's arguments took too long (logged once per tool). The"
                " call failed. Simplify `pattern`, `anyOf` and `oneOf` in its schema",
                tool.name,
            )
        if isinstance(error, BadArguments):
            return failure("schema", f"invalid arguments for {function}: {error}")
        return self._result(tool, (None, error))

    async def call(self, call: Call, instance: Instance | None) -> ToolResult:
        """Call a function with checked arguments.

        Args:
            call: what is called.
            instance: the object of a class tool.

        Raises:
            ToolServerError: the call found no room to run, the tool raised `Infrastructure`, or the
                wait was called off.
        """
        tool = call.tool
        if instance is None:
            return await self._answer(call, tool.target)
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await instance.turn.acquire()
        except TimeoutError:
            raise self._places.no_room(tool) from None
        try:
            if instance.stuck is not None and not instance.stuck.done():
                return failure(
                    "timeout", f"{tool.name} is still running an earlier call that timed out"
                )
            method = getattr(instance.value, call.function.attribute)
            return await self._answer(call, method, instance)
        finally:
            instance.turn.release()

    async def remembered(
        self, tool: Tool, key: bytes, call: Callable[[], Awaitable[ToolResult]]
    ) -> ToolResult:
        """The answer that a tool with a cache gave to equal arguments; of none yet, the call's."""
        return await self._remembered[tool].answer(key, call)

    async def call_once(self, call: Call, made_of: Mapping[str, Any]) -> ToolResult:
        """Call a method of an object that is made for this call, and closed after it.

        Its `reward()` is added to what the call earned.

        Args:
            call: what is called.
            made_of: the constructor's arguments.

        Raises:
            UserCodeError: `reward()` raised.
            ToolServerError: see `call`.
        """
        tool = call.tool
        outcome = await self._outcome(tool, functools.partial(tool.target, **made_of))
        if outcome is None or outcome[1] is not None:
            return self._result(tool, outcome)
        instance = Instance(outcome[0])
        try:
            method = getattr(instance.value, call.function.attribute)
            result = await self._answer(call, method, instance)
            if "reward" in tool.hooks and instance.stuck is None:
                earned = await self.reward(tool, instance)
                result = replace(result, reward=(result.reward or 0.0) + earned)
            return result
        finally:
            # Whoever gives up on the call does not give up on this.
            await asyncio.shield(self._own(self.close_object(tool, instance)))

    async def make(self, tool: Tool, arguments: Mapping[str, Any]) -> Instance:
        """An object of a class tool.

        Raises:
            UserCodeError, ToolServerError: see `_hook`.
        """
        return Instance(await self._hook(tool, tool.target, arguments, "constructor"))

    async def reward(self, tool: Tool, instance: Instance) -> float:
        """What an object's `reward()` says; 0 where it has none.

        Raises:
            UserCodeError: no finite number; and see `_hook`.
            ToolServerError: see `_hook`.
        """
        if "reward" not in tool.hooks:
            return 0.0
        reward = await self._hook(tool, instance.value.reward, {}, "reward()")
        if not is_finite(reward):
            raise UserCodeError(
                f"tool {tool.name!r}: reward() returned {reward!r}, expected a finite number"
            )
        return float(reward)

    async def close_object(self, tool: Tool, instance: Instance) -> None:
        """Let an object close what it holds. An error is logged: nobody could do better with it."""
        if "close" in tool.hooks:
            try:
                await self._hook(tool, instance.value.close, {}, "close()")
            except Exception as e:
                log.error("%s", e, exc_info=e.__cause__)

    def close(self) -> None:
        """Let the threads go; what hangs in them dies with the process."""
        self._places.close()
        self._checks.close()

    async def _hook(
        self, tool: Tool, target: Callable[..., Any], arguments: Mapping[str, Any], what: str
    ) -> Any:
        """What a constructor, `reward` or `close` returned.

        Raises:
            UserCodeError: it raised, or took longer than the tool's timeout.
            ToolServerError: it found no room to run, or raised `Infrastructure`.
        """
        outcome = await self._outcome(tool, functools.partial(target, **arguments))
        if outcome is None:
            raise UserCodeError(f"tool {tool.name!r}: {what} took over {tool.timeout:g} s")
        value, error = outcome
        if error is not None:
            kind = ToolServerError if isinstance(error, Infrastructure) else UserCodeError
            raise kind(f"tool {tool.name!r}: {what}: {describe_for_log(error)}") from error
        return value

    async def _answer(
        self, call: Call, target: Callable[..., Any], instance: Instance | None = None
    ) -> ToolResult:
        if not (call.function.is_async or call.tool.process):
            # The text is made where the value was: in a thread, a flood holds nobody up.
            target = functools.partial(answered, target)
        bound = functools.partial(target, **call.arguments)
        return self._result(call.tool, await self._outcome(call.tool, bound, call, instance))

    def _result(self, tool: Tool, outcome: Outcome | None) -> ToolResult:
        """The answer to a call that ended so."""
        if outcome is None:
            return failure("timeout", f"the tool timed out after {tool.timeout:g} s")
        value, error = outcome
        if error is None:
            try:
                return success(value)
            except Exception as e:
                error = e
        if isinstance(error, ToolError):
            return failure("tool_error", text_of(error))
        if isinstance(error, Infrastructure):
            raise ToolServerError(f"tool {tool.name!r}: {error}") from error
        self._log(tool, error)
        return failure("crash", f"the tool failed: {shown_to_model(error)}")

    async def _outcome(
        self,
        tool: Tool,
        bound: functools.partial[Any],
        call: Call | None = None,
        instance: Instance | None = None,
    ) -> Outcome | None:
        """What a function returned or raised; None if its deadline came first.

        Args:
            tool: whose timeout, limits and, for a call of the model's, retries hold.
            bound: a function, constructor, `reward` or `close`, with its arguments.
            call: the model's; None for what agentrl calls itself.
            instance: the object whose method it is.
        """
        is_async = call.function.is_async if call else inspect.iscoroutinefunction(bound.func)
        retries, waits = (tool.retries, call.waits) if call else (0, None)
        asked = time.monotonic()
        job = await self._places.start(tool, bound, tool.timeout, is_async)
        began = time.monotonic()
        deadline = began + tool.timeout
        # A worker process is killed by its pool, whose clock does not count its start.
        extra = START_SECONDS if tool.process else 0.0
        wait = self._deadline(tool.timeout + extra).wait
        tries = 0
        try:
            while True:
                try:
                    is_off = await wait(job, waits)
                finally:
                    if not job.done():
                        self._abandon(tool, bound, job, instance)
                if is_off:
                    raise ToolServerError(f"tool {tool.name!r}: its episode ended during the call")
                if not job.done():
                    return None
                if job.cancelled():
                    raise ToolServerError(f"tool {tool.name!r}: the call was cancelled")
                value, error = job.result()
                if error is None and type(value) is not str and inspect.isawaitable(value):
                    # A plain function around an async one.
                    job = asyncio.create_task(caught(lambda value=value: value))
                    wait = Deadline(deadline - time.monotonic()).wait
                    continue
                if tool.process and isinstance(error, TimeoutError):
                    return None
                if error is None or isinstance(error, ToolError) or tries == retries:
                    return value, error
                tries += 1
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await asyncio.sleep(0.1 * 2**tries)
                        left = deadline - time.monotonic()
                        job = await self._places.start(tool, bound, left, is_async)
                except TimeoutError:
                    return None
                wait = Deadline(deadline - time.monotonic() + extra).wait
        finally:
            if self._ran is not None and call is not None:
                self._ran(call.function.name, began - asked, time.monotonic() - began)

    def _abandon(
        self,
        tool: Tool,
        bound: functools.partial[Any],
        job: asyncio.Future[Outcome],
        instance: Instance | None,
    ) -> None:
        self._places.give_up(tool, job)
        if isinstance(job, asyncio.Task):
            if not tool.process:  # its worker would run on, and look free
                job.cancel()
            self._unowned.add(job)
            job.add_done_callback(self._unowned.discard)
        if instance is not None:
            instance.stuck = job
        if bound.func is tool.target and tool.is_class:
            job.add_done_callback(functools.partial(self._close_late, tool))

    def _close_late(self, tool: Tool, job: asyncio.Future[Outcome]) -> None:
        """Close an object that nobody waited for any more when it was made."""
        if not job.cancelled() and job.result()[1] is None:
            self._own(self.close_object(tool, Instance(job.result()[0])))

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._unowned.add(task)
        task.add_done_callback(self._unowned.discard)
        return task

    def _log(self, tool: Tool, error: BaseException) -> None:
        """Log a bug in a tool.

        The first error of each tool and exception type has level ERROR and a traceback, later ones
        have level DEBUG.
        """
        kind = error.kind if isinstance(error, WorkerError) else type(error).__name__
        worker = isinstance(error, WorkerError | WorkerDied)
        what = text_of(error) if worker else describe_for_log(error)
        if (tool.name, kind) in self._logged:
            log.debug("tool %r failed again: %s", tool.name, what)
        else:
            self._logged.add((tool.name, kind))
            log.error(
                "tool %r failed (logged once per tool and type): %s",
                tool.name,
                what,
                exc_info=error,
            )


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
        self, tool: Tool, bound: functools.partial[Any], seconds: float, is_async: bool
    ) -> asyncio.Future[Outcome]:
        """Run a function once there is room for it.

        Args:
            tool: whose limits hold.
            bound: the tool, its constructor or one of its methods, with arguments by name.
            seconds: when its worker process is killed; other places know no such end.
            is_async: whether calling it makes a coroutine.

        Raises:
            ToolServerError: there was none for too long.
        """
        limited = tool.max_concurrency or tool.rate_limit or tool.process
        is_free = not limited and (is_async or self._threads.has_room)  # nearly all calls
        gate = None
        try:
            async with contextlib.nullcontext() if is_free else asyncio.timeout(QUEUE_SECONDS):
                if tool.max_concurrency:
                    new = asyncio.Semaphore(tool.max_concurrency)
                    await self._gates.setdefault(tool.name, new).acquire()
                    gate = self._gates[tool.name]
                if tool.rate_limit:
                    pace = self._paces.setdefault(tool.name, Pace(tool.rate_limit))
                    await pace.wait(QUEUE_SECONDS)
                if tool.process:
                    await self._workers.acquire()
                    # Nothing may raise here that is not the job's: its end gives the place back.
                    apply = functools.partial(self._processes.apply, bound.func, (), bound.keywords)
                    job = asyncio.create_task(caught(functools.partial(apply, seconds)))
                    job.add_done_callback(lambda _: self._workers.release())
                elif is_async:
                    job = asyncio.create_task(caught(bound))
                else:
                    job = await self._threads.start(bound)
        except BaseException as e:
            if gate is not None:
                gate.release()
            if isinstance(e, TimeoutError):
                raise self.no_room(tool) from None
            raise
        if gate is not None:
            # When it really ends: one that hangs keeps its place.
            job.add_done_callback(lambda _: gate.release())
        return job

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


class Pace:
    """The moments at which the calls of one tool start. Belongs to one event loop.

    Args:
        rate: calls a second. They are spread evenly: no burst follows a pause.
    """

    def __init__(self, rate: float):
        self._gap = 1.0 / rate
        self._next = 0.0

    async def wait(self, at_most: float) -> None:
        """Wait for the next free moment, and take it.

        Raises:
            TimeoutError: at once, where it is more than `at_most` seconds away; nothing is taken.
        """
        now = time.monotonic()
        moment = max(now, self._next)
        if moment - now > at_most:
            raise TimeoutError
        self._next = moment + self._gap
        if moment > now:
            try:
                await asyncio.sleep(moment - now)
            except asyncio.CancelledError:
                if self._next == moment + self._gap:  # nobody has one behind it
                    self._next = moment
                raise


def call_off(waits: Waits) -> None:
    """End the waits, and not what they wait for: only a job's own end says that it is over."""
    for waiter in waits:
        if not waiter.done():
            waiter.set_result(True)


class Deadline:
    """Waits of one length, for the price of one timer. Belongs to one event loop.

    Nearly every call ends long before its deadline, so a timer of its own is set and taken back for
    nothing, and costs more than running an async tool. Here all waits of one length share a timer.

    Args:
        seconds: how long each may take.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._ends: dict[asyncio.Future[bool], float] = {}
        """Of each wait, in the order in which they end."""
        self._set = False

    async def wait(self, job: asyncio.Future[Any], waits: Waits | None = None) -> bool:
        """Return once the job is done, the time is over or the wait is called off.

        `job.done()` says whether it is done.

        Args:
            job: it runs on, whatever becomes of the wait.
            waits: where `call_off` finds this wait.

        Returns:
            Whether it was called off.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._ends[waiter] = loop.time() + self._seconds
        if not self._set:
            self._set = True
            loop.call_later(self._seconds, self._ring, loop)
        wake = functools.partial(_wake, waiter)
        job.add_done_callback(wake)
        if waits is not None:
            waits.add(waiter)
        try:
            return await waiter
        finally:
            del self._ends[waiter]
            job.remove_done_callback(wake)
            if waits is not None:
                waits.discard(waiter)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits whose time is over, and set the timer for the next."""
        now = loop.time()
        for waiter, end in self._ends.items():
            if end > now:
                loop.call_later(end - now, self._ring, loop)
                return
            _wake(waiter)
        self._set = False


def _wake(waiter: asyncio.Future[bool], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(False)


class Remembered:
    """One tool's answers by its arguments. Belongs to one event loop."""

    def __init__(self, max_kept: int = MAX_KEPT):
        self._max_kept = max_kept
        self._kept = 0
        self._answers: OrderedDict[bytes, ToolResult] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[ToolResult]] = {}

    async def answer(self, key: bytes, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The answer that is known, is being found out, or is found out now; failures are not kept.

        Whoever waits may be cancelled: the others get their answer all the same.

        Args:
            key: the arguments.
            run: makes the call.
        """
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)
            return known
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(self._find_out(key, run))
        return await asyncio.shield(task)

    async def _find_out(self, key: bytes, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        try:
            result = await run()
        finally:
            del self._running[key]
        if result.ok:
            self._answers[key] = result
            self._kept += self._size(key, result)
            while self._kept > self._max_kept:
                self._kept -= self._size(*self._answers.popitem(last=False))
        return result

    @staticmethod
    def _size(key: bytes, result: ToolResult) -> int:
        return len(key) + len(result.content) + _OVERHEAD
