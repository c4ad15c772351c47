"""Run single tool calls, with queues, deadlines, retries and a cache.

    Runner         runs the calls of all sessions of a process
      Executors    where calls run: event loop, threads, processes; with their limits
      Deadline     a shared timer for all calls with the same timeout
      ResultCache  cached results of one tool

An async function runs on the event loop. A plain function or method runs in a daemon thread. A
function with `process=True` runs in a worker process. `CallLimits` has the numbers of both. The
time in the queue does not count as the call's time. A call that waits too long in the queue fails
with an infrastructure error, because an overloaded machine is not the model's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import os
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import Infrastructure, ToolError, ToolServerError, UserCodeError
from agentrl.plural import plural
from agentrl.tools.environment import with_messages
from agentrl.tools.payloads import (
    InvalidArguments,
    SlowArguments,
    call_and_convert,
    describe_for_log,
    describe_for_model,
    error_result,
    exception_text,
    to_opening,
    to_result,
)
from agentrl.tools.tool import Tool, ToolFunction
from agentrl.trajectory import Message, ToolResult, as_number
from agentrl.workers import Outcome, Processes, Threads, WorkerDied, WorkerError
from agentrl.workers.processes import START_SECONDS

log = logging.getLogger("agentrl.tools")

THREADS = 64
MAX_REPLACED = 512
"""How many threads with calls that hang get a substitute. A tool server with so many is restarted.
"""
PROCESSES = max(2, os.cpu_count() or 1)
CHECK_THREADS = 4
"""Threads for slow validation of arguments. Few, because they compete with the event loop for
Python's lock (the GIL)."""
QUEUE_SECONDS = 30.0
"""The longest time that a call waits to start. After that, the machine is overloaded."""
MAX_CACHE_CHARACTERS = 2**26
"""Limit of one tool's cached arguments and results, in characters. The least recently used ones are
dropped first."""
_OVERHEAD = 500
"""Approximate memory of a cache entry without its texts, in bytes."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of the calls of a process."""

    threads: int = THREADS
    """The number of threads in which plain functions run."""
    processes: int = PROCESSES
    """The number of worker processes, for functions with `process=True`."""
    queue_seconds: float = QUEUE_SECONDS
    """The longest time that a call waits to start."""


Waiters = set[asyncio.Future[bool]]
"""The futures on which callers wait for running calls. `cancel_waiters` ends these waits."""


@dataclass(slots=True, eq=False)
class Instance:
    """An object of a class tool."""

    value: Any
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call runs: the calls of an object run one after another."""
    hanging_call: asyncio.Future[Outcome] | None = None
    """A call that passed its deadline or lost its caller, and may still be running."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a tool's function in an episode."""

    tool: Tool
    function: ToolFunction
    arguments: Mapping[str, Any]
    """The arguments by name. `Runner.check_in_thread` validates them; elsewhere they are valid."""
    waiters: Waiters
    """The waiters of the episode. If they are cancelled, the call is abandoned."""


class Runner:
    """Runs the calls of all sessions of a process. Belongs to one event loop.

    Args:
        on_call_end: called after each call with the function's name, the seconds that it waited to
            start and the seconds that it ran.
        limits: the numbers of threads and processes, and the longest wait for one.
    """

    def __init__(
        self,
        on_call_end: Callable[[str, float, float], None] | None = None,
        limits: CallLimits = CallLimits(),
    ) -> None:
        self._on_call_end = on_call_end
        self._queue_seconds = limits.queue_seconds
        self._executors = Executors(limits)
        self._checks = Threads(CHECK_THREADS, "tool-check")
        self._deadline = functools.cache(Deadline)
        """Calls with the same timeout share a `Deadline`."""
        self._caches: defaultdict[Tool, ResultCache] = defaultdict(ResultCache)
        self._background_tasks: set[asyncio.Future[Any]] = set()
        """Tasks that nobody awaits. The event loop itself keeps weak references only."""
        self._logged: set[tuple[str, str]] = set()

    async def check_in_thread(self, call: Call) -> dict[str, Any] | ToolResult:
        """Validate arguments that take too long for the event loop, within the tool's timeout.

        Returns:
            The keyword arguments for the function, or the result that the model reads.

        Raises:
            ToolServerError: no thread became free in time, or the episode ended.
        """
        tool, parameters = call.tool, call.function.parameters
        check = functools.partial(parameters.check_in_thread, dict(call.arguments))
        try:
            async with asyncio.timeout(self._queue_seconds):
                job = await self._checks.start(check)
        except TimeoutError:
            raise ToolServerError(
                f"{tool.label}: a call waited {self._queue_seconds:g} s for one of"
                f" {CHECK_THREADS} validation threads"
            ) from None
        if await self._deadline(tool.timeout).wait(job, call.waiters):
            raise ToolServerError(f"{tool.label}: its episode ended during the call")
        if not job.done():
            return self.reject(tool, call.function.name, parameters.slow_error())
        valid_arguments, error = job.result()
        return valid_arguments if error is None else self.reject(tool, call.function.name, error)

    def reject(self, tool: Tool, function: str, error: BaseException) -> ToolResult:
        """Return the result of a call whose arguments are invalid or could not be validated.

        Args:
            tool: the owner of the function.
            function: the name that the model called.
            error: the exception that the validation raised.

        Raises:
            ToolServerError: the error is an `Infrastructure`, raised by a validator of the user.
        """
        if isinstance(error, SlowArguments) and (tool.name, "slow") not in self._logged:
            self._logged.add((tool.name, "slow"))
            log.warning(
                "%s: validating a call's arguments took too long, so the call failed (logged"
                " once per tool). Simplify `pattern`, `anyOf` and `oneOf` in its schema",
                tool.label,
            )
        if isinstance(error, InvalidArguments):
            return error_result("schema", f"invalid arguments for {function}: {error}")
        return self._result(tool, (None, error))

    async def call(self, call: Call, instance: Instance | None) -> ToolResult:
        """Call a function with valid arguments.

        Args:
            call: the call.
            instance: the object of a class tool.

        Raises:
            ToolServerError: the call could not start in time, the tool raised `Infrastructure`, or
                the episode ended during the call.
        """
        tool = call.tool
        if instance is None:
            return await self._run_call(call, tool.target)
        try:
            async with asyncio.timeout(self._queue_seconds):
                await instance.lock.acquire()
        except TimeoutError:
            raise self._executors.overload_error(tool) from None
        try:
            if instance.hanging_call is not None and not instance.hanging_call.done():
                return error_result(
                    "timeout", f"{tool.name} is still running an earlier call that timed out"
                )
            method = getattr(instance.value, call.function.attribute)
            return await self._run_call(call, method, instance)
        finally:
            instance.lock.release()

    async def cached_result(
        self, tool: Tool, key: bytes, call: Callable[[], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Return the cached result of an equal call, or run the call and cache its result."""
        return await self._caches[tool].get_or_run(key, call)

    async def call_once(self, call: Call, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a method of an object that is created for this call and closed after it.

        The object's `reward()` is added to the reward of the call.

        Args:
            call: the call.
            arguments: the arguments of the constructor.

        Raises:
            UserCodeError: `reward()` raised.
            ToolServerError: see `call`.
        """
        tool = call.tool
        outcome = await self._outcome(tool, functools.partial(tool.target, **arguments))
        if outcome is None or outcome[1] is not None:
            return self._result(tool, outcome)
        instance = Instance(outcome[0])
        try:
            method = getattr(instance.value, call.function.attribute)
            result = await self._run_call(call, method, instance)
            if "reward" in tool.hooks and instance.hanging_call is None:
                reward = await self.reward(tool, instance)
                result = replace(result, reward=(result.reward or 0.0) + reward)
            return result
        finally:
            # The object is closed even if the caller is cancelled.
            await asyncio.shield(self._run_in_background(self.close_object(tool, instance)))

    async def make(self, tool: Tool, arguments: Mapping[str, Any]) -> Instance:
        """Create an object of a class tool.

        Raises:
            UserCodeError, ToolServerError: see `_hook`.
        """
        return Instance(await self._hook(tool, tool.target, arguments, "constructor"))

    async def opening(self, tool: Tool, instance: Instance) -> tuple[Message, ...]:
        """Return the messages of an object's `opening()`, or of an environment's `start()`.

        Raises:
            UserCodeError, ToolServerError: see `to_opening` and `_hook`.
        """
        hook = "start" if tool.is_environment else "opening"
        if hook not in tool.hooks:
            return ()
        returned = await self._hook(tool, getattr(instance.value, hook), {}, f"{hook}()")
        return to_opening(f"{tool.label}: {hook}()", returned)

    async def ask(
        self,
        tool: Tool,
        instance: Instance,
        hook: str,
        messages: Sequence[Message],
        waiters: Waiters,
    ) -> Any:
        """Call the `respond` or `reward` of an environment, and return its result.

        A call that passed its deadline and still runs ends first.

        Raises:
            UserCodeError: such a call did not end within the timeout; also see `_hook`.
            ToolServerError: the episode ended in the meantime; also see `_hook`.
        """
        bound = with_messages(getattr(instance.value, hook), hook, messages)
        async with instance.lock:
            hanging = instance.hanging_call
            if hanging is not None and not hanging.done():
                if await self._deadline(tool.timeout).wait(hanging, waiters):
                    raise ToolServerError(f"{tool.label}: its episode ended before {hook}()")
                if not hanging.done():
                    raise _late_error(
                        f"{tool.label}: {hook}() cannot be called, because an earlier call that"
                        " timed out still runs"
                    )
            return await self._hook(tool, bound, {}, f"{hook}()", waiters, instance)

    async def reward(self, tool: Tool, instance: Instance) -> float:
        """Return the result of a class tool's `reward()`; 0 if the class has none.

        Raises:
            UserCodeError: the reward is not a finite number; also see `_hook`.
            ToolServerError: see `_hook`.
        """
        if "reward" not in tool.hooks or tool.is_environment:
            return 0.0
        returned = await self._hook(tool, instance.value.reward, {}, "reward()")
        reward = as_number(returned)
        if not math.isfinite(reward):
            raise UserCodeError(
                f"{tool.label}: reward() returned {returned!r}, expected a finite number"
            )
        return reward

    async def close_object(self, tool: Tool, instance: Instance) -> None:
        """Call an object's `close()`. An error is logged, because no caller can handle it."""
        if "close" in tool.hooks:
            try:
                await self._hook(tool, instance.value.close, {}, "close()")
            except Exception as e:
                log.error("%s", e, exc_info=e.__cause__)

    @property
    def is_worn_out(self) -> bool:
        """True if so many calls hang that their threads are not replaced any more."""
        return self._executors.is_worn_out

    def close(self) -> None:
        """Let the threads end. Calls that hang in them end with the process."""
        self._executors.close()
        self._checks.close()

    async def _hook(
        self,
        tool: Tool,
        target: Callable[..., Any],
        arguments: Mapping[str, Any],
        hook_name: str,
        waiters: Waiters | None = None,
        instance: Instance | None = None,
    ) -> Any:
        """Call a constructor or a hook, and return its result.

        Args:
            tool: the tool.
            target: the constructor or the hook.
            arguments: its arguments.
            hook_name: its name, for messages.
            waiters: the waiters of the episode, see `Call`.
            instance: the object whose `hanging_call` it becomes if it passes its deadline.

        Raises:
            UserCodeError: the function raised, or took longer than the tool's timeout.
            ToolServerError: the function could not start in time, or raised `Infrastructure`.
        """
        bound = functools.partial(target, **arguments)
        outcome = await self._outcome(tool, bound, None, instance, waiters)
        if outcome is None:
            raise _late_error(f"{tool.label}: {hook_name} took more than {tool.timeout:g} s")
        value, error = outcome
        if error is not None:
            label = f"{tool.label}: {hook_name}"
            if isinstance(error, Infrastructure):
                raise ToolServerError(f"{label}: {describe_for_log(error)}") from error
            raise UserCodeError.of(label, error) from error
        return value

    async def _run_call(
        self, call: Call, target: Callable[..., Any], instance: Instance | None = None
    ) -> ToolResult:
        if not (call.function.is_async or call.tool.process):
            # The result is converted to text in the thread, because the conversion of a very long
            # one would block the event loop.
            target = functools.partial(call_and_convert, target)
        bound = functools.partial(target, **call.arguments)
        return self._result(call.tool, await self._outcome(call.tool, bound, call, instance))

    def _result(self, tool: Tool, outcome: Outcome | None) -> ToolResult:
        """Return the result of a call from its outcome; the outcome None is a timeout."""
        if outcome is None:
            return error_result("timeout", f"the tool timed out after {tool.timeout:g} s")
        value, error = outcome
        if error is None:
            try:
                return to_result(value)
            except Exception as e:
                error = e
        if isinstance(error, ToolError):
            return error_result("tool_error", exception_text(error))
        if isinstance(error, Infrastructure):
            raise ToolServerError(f"{tool.label}: {error}") from error
        self._log(tool, error)
        return error_result("crash", f"the tool failed: {describe_for_model(error)}")

    async def _outcome(
        self,
        tool: Tool,
        bound: functools.partial[Any],
        call: Call | None = None,
        instance: Instance | None = None,
        waiters: Waiters | None = None,
    ) -> Outcome | None:
        """Run a function and return its outcome; None if its deadline passed.

        Args:
            tool: the tool, whose timeout and limits apply. Its retries apply to calls of the model.
            bound: a function, constructor, `reward` or `close`, with its arguments.
            call: the call of the model; None if agentrl itself calls the function.
            instance: the object, if the function is a method.
            waiters: the waiters of the episode, if agentrl itself calls the function.
        """
        is_async = call.function.is_async if call else inspect.iscoroutinefunction(bound.func)
        retries, waiters = (tool.retries, call.waiters) if call else (0, waiters)
        queued_at = time.monotonic()
        job = await self._executors.start(tool, bound, tool.timeout, is_async)
        start_time = time.monotonic()
        deadline = start_time + tool.timeout
        # The process pool kills the worker at the deadline; its clock does not count the start.
        extra = START_SECONDS if tool.process else 0.0
        wait = self._deadline(tool.timeout + extra).wait
        tries = 0
        try:
            while True:
                try:
                    is_cancelled = await wait(job, waiters)
                finally:
                    if not job.done():
                        self._abandon(tool, bound, job, instance)
                if is_cancelled:
                    raise ToolServerError(f"{tool.label}: its episode ended during the call")
                if not job.done():
                    return None
                if job.cancelled():
                    raise ToolServerError(f"{tool.label}: the call was cancelled")
                value, error = job.result()
                if error is None and type(value) is not str and inspect.isawaitable(value):
                    # A plain function that returned a coroutine.
                    job = asyncio.create_task(run_catching(lambda value=value: value))
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
                        seconds_left = deadline - time.monotonic()
                        job = await self._executors.start(tool, bound, seconds_left, is_async)
                except TimeoutError:
                    return None
                wait = Deadline(deadline - time.monotonic() + extra).wait
        finally:
            if self._on_call_end is not None and call is not None:
                self._on_call_end(
                    call.function.name, start_time - queued_at, time.monotonic() - start_time
                )

    def _abandon(
        self,
        tool: Tool,
        bound: functools.partial[Any],
        job: asyncio.Future[Outcome],
        instance: Instance | None,
    ) -> None:
        self._executors.mark_abandoned(tool, job)
        if isinstance(job, asyncio.Task):
            if not tool.process:  # the worker process would continue, and its slot would look free
                job.cancel()
            self._background_tasks.add(job)
            job.add_done_callback(self._background_tasks.discard)
        if instance is not None:
            instance.hanging_call = job
        if bound.func is tool.target and tool.is_class:
            job.add_done_callback(functools.partial(self._close_late, tool))

    def _close_late(self, tool: Tool, job: asyncio.Future[Outcome]) -> None:
        """Close an object whose constructor returned after its deadline."""
        if not job.cancelled() and job.result()[1] is None:
            self._run_in_background(self.close_object(tool, Instance(job.result()[0])))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        return task

    def _log(self, tool: Tool, error: BaseException) -> None:
        """Log a bug in a tool.

        The first error of each tool and exception type is logged at level ERROR with a traceback,
        later ones at level DEBUG.
        """
        kind = error.kind if isinstance(error, WorkerError) else type(error).__name__
        worker = isinstance(error, WorkerError | WorkerDied)
        description = exception_text(error) if worker else describe_for_log(error)
        if (tool.name, kind) in self._logged:
            log.debug("%s failed again: %s", tool.label, description)
        else:
            self._logged.add((tool.name, kind))
            log.error(
                "%s failed (logged once per tool and type): %s",
                tool.label,
                description,
                exc_info=error,
            )


def _late_error(message: str) -> UserCodeError:
    error = UserCodeError(message)
    error.is_late = True
    return error


class Executors:
    """The event loop, threads and worker processes in which the calls of a process run.

    Belongs to one event loop.
    """

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._threads = Threads(limits.threads, "tool")
        self._processes = Processes(limits.processes)
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._workers = asyncio.Semaphore(limits.processes)
        self._rate_limits: dict[str, RateLimit] = {}
        self._hanging: Counter[str] = Counter()

    async def start(
        self, tool: Tool, bound: functools.partial[Any], seconds: float, is_async: bool
    ) -> asyncio.Future[Outcome]:
        """Start a function as soon as the limits allow it.

        Args:
            tool: the tool, whose limits apply.
            bound: the tool, its constructor or one of its methods, with arguments by name.
            seconds: the time after which a worker process is killed. Not used for the event loop
                and threads.
            is_async: whether the function is a coroutine function.

        Raises:
            ToolServerError: the function could not start within `CallLimits.queue_seconds`.
        """
        limited = tool.max_concurrency or tool.rate_limit or tool.process
        is_free = not limited and (is_async or self._threads.has_room)  # true for most calls
        semaphore, seconds_to_start = None, self._limits.queue_seconds
        try:
            async with contextlib.nullcontext() if is_free else asyncio.timeout(seconds_to_start):
                if tool.max_concurrency:
                    new = asyncio.Semaphore(tool.max_concurrency)
                    await self._semaphores.setdefault(tool.name, new).acquire()
                    semaphore = self._semaphores[tool.name]
                if tool.rate_limit:
                    rate_limit = self._rate_limits.setdefault(tool.name, RateLimit(tool.rate_limit))
                    await rate_limit.wait(seconds_to_start)
                if tool.process:
                    await self._workers.acquire()
                    # Only the job itself may raise after this line: the end of the job releases the
                    # slot.
                    apply = functools.partial(self._processes.apply, bound.func, (), bound.keywords)
                    job = asyncio.create_task(run_catching(functools.partial(apply, seconds)))
                    job.add_done_callback(lambda _: self._workers.release())
                elif is_async:
                    job = asyncio.create_task(run_catching(bound))
                else:
                    job = await self._threads.start(bound)
        except BaseException as e:
            if semaphore is not None:
                semaphore.release()
            if isinstance(e, TimeoutError):
                raise self.overload_error(tool) from None
            raise
        if semaphore is not None:
            # Released when the job really ends: a call that hangs keeps its slot.
            job.add_done_callback(lambda _: semaphore.release())
        return job

    @property
    def is_worn_out(self) -> bool:
        """Whether so many threads were replaced that the process should start again."""
        return self._threads.replaced >= MAX_REPLACED

    def mark_abandoned(self, tool: Tool, job: asyncio.Future[Outcome]) -> None:
        """Count a call that nobody waits for any more, and replace its thread."""
        self._hanging[tool.name] += 1
        job.add_done_callback(lambda _: self._hanging.subtract((tool.name,)))
        if not (isinstance(job, asyncio.Task) or self.is_worn_out):
            self._threads.replace(job)

    def overload_error(self, tool: Tool) -> ToolServerError:
        """Return the error for a call that could not start in time."""
        limits = [plural(self._limits.threads, "thread")]
        if tool.process:
            limits = [f"processes: {self._limits.processes}"]
        if tool.max_concurrency:
            limits.append(f"max_concurrency={tool.max_concurrency}")
        if tool.rate_limit:
            limits.append(f"rate_limit={tool.rate_limit:g}")
        hung = ", ".join(f"{n} of {name!r}" for name, n in self._hanging.most_common(3) if n > 0)
        hung = hung and (
            f". Calls that hang: {hung}. They keep their slots of max_concurrency and, if more than"
            f" {MAX_REPLACED} hang, their threads. Set a timeout in the code of the tool, or"
            " process=True"
        )
        return ToolServerError(
            f"{tool.label}: a call could not start within {self._limits.queue_seconds:g} s"
            f" ({', '.join(limits)}){hung}"
        )

    def close(self) -> None:
        """Stop the worker processes and let the threads end. Hanging calls end with the process."""
        self._threads.close()
        self._processes.close()


async def run_catching(function: Callable[[], Awaitable[Any]]) -> Outcome:
    """Run an async function and return its outcome.

    Every exception is caught, because a `SystemExit` would stop the event loop.
    """
    try:
        return await function(), None
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None, e  # raised by the tool itself
    except BaseException as e:
        return None, e


class RateLimit:
    """Spreads the starts of one tool's calls over time. Belongs to one event loop.

    Args:
        rate: calls per second. They are spread evenly: there is no burst after a pause.
    """

    def __init__(self, rate: float):
        self._gap = 1.0 / rate
        self._next = 0.0

    async def wait(self, at_most: float) -> None:
        """Wait for the next free start time and use it.

        Raises:
            TimeoutError: the start time is more than `at_most` seconds away. This error is raised
                at once, and the start time stays free.
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
                if self._next == moment + self._gap:  # no other call has a later start time
                    self._next = moment
                raise


def cancel_waiters(waiters: Waiters) -> None:
    """End all of these waits. The jobs themselves continue until they end."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(True)


class Deadline:
    """One timer for all waits with the same timeout. Belongs to one event loop.

    Nearly every call ends long before its deadline. To set and cancel a timer for each call costs
    more than running an async tool.

    Args:
        seconds: the timeout of each wait.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._ends: dict[asyncio.Future[bool], float] = {}
        """The end of each wait, sorted by time."""
        self._is_timer_set = False

    async def wait(self, job: asyncio.Future[Any], waiters: Waiters | None = None) -> bool:
        """Wait until the job is done, the timeout passes or the wait is cancelled.

        `job.done()` tells whether the job is done.

        Args:
            job: the job. It continues to run even if the wait ends first.
            waiters: the wait is added to this set, so that `cancel_waiters` can end it.

        Returns:
            True if the wait was cancelled.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._ends[waiter] = loop.time() + self._seconds
        if not self._is_timer_set:
            self._is_timer_set = True
            loop.call_later(self._seconds, self._end_expired, loop)
        end_wait = functools.partial(_end_wait, waiter)
        job.add_done_callback(end_wait)
        if waiters is not None:
            waiters.add(waiter)
        try:
            return await waiter
        finally:
            del self._ends[waiter]
            job.remove_done_callback(end_wait)
            if waiters is not None:
                waiters.discard(waiter)

    def _end_expired(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits whose timeout has passed, and set the timer for the next one."""
        now = loop.time()
        for waiter, end in self._ends.items():
            if end > now:
                loop.call_later(end - now, self._end_expired, loop)
                return
            _end_wait(waiter)
        self._is_timer_set = False


def _end_wait(waiter: asyncio.Future[bool], _: object = None) -> None:
    if not waiter.done():
        waiter.set_result(False)


class ResultCache:
    """The cached results of one tool, by its arguments. Belongs to one event loop."""

    def __init__(self, max_size: int = MAX_CACHE_CHARACTERS):
        self._max_size = max_size
        self._total_size = 0
        self._results: OrderedDict[bytes, ToolResult] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[ToolResult]] = {}

    async def get_or_run(self, key: bytes, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Return the cached result, or join the call that is running, or run the call.

        Failures are not cached. If one of several waiting callers is cancelled, the others still
        get the result.

        Args:
            key: the arguments.
            run: makes the call.
        """
        entry = self._results.get(key)
        if entry is not None:
            self._results.move_to_end(key)
            return entry
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(self._run_and_cache(key, run))
        return await asyncio.shield(task)

    async def _run_and_cache(
        self, key: bytes, run: Callable[[], Awaitable[ToolResult]]
    ) -> ToolResult:
        try:
            result = await run()
        finally:
            del self._running[key]
        if result.ok:
            self._results[key] = result
            self._total_size += self._size(key, result)
            while self._total_size > self._max_size:
                self._total_size -= self._size(*self._results.popitem(last=False))
        return result

    @staticmethod
    def _size(key: bytes, result: ToolResult) -> int:
        return len(key) + len(result.content) + _OVERHEAD
