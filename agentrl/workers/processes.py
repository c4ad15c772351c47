"""Worker processes that can be killed: for functions that may hang, crash or eat all memory.

A thread cannot be stopped, and a regular expression or a C library gone wild holds the whole
interpreter. Here it costs one process, which another takes the place of. Workers are started anew,
never forked: the process they belong to may hold a GPU and dozens of threads.
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
from agentrl.workers import child
from agentrl.workers.child_process import ChildProcess
from agentrl.workers.loops import PerLoop
from agentrl.workers.threads import Threads

log = logging.getLogger("agentrl")

START_SECONDS = 60.0
"""Most seconds for a worker to start and to load a function's module."""
RECYCLE = 2000
"""After so many calls a worker makes room for a new one: libraries keep what they have computed."""
LOGGED_LINES = 50
"""Of what a worker prints, the first so many lines are logged."""
LAST_LINES, MAX_LINE = 8, 500
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""A worker runs one function at a time, and each thread of a pool reserves memory."""


class WorkerDied(AgentRLError, RuntimeError):
    """The process that ran a function is gone; the message says how, and what it said last."""


class WorkerError(AgentRLError, RuntimeError):
    """A function raised something in its worker."""

    def __init__(self, kind: str, text: str, where: str = ""):
        super().__init__(kind, text, where)
        self.kind = kind
        """The exception's type, such as "KeyError"."""
        self.text = text
        """What it said."""
        self.where = where
        """FILE:LINE, or nothing."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.where})" if self.where else "")


class Processes:
    """At most `count` functions at once, each in a process that can be killed.

    Processes start with the first calls that need them, and end with this one, by whatever death.
    """

    def __init__(self, count: int, *, memory_mb: int = 2048):
        """Start nothing yet.

        Args:
            count: processes at most.
            memory_mb: MiB of address space that each may take.
        """
        self._count = count
        self._memory_mb = memory_mb
        # Last in, first out: as few are started as there are calls at once.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(count):
            self._places.put(None)
        self._running: set[_Worker] = set()
        self._threads = PerLoop(lambda: Threads(count), Threads.close)
        self._closed = False

    async def call(
        self, function: Callable[..., Any], *args: Any, seconds: float, **kwargs: Any
    ) -> Any:
        """What the function returns, run in a worker; a coroutine function is run to its end.

        Args:
            function: of a module's top level, so that the worker finds it by its name.
            args: its arguments; anything that can be pickled.
            seconds: most that it may run; waiting for a free worker and loading do not count.
            kwargs: its arguments by name.

        Raises:
            TimeoutError: it did not end in time; it was killed.
            WorkerDied: its process ended under it, or needed more than `memory_mb`.
            WorkerError: it raised; but `ToolError`, `UserError` and `Infrastructure` come as such.
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
        """As `call`, for arguments that others named: one of them may be called `seconds`."""
        packed = pickle.dumps((tuple(args), dict(kwargs)))
        job = pickle.dumps((*check_reachable(function), packed))
        return await self._threads.get().run(partial(self._run, job, seconds))

    def close(self) -> None:
        """Kill the workers; calls that still run end with `WorkerDied`. Idempotent."""
        self._closed = True
        for worker in [*self._running]:
            worker.process.kill()
        with contextlib.suppress(queue.Empty):
            while True:
                if worker := self._places.get_nowait():
                    worker.process.stop()
        for _ in range(self._count):  # whoever waits for one finds that there is none
            self._places.put(None)
        for threads in self._threads.pop_all():
            threads.close()

    def _run(self, job: bytes, seconds: float) -> Any:
        worker, keep = self._places.get(), False
        try:
            if self._closed:
                raise WorkerDied("the pool of workers is closed")
            if worker is None:
                worker = _Worker(self._memory_mb)
            self._running.add(worker)
            done, value = worker.run(job, seconds)
            keep = worker.calls < RECYCLE and not self._closed
        finally:
            if worker is not None:
                self._running.discard(worker)
                if not keep:
                    worker.process.stop()
            self._places.put(worker if keep else None)
        if not done:
            *told, whole = value
            raise pickle.loads(whole) if whole else WorkerError(*told)
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
        """Whether the function returned, and what it returned or raised."""
        late = f"its module did not load in {START_SECONDS:g} s"
        try:
            end = time.monotonic() + START_SECONDS
            if not self.calls:
                self.process.send(pickle.dumps((sys.path, self._memory_mb)), end)
            self.calls += 1
            self.process.send(job, end)
            reply = self.process.receive(end)
            if reply == child.LOADED:
                late = f"not done in {seconds:g} s"
                reply = self.process.receive(time.monotonic() + seconds)
        except TimeoutError:
            raise TimeoutError(late) from None
        except EOFError:
            raise WorkerDied(self._death()) from None
        return pickle.loads(reply)

    def _death(self) -> str:
        """How the process ended, and what it said last."""
        if not self.process.wait(1.0):
            self.process.stop()
        code = self.process.exit_code or 0
        if code == child.OUT_OF_MEMORY:
            how = f"it needed more than {self._memory_mb} MiB of memory"
        elif code < 0:
            how = f"it ended by {signal.Signals(-code).name}"
        else:
            how = f"it ended with exit code {code}"
        lines = list(self.process.tail)[-LAST_LINES:]
        last = "".join(f"\n  | {line[:MAX_LINE]}" for line in lines)
        return f"the worker process died: {how}" + (f". Its last lines:{last}" if last else "")

    def _log(self, line: str) -> None:
        if self._logged < LOGGED_LINES:
            log.info("worker %d: %s", self.process.pid, line[:MAX_LINE])
        self._logged += 1


def check_reachable(function: Callable[..., Any]) -> tuple[str, str, str]:
    """File (of a user's file), module and name by which a worker finds the function.

    Raises:
        ConfigError: it finds it by none: a lambda, a method of an object, a function in a function
            or of a program's own file.
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    home = sys.modules.get(module or "")
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found) or inspect.ismethod(function) or module == "__main__":
        raise ConfigError(
            f"{name or repr(function)} of {module or 'nowhere'} cannot run in a worker process,"
            " which looks for it by its name: define it at the top level of a file of its own"
        )
    file = str(getattr(home, "__file__", ""))
    return (file if module.startswith("agentrl_user_") else ""), module, name
