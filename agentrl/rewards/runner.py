"""Where reward functions run, so that none of them holds up the episodes that still play.

Ours that only look at text run where they are called, in microseconds. A plain function of the
user's runs in a thread, one that is async on the event loop, one that may hang or crash in a worker
process (`@reward(..., process=True)`): each with the deadline `reward.timeout_s`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.config import RewardConfig
from agentrl.errors import GraderCrash, Infrastructure, UserCodeError, user_code
from agentrl.http.time_limit import TimeLimit
from agentrl.workers import PerLoop, Processes, Threads, WorkerDied, WorkerError

THREADS = 32
"""Plain functions at once. One that is late gives its place to the next, but keeps its thread."""
MOST_THREADS = 1024
WAITING = 256
"""Async functions at once: judges have limits, and who waits for his turn is not late."""


class Late(Infrastructure):
    """A function was killed at its deadline."""


class _Places:
    """What belongs to one event loop."""

    def __init__(self):
        self.threads = Threads(MOST_THREADS)
        self.thread_places = asyncio.Semaphore(THREADS)
        self.async_places = asyncio.Semaphore(WAITING)


class Runner:
    """Runs a run's reward functions. Starts nothing before it is needed."""

    def __init__(self, config: RewardConfig):
        self._seconds = config.timeout_s
        self._workers = config.workers
        self._processes: Processes | None = None
        self._places = PerLoop(_Places, lambda places: places.threads.close())

    async def waiting(
        self, named: str, function: Callable[..., Any], args: Sequence[Any], given: Mapping
    ) -> Any:
        """What a coroutine function returns, within the deadline.

        Raises:
            UserCodeError: it raised.
            Infrastructure: it did not end in time, or said so itself.
        """
        try:
            async with self._places.get().async_places, TimeLimit(self._seconds):
                with user_code(named):
                    return await function(*args, **given)
        except TimeoutError:
            raise self._late(named) from None

    async def in_thread(
        self, named: str, function: Callable[..., Any], args: Sequence[Any], given: Mapping
    ) -> Any:
        """What a function returns, run in a thread; what it returns is awaited, if it can be.

        Raises:
            UserCodeError: it raised.
            Infrastructure: it did not end in time, or said so itself.
        """
        places = self._places.get()
        try:
            async with places.thread_places:
                future = await places.threads.start(partial(function, *args, **given))
                async with TimeLimit(self._seconds):
                    with user_code(named):
                        value, error = await future
                        if error is not None:
                            raise error
                        return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            raise self._late(named) from None

    async def in_process(
        self, named: str, function: Callable[..., Any], args: Sequence[Any], given: Mapping
    ) -> Any:
        """What a function returns, run in a process that is killed at the deadline.

        Raises:
            Late: it was killed.
            GraderCrash: its process died.
            UserCodeError: it raised.
            Infrastructure: as it raised it.
        """
        with user_code(named):
            try:
                return await self.pool().apply(function, args, given, self._seconds)
            except (TimeoutError, WorkerDied, WorkerError) as e:
                failed = e
        if isinstance(failed, TimeoutError):
            raise Late(str(self._late(named))) from failed
        if isinstance(failed, WorkerDied):
            raise GraderCrash(f"{named}: {failed}") from failed
        raise UserCodeError(f"{named} raised {failed}") from failed

    def close(self) -> None:
        """End threads and processes; what is called later starts new ones. Idempotent."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        for places in self._places.pop_all():
            places.threads.close()

    def _late(self, named: str) -> Infrastructure:
        return Infrastructure(f"{named} took longer than reward.timeout_s={self._seconds:g}")

    def pool(self) -> Processes:
        """The run's worker processes."""
        if self._processes is None:
            self._processes = Processes(self._workers)
        return self._processes
