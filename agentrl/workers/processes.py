"""Worker processes that can be killed: for functions that may hang, crash or use all memory.

A thread cannot be stopped, and a regular expression or a C library that hangs blocks the whole
interpreter. A worker process that hangs is killed and replaced. Workers are started as new
processes and not forked, because this process may use a GPU and have dozens of threads.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pickle
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.errors import AgentRLError, ConfigError
from agentrl.registry import USER_MODULE
from agentrl.workers import child
from agentrl.workers.child_process import ChildProcess
from agentrl.workers.loops import PerLoop
from agentrl.workers.threads import Threads

log = logging.getLogger("agentrl")

START_SECONDS = 60.0
"""The longest time for a worker to start and to import the module of a function."""
MAX_CALLS = 2000
"""The number of calls after which a worker is replaced, because libraries cache their results."""
LOGGED_LINES = 50
"""The number of lines of a worker that are logged."""
LAST_LINES, MAX_LINE = 8, 500
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""A worker runs one function at a time, and each thread of a library's pool reserves memory."""


class WorkerDied(AgentRLError, RuntimeError):
    """The process that ran a function ended. The message says how, with its last lines."""


class WorkerError(AgentRLError, RuntimeError):
    """A function raised an exception in its worker."""

    def __init__(self, kind: str, text: str, where: str = ""):
        super().__init__(kind, text, where)
        self.kind = kind
        """The type of the exception, such as "KeyError"."""
        self.text = text
        """The message of the exception."""
        self.where = where
        """FILE:LINE, or "" if unknown."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.where})" if self.where else "")


class Processes:
    """A pool that runs at most `count` functions at once, each in a process that can be killed.

    Processes are started by the first calls that need them. They end when this process ends, even
    if this process is killed.
    """

    def __init__(self, count: int, *, memory_mb: int = 2048, max_calls: int = MAX_CALLS):
        """Create the pool; start no process yet.

        Args:
            count: the largest number of processes.
            memory_mb: MiB of address space that each process may use.
            max_calls: the number of calls after which a process is replaced.
        """
        self._count, self._max_calls = count, max_calls
        self._memory_mb = memory_mb
        # Last in, first out: no more processes are started than there are calls at once.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._running: set[_Worker] = set()
        self._threads = PerLoop(lambda: Threads(count, "worker-process"), Threads.close)
        self._closed = False

    async def call(
        self, function: Callable[..., Any], *args: Any, seconds: float, **kwargs: Any
    ) -> Any:
        """Run a function in a worker and return its result. A coroutine function is awaited.

        Args:
            function: a function at the top level of a module, which a worker imports by its name.
            args: the arguments; anything that can be pickled.
            seconds: the time limit. Waiting for a free worker and importing the module do not
                count.
            kwargs: the keyword arguments.

        Raises:
            TimeoutError: the function did not return in time; its process was killed.
            WorkerDied: the process ended, or needed more than `memory_mb`.
            WorkerError: the function raised an exception. `ToolError`, `UserError` and
                `Infrastructure` are raised unchanged.
            ConfigError: the worker could not find the function.
        """
        return await self.apply(function, args, kwargs, seconds)

    async def apply(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seconds: float,
    ) -> Any:
        """Run a function as `call` does. Its keyword arguments may include `seconds`."""
        pickled_arguments = pickle.dumps((tuple(args), dict(kwargs)))
        job = pickle.dumps((*locate_function(function), pickled_arguments))
        return await self._threads.get().run(partial(self._run, job, seconds))

    def close(self) -> None:
        """Kill the workers. Calls that still run raise `WorkerDied`. Idempotent."""
        self._closed = True
        for worker in [*self._running]:
            worker.process.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                if worker := self._idle.get_nowait():
                    worker.process.stop()
        for _ in range(self._count):  # Wake up the threads that wait for a worker.
            self._idle.put(None)
        for threads in self._threads.pop_all():
            threads.close()

    def _run(self, job: bytes, seconds: float) -> Any:
        worker, is_reusable = self._idle.get(), False
        try:
            if self._closed:
                raise WorkerDied("the pool of workers is closed")
            if worker is None:
                worker = _Worker(self._memory_mb)
            self._running.add(worker)
            succeeded, value = worker.run(job, seconds)
            is_reusable = worker.calls < self._max_calls and not self._closed
        finally:
            if worker is not None:
                self._running.discard(worker)
                if not is_reusable:
                    worker.process.stop()
            self._idle.put(worker if is_reusable else None)
        if not succeeded:
            *description, pickled = value
            raise pickle.loads(pickled) if pickled else WorkerError(*description)
        return value


class _Worker:
    """One process; used by one thread at a time."""

    def __init__(self, memory_mb: int):
        self._memory_mb = memory_mb
        self._logged = 0
        self.process = ChildProcess(
            [sys.executable, "-P", child.__file__],
            environment={name: os.environ.get(name, "1") for name in ONE_THREAD},
            on_line=self._log,
        )
        self.calls = 0

    def run(self, job: bytes, seconds: float) -> tuple[bool, Any]:
        """Run a function. Return True and its result, or False and the exception as a tuple."""
        timeout_message = f"its module did not load in {START_SECONDS:g} s"
        try:
            end = time.monotonic() + START_SECONDS
            if not self.calls:
                self.process.send(pickle.dumps((sys.path, self._memory_mb)), end)
            self.calls += 1
            self.process.send(job, end)
            reply = self.process.receive(end)
            if reply == child.LOADED:
                timeout_message = f"not done in {seconds:g} s"
                reply = self.process.receive(time.monotonic() + seconds)
        except TimeoutError:
            raise TimeoutError(timeout_message) from None
        except EOFError:
            raise WorkerDied(self._describe_end()) from None
        return pickle.loads(reply)

    def _describe_end(self) -> str:
        """Return a sentence about how the process ended, with the last lines of its output."""
        if not self.process.wait(1.0):
            self.process.stop()
        code = self.process.exit_code or 0
        if code == child.OUT_OF_MEMORY:
            cause = f"it needed more than {self._memory_mb} MiB of memory"
        elif code < 0:
            cause = f"it ended by {signal.Signals(-code).name}"
        else:
            cause = f"it ended with exit code {code}"
        lines = list(self.process.tail)[-LAST_LINES:]
        last = "".join(f"\n  | {line[:MAX_LINE]}" for line in lines)
        return f"the worker process died: {cause}" + (f". Its last lines:{last}" if last else "")

    def _log(self, line: str) -> None:
        if self._logged < LOGGED_LINES:
            log.info("worker %d: %s", self.process.pid, line[:MAX_LINE])
        self._logged += 1


def locate_function(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the file, the module and the name by which a worker imports a function.

    The file is "" unless the function is defined in a file of the user.

    Raises:
        ConfigError: the function cannot be imported by name: it is a lambda, a bound method, or
            defined within a function or in `__main__`.
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    home = sys.modules.get(module or "")
    target: Any = home
    for part in name.split("."):
        target = getattr(target, part, None)
    if not callable(target) or inspect.ismethod(function) or module == "__main__":
        raise ConfigError(
            f"{name or repr(function)} (module {module or 'unknown'}) cannot run in a worker"
            " process, which imports it by its name. Define it at the top level of a separate file"
        )
    file = str(getattr(home, "__file__", ""))
    return (file if module.startswith(USER_MODULE) else ""), module, name
